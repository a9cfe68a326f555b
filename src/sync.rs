//! Locks and atomics: those of std, or those of loom when `scripts/loom` checks its models.

use std::sync::{LockResult, PoisonError};

#[cfg(all(test, tower_ratelimit_loom))]
pub(crate) mod race;

#[cfg(tower_ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(tower_ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Returns the guard of a lock, even if a thread has panicked while it held the lock.
///
/// All locks of the crate may be used after a panic: the code that holds them calls nothing that
/// panics, or leaves the data in order if it does.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
