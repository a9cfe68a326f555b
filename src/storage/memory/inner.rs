//! The shards of a storage and what they share: where a key is, its lock, and the sweeps.

use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use foldhash::quality::RandomState;

use super::kept_keys::KeptKeys;
use super::shard::{KeyHash, Shard};
use super::shard_cell::ShardCell;
use super::size::{Bounds, Size};
use super::time::StorageClock;
use super::usage::{Counts, MemoryUsage};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::StorageRequest;
use crate::sync::MutexGuard;
use crate::time::{Timestamp, micros};

/// The decision on a hit of a new key if a [`MemoryStorage`](super::MemoryStorage) is full and cannot
/// evict another key. Defaults to `Refuse`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a new key is either refused or admitted")]
pub enum OnFull {
    /// Refuses the hit. All limits hold, and new clients are refused until a stored key can be
    /// evicted.
    #[default]
    Refuse,
    /// Admits the hit without storing it. New clients are served without limits until a stored key
    /// can be evicted.
    Admit,
}

pub(super) struct MemoryInner {
    pub(super) shards: Box<[ShardCell]>,
    /// The number of bits by which the upper 63 bits of a hash are shifted right to get the number
    /// of its shard.
    shift: u32,
    pub(super) usage: MemoryUsage,
    pub(super) bounds: Bounds,
    pub(super) on_full: OnFull,
    pub(super) counts: Counts,
    /// The names of the keys, if the storage lists them.
    pub(super) kept: Option<KeptKeys>,
    /// The times, in microseconds, until which a search for a key to evict skips the other shards.
    /// The first is for any key, the second for a key with a log.
    pub(super) full_until: [AtomicU64; 2],
    /// The number of the shard that is being swept.
    sweeping: AtomicUsize,
    /// `true` if the last sweep found no expired state.
    is_clean: AtomicBool,
    secrets: [RandomState; 2],
    /// The resolution of the clock, in microseconds.
    pub(super) resolution: u64,
    pub(super) clock: StorageClock,
}

/// The number of keys that share a lock when the storage is full. It is small, so that growing a
/// table never takes long.
pub(super) const KEYS_PER_SHARD: usize = 8_192;

/// The minimum number of shards, unless they would have very few keys. While the table of a shard is
/// resized, the old table and the new one exist. With 64 shards, the old one takes about a 64th of the
/// memory.
const MIN_SHARDS: usize = 64;

/// The smallest number of keys for which a small storage has another shard.
const MIN_KEYS_PER_SHARD: usize = 128;

/// The number of decisions per sweep, while sweeps find expired states.
const SWEEP_EVERY: u32 = 16;

/// The number of decisions per sweep after a sweep that found none. A sweep takes a cache line of another
/// shard, so more of them are 4 % of the time of a hit with 1,000 keys.
const SWEEP_CLEAN_EVERY: u32 = 64;

/// The location of a key's states, and the time of the request.
#[derive(Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) key: KeyHash,
    pub(super) cell: &'a ShardCell,
    /// The number of the shard.
    pub(super) number: usize,
    pub(super) now: Timestamp,
}

/// A [`Located`] key, with the lock of its shard.
pub(super) struct LockedKey<'a> {
    pub(super) shard: MutexGuard<'a, Shard>,
    pub(super) cell: &'a ShardCell,
    pub(super) number: usize,
    pub(super) key: KeyHash,
    pub(super) now: Timestamp,
}

impl<'a> LockedKey<'a> {
    pub(super) fn located(&self) -> Located<'a> {
        let &Self { cell, number, key, now, .. } = self;
        Located { key, cell, number, now }
    }
}

impl MemoryInner {
    pub(super) fn new(bounds: Bounds, on_full: OnFull, clock: StorageClock, keeps_keys: bool) -> Self {
        let few = (bounds.keys / MIN_KEYS_PER_SHARD).min(MIN_SHARDS);
        let shards = (bounds.keys / KEYS_PER_SHARD).max(few).clamp(1, 4_096).next_power_of_two();
        Self {
            shards: (0..shards).map(|_| ShardCell::default()).collect(),
            shift: u64::BITS - 1 - shards.trailing_zeros(),
            usage: MemoryUsage::default(),
            bounds,
            on_full,
            counts: Counts::default(),
            kept: keeps_keys.then(|| KeptKeys::new(shards)),
            full_until: Default::default(),
            sweeping: AtomicUsize::new(0),
            is_clean: AtomicBool::new(true),
            secrets: [RandomState::default(), RandomState::default()],
            resolution: micros(clock.resolution()),
            clock,
        }
    }

