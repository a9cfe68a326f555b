//! Locks and atomics: those of std, or those of loom when `scripts/loom` checks its models.

#[cfg(all(test, tower_ratelimit_loom))]
pub(crate) mod race;

#[cfg(tower_ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(tower_ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
