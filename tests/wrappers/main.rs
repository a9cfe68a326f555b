//! Wrappers: boxed storages, timeout, breaker, refusal cache, leases.

mod any;
mod breaker;
mod leases;
mod leases_lost_replies;
mod leases_shutdown;
mod refusal_cache;
mod stacked;
mod timeout;
