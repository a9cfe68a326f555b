//! Storages around a storage: timeout, breaker, refusal cache, leases.

mod breaker;
mod leases;
mod refusal_cache;
mod stacked;
mod timeout;
