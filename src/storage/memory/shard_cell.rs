//! A shard with its lock, and the published state of the key that it refused last.

use std::hint;
use std::sync::TryLockError;

use super::shard::{KeyHash, Shard};
use crate::strategy::State;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::unpoisoned;
use crate::sync::{Mutex, MutexGuard};
use crate::time::Timestamp;

/// A shard with its lock and refusal hint, on cache lines that no other shard uses.
///
/// The first line holds everything that a hit needs, unless its key has just been refused.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct ShardCell {
    /// The hash of the key in `hint`, or 0. Most hits have another hash and need not read the hint,
    /// which is on another cache line.
    ///
    /// Readers also compare the hash in the hint, so relaxed loads and stores are enough. It
    /// changes only under the lock and together with the hint, so writers can rely on it.
    hint_hash: AtomicU64,
    pub(super) shard: Mutex<Shard>,
    hint: RefusalHint,
}

impl ShardCell {
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
        unpoisoned(self.shard.lock())
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

/// The state of the last key that a shard refused. Readers need no lock.
///
/// So further requests of a client that is being refused take no lock. Threads that refuse them at
/// the same time write no shared cache line.
///
/// This is a sequence lock:
///
/// - A thread writes only while it holds the shard's lock. It makes the version odd, writes the
///   fields, and makes the version even again.
/// - A reader uses the fields only if the version was even and the same before and after it read
///   them.
/// - The writer's release fence pairs with the reader's acquire fence. A reader that has read any
///   field of a write also sees that the version has changed.
///
/// The caller must [clear the hint](Self::clear) before it changes the key's state. So the state of
/// a published hint is current, and refuses until time has passed. The clock can go back, so a hint
/// is not read before the time at which it was written.
///
/// `scripts/loom` checks this protocol.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct RefusalHint {
    version: AtomicU64,
    hash: AtomicU64,
    limit_hash: AtomicU64,
    until: AtomicU64,
    amounts: AtomicU64,
    written: AtomicU64,
}

impl RefusalHint {
    /// Returns the state of the key, or `None` if the hint is for another key, was written after
    /// `now`, or is being written.
    #[inline]
    pub(super) fn read(&self, key: KeyHash, digest: u32, now: Timestamp) -> Option<State> {
        let version = self.version.load(Ordering::Acquire);
        let hash = self.hash.load(Ordering::Relaxed);
        let limit_hash = self.limit_hash.load(Ordering::Relaxed);
        let until = self.until.load(Ordering::Relaxed);
        let amounts = self.amounts.load(Ordering::Relaxed);
        let written = self.written.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_consistent = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        let is_for_key = hash == key.hash && limit_hash == u64::from(key.limit_hash(digest));
        if !is_consistent || !is_for_key || now.as_micros() < written {
            return None;
        }
        #[allow(clippy::cast_possible_truncation)] // the two halves
        let amounts = [(amounts >> 32) as u32, amounts as u32];
        Some(State::Counts { until: Timestamp::from_micros(until), amounts })
    }

    /// Publishes the state of a key that is refused. The caller holds the shard's lock.
    pub(super) fn publish(&self, key: KeyHash, digest: u32, state: &State, now: Timestamp) {
        if let State::Counts { until, amounts: [first, second] } = *state {
            let amounts = u64::from(first) << 32 | u64::from(second);
            self.write(key.hash, key.limit_hash(digest).into(), until, amounts, now);
        }
    }

    /// Clears the hint. The caller holds the shard's lock.
    pub(super) fn clear(&self) {
        // A key whose hash is 0 may match, but a state that expired at the epoch refuses nothing.
        self.write(0, 0, Timestamp::EPOCH, 0, Timestamp::EPOCH);
    }

    fn write(&self, hash: u64, limit_hash: u64, until: Timestamp, amounts: u64, now: Timestamp) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.hash.store(hash, Ordering::Relaxed);
        self.limit_hash.store(limit_hash, Ordering::Relaxed);
        self.until.store(until.as_micros(), Ordering::Relaxed);
        self.amounts.store(amounts, Ordering::Relaxed);
        self.written.store(now.as_micros(), Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}
