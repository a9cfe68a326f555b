use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::notice::Notice;
use super::shard::{KeyHash, Shard};
use crate::strategy::State;

/// A shard on cache lines of its own, so that neighbours do not slow each other down. What every hit needs stands on the
/// first one.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Padded {
    /// The hash that the notice is about: nearly always another one's.
    noticed: AtomicU64,
    pub(super) shard: Mutex<Shard>,
    notice: Notice,
}

impl Padded {
    /// The state of this key, if it was refused a moment ago: without the lock.
    #[inline(always)]
    pub(super) fn noticed(&self, key: KeyHash, digest: u32) -> Option<State> {
        if self.noticed.load(Ordering::Relaxed) == key.hash { self.notice.read(key, digest) } else { None }
    }

    /// Says that this key is refused. The caller holds the lock.
    pub(super) fn put_up(&self, key: KeyHash, digest: u32, state: &State) {
        self.notice.put_up(key, digest, state);
        self.noticed.store(key.hash, Ordering::Relaxed);
    }

    /// Says nothing more of keys with this hash, whose state is about to change. The caller holds the lock.
    #[inline(always)]
    pub(super) fn take_down(&self, hash: u64) {
        if self.noticed.load(Ordering::Relaxed) == hash {
            self.notice.take_down();
            self.noticed.store(0, Ordering::Relaxed);
        }
    }
}
