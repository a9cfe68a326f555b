//! The locked shards of several keys.

use super::super::inner::MemoryInner;
use super::super::shard::{KeyHash, Shard};
use crate::sync::MutexGuard;
use crate::time::Timestamp;

/// The place of a member's states.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) key: KeyHash,
    /// The number of the shard.
    pub(super) number: usize,
    /// The index of the member that has the lock of the shard.
    pub(super) owner: usize,
}

/// The shards of several keys, each locked once.
pub(super) struct Locked<'a, 's> {
    pub(super) inner: &'a MemoryInner,
    pub(super) places: &'s [Place],
    /// The lock of each member, unless another member with the same shard has it.
    pub(super) shards: &'s mut [Option<MutexGuard<'a, Shard>>],
    pub(super) now: Timestamp,
}

impl Locked<'_, '_> {
    /// Sets the time of the decision and of all shards. See [`Shard::time`].
    #[inline]
    pub(super) fn set_time(&mut self) {
        for shard in self.shards.iter_mut().flatten() {
            self.now = shard.time(self.now, &self.inner.clock);
        }
    }

    /// Counts a decision in each shard. Returns `true` if a sweep is due.
    #[inline]
    pub(super) fn count_hit(&mut self) -> bool {
        let shards = self.shards.iter_mut().flatten();
        shards.fold(false, |is_due, shard| self.inner.is_sweep_due(shard.count_hit()) | is_due)
    }

    /// Returns the shard of a member.
    #[inline]
    pub(super) fn shard(&mut self, at: usize) -> &mut Shard {
        self.shards[self.places[at].owner].as_mut().expect("the shard is locked")
    }
}