    /// Returns the keyed hash of the key under this policy, and the number of its shard.
    #[inline]
    pub(super) fn locate(&self, policy: &Policy, key: &Key) -> (KeyHash, usize) {
        let words = key.as_words();
        let half = |secret: &RandomState| {
            let mut hasher = secret.build_hasher();
            if let Some(words) = words {
                hasher.write_u64(words[0]);
                hasher.write_u64(words[1]);
            } else {
                hasher.write(key.as_bytes());
            }
            hasher.finish()
        };
        let (first, second) = (half(&self.secrets[0]), half(&self.secrets[1]));
        let digest = policy.digest();
        #[allow(clippy::cast_possible_truncation)] // the two halves of the digest
        let (hash, rest) = (first ^ (digest >> 64) as u64, second ^ digest as u64);
        // Two shifts, because a single one cannot shift by 64 bits if there is only one shard.
        let number = (rest >> 1).wrapping_shr(self.shift);
        #[allow(clippy::cast_possible_truncation)] // less than the number of shards, and the other half
        let (number, rest) = (number as usize, rest as u32);
        (KeyHash { hash, rest }, number)
    }

    #[inline(always)]
    pub(super) fn locate_request(&self, request: &StorageRequest<'_>) -> Located<'_> {
        let (key, number) = self.locate(request.policy, request.key);
        // The clock is read last, because the processor overlaps its latency with the lock's.
        let now = self.clock.now();
        Located { key, cell: &self.shards[number], number, now }
    }

    /// Locks the shard of the key.
    #[inline(always)]
    pub(super) fn lock<'a>(&self, located: Located<'a>) -> LockedKey<'a> {
        let Located { key, cell, number, now } = located;
        let mut shard = cell.lock();
        let now = shard.time(now, &self.clock);
        LockedKey { shard, cell, number, key, now }
    }

    /// Unlocks the shard, and sweeps if a sweep is due.
    #[inline(always)]
    pub(super) fn finish(&self, mut locked: LockedKey<'_>) {
        if self.is_sweep_due(locked.shard.count_hit()) {
            drop(locked.shard);
            self.sweep(locked.now);
        }
    }

    /// Returns `true` if a sweep is due after this number of decisions.
    #[inline]
    pub(super) fn is_sweep_due(&self, hits: u32) -> bool {
        hits.is_multiple_of(SWEEP_EVERY)
            && (hits.is_multiple_of(SWEEP_CLEAN_EVERY) || !self.is_clean.load(Ordering::Relaxed))
    }

    /// Sweeps a part of the next shard.
    pub(super) fn sweep(&self, now: Timestamp) {
        let number = self.sweeping.load(Ordering::Relaxed) % self.shards.len();
        // A sweep never waits for a lock.
        let Some(mut shard) = self.shards[number].try_lock() else { return };
        let swept = shard.sweep(now);
        if swept.is_at_end
            && let Some(kept) = &self.kept
        {
            kept.clean(number, &shard);
        }
        drop(shard);
        self.is_clean.store(swept.freed.slots == 0, Ordering::Relaxed);
        self.usage.resize(swept.freed, Size::default());
        #[cfg(feature = "metrics")]
        self.usage.publish();
        if swept.is_at_end {
            self.sweeping.store(number + 1, Ordering::Relaxed);
        }
        drop(swept.logs);
    }

    /// Keeps the name of a key that the request may add.
    #[inline]
    pub(super) fn keep_key(&self, shard: &Shard, number: usize, key: KeyHash, request: &StorageRequest<'_>) {
        if let Some(kept) = &self.kept {
            kept.keep(number, shard, key, request);
        }
    }

    /// Removes the states of a key.
    pub(super) fn clear(&self, policy: &Policy, key: &Key) {
        let (key, number) = self.locate(policy, key);
        let cell = &self.shards[number];
        let mut shard = cell.lock();
        cell.clear_hint(key.hash);
        let freed = shard.clear(key, policy.limit_digests());
        if let Some(kept) = &self.kept
            && shard.run(key).is_empty()
        {
            kept.remove(number, key);
        }
        drop(shard);
        self.usage.resize(freed, Size::default());
    }

    /// Removes all keys. Returns their number.
    pub(super) fn remove_all(&self) -> u64 {
        let remove = |(number, cell): (usize, &ShardCell)| {
            let mut shard = cell.lock();
            cell.clear_any_hint();
            let freed = shard.reset();
            self.kept.iter().for_each(|kept| kept.clear(number));
            drop(shard);
            self.usage.resize(freed, Size::default());
            freed.keys as u64
        };
        self.shards.iter().enumerate().map(remove).sum()
    }
}
