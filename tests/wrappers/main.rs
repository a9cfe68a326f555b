//! Wrappers: erased types, breaker, refusal cache, leases.

mod any;
mod breaker;
mod check_and_clear_all;
mod keys;
mod leases;
mod leases_eviction;
mod leases_lost_replies;
mod leases_members;
mod leases_shutdown;
mod refusal_cache;
mod settle;
mod several_keys;
mod stacked;
