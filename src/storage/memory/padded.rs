use std::hint;
use std::sync::{PoisonError, TryLockError};

use super::refusal_hint::RefusalHint;
use super::shard::{KeyHash, Shard};
use crate::strategy::State;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::time::Timestamp;

/// A shard with its lock and refusal hint, on cache lines that no other shard uses.
///
/// The first line holds everything that a hit needs, unless its key has just been refused.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Padded {
    /// The hash of the key in `hint`, or 0. Most hits have another hash and need not read the hint,
    /// which is on another cache line.
    ///
    /// Readers also compare the hash in the hint, so relaxed loads and stores are enough. It
    /// changes only under the lock and together with the hint, so writers can rely on it.
    hint_hash: AtomicU64,
    pub(super) shard: Mutex<Shard>,
    hint: RefusalHint,
}

impl Padded {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Shard> {
        self.try_lock().unwrap_or_else(|| self.lock_contended())
    }

    /// Spins before it blocks, because a shard is locked for less time than a thread takes to block
    /// and wake up. The wait doubles with each attempt, so that the holder of the lock can finish
    /// undisturbed.
    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, Shard> {
        for tries in 0..6 {
            for _ in 0..32 << tries.min(2) {
                hint::spin_loop();
            }
            if let Some(shard) = self.try_lock() {
                return shard;
            }
        }
        // A custom strategy that panics leaves its state unchanged or fresh, so the lock stays
        // usable.
        self.shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the shard, unless another thread has locked it.
    #[inline]
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Shard>> {
        match self.shard.try_lock() {
            Ok(shard) => Some(shard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the published state of this key, if there is one. Takes no lock.
    #[inline(always)]
    pub(super) fn published(&self, key: KeyHash, digest: u32, now: Timestamp) -> Option<State> {
        if self.hint_hash.load(Ordering::Relaxed) == key.hash { self.hint.read(key, digest, now) } else { None }
    }

    /// Publishes the state of a key that is refused. The caller holds the lock.
    pub(super) fn publish(&self, key: KeyHash, digest: u32, state: &State, now: Timestamp) {
        self.hint.publish(key, digest, state, now);
        self.hint_hash.store(key.hash, Ordering::Relaxed);
    }

    /// Removes the published state of any key. The caller holds the lock.
    pub(super) fn clear_any_hint(&self) {
        self.clear_hint(self.hint_hash.load(Ordering::Relaxed));
    }

    /// Removes the published state of keys with this hash. The caller holds the lock and is about
    /// to change the state of such a key.
    #[inline(always)]
    pub(super) fn clear_hint(&self, hash: u64) {
        if self.hint_hash.load(Ordering::Relaxed) == hash {
            self.hint.clear();
            self.hint_hash.store(0, Ordering::Relaxed);
        }
    }
}
