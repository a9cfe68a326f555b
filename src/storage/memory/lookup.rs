//! Locates and locks the states of a request's key.

use super::MemoryInner;
use super::padded::Padded;
use super::shard::{KeyHash, Shard};
use crate::storage::StorageRequest;
use crate::sync::MutexGuard;
use crate::time::Timestamp;

/// The location of a key's states, and the time of the request.
#[derive(Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) key: KeyHash,
    pub(super) padded: &'a Padded,
    /// The number of the shard.
    pub(super) number: usize,
    pub(super) now: Timestamp,
}

/// A [`Located`] key, with the lock of its shard.
pub(super) struct Lookup<'a> {
    pub(super) shard: MutexGuard<'a, Shard>,
    pub(super) padded: &'a Padded,
    pub(super) number: usize,
    pub(super) key: KeyHash,
    pub(super) now: Timestamp,
}

impl MemoryInner {
    #[inline(always)]
    pub(super) fn locate_request(&self, request: &StorageRequest<'_>) -> Located<'_> {
        let (key, number) = self.locate(request.policy, request.key);
        // The clock is read last, because the processor overlaps its latency with the lock's.
        let now = self.clock.now();
        Located { key, padded: &self.shards[number], number, now }
    }

    /// Locks the shard of the key.
    #[inline(always)]
    pub(super) fn look_up<'a>(&self, located: Located<'a>) -> Lookup<'a> {
        let Located { key, padded, number, now } = located;
        let mut shard = padded.lock();
        let now = shard.time(now, &self.clock);
        Lookup { shard, padded, number, key, now }
    }

    /// Unlocks the shard, and sweeps if a sweep is due.
    #[inline(always)]
    pub(super) fn finish(&self, mut lookup: Lookup<'_>) {
        if lookup.shard.is_sweep_due() {
            drop(lookup.shard);
            self.sweep(lookup.now);
        }
    }
}
