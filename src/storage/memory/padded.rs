use super::refusal_hint::RefusalHint;
use super::shard::{KeyHash, Shard};
use crate::Timestamp;
use crate::strategy::State;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A shard with its lock and its notice, on cache lines that no other shard uses.
///
/// The first line holds everything that a hit needs, unless its key has just been refused.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Padded {
    /// The hash of the key that the notice is about, or 0. For most hits it is the hash of another key, and
    /// they need not read the notice, which is on another cache line.
    ///
    /// It is only a hint for readers, so relaxed loads and stores are enough: the notice has the hash too. It
    /// changes only under the lock and together with the notice, so a writer can rely on it.
    noticed: AtomicU64,
    pub(super) shard: Mutex<Shard>,
    notice: RefusalHint,
}

impl Padded {
    /// Returns the published state of this key, if there is one. Takes no lock.
    #[inline(always)]
    pub(super) fn noticed(&self, key: KeyHash, digest: u32, now: Timestamp) -> Option<State> {
        if self.noticed.load(Ordering::Relaxed) == key.hash { self.notice.read(key, digest, now) } else { None }
    }

    /// Publishes the state of a key that is refused. The caller holds the lock.
    pub(super) fn publish(&self, key: KeyHash, digest: u32, state: &State, now: Timestamp) {
        self.notice.publish(key, digest, state, now);
        self.noticed.store(key.hash, Ordering::Relaxed);
    }

    /// Removes the published state, whichever key it is of. The caller holds the lock.
    pub(super) fn take_down_any(&self) {
        self.retract(self.noticed.load(Ordering::Relaxed));
    }

    /// Removes the published state of keys with this hash. The caller holds the lock and is about to change
    /// the state of such a key.
    #[inline(always)]
    pub(super) fn retract(&self, hash: u64) {
        if self.noticed.load(Ordering::Relaxed) == hash {
            self.notice.retract();
            self.noticed.store(0, Ordering::Relaxed);
        }
    }
}
