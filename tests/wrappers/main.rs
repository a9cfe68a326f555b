//! Wrappers: boxed storages, timeout, breaker, refusal cache, leases.

mod boxed;
mod breaker;
mod leases;
mod leases_lost_replies;
mod leases_shutdown;
mod refusal_cache;
mod settle;
mod stacked;
mod timeout;
