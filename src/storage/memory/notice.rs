use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::shard::KeyHash;
use crate::Timestamp;
use crate::strategy::State;

/// The last key of a shard that was refused, and its state: readable without the lock, so that a key which is hammered while
/// it is refused holds up nobody, and two threads that refuse it write nothing that the other reads.
///
/// It is a sequence lock: an odd version is being written, and what was read between two equal even ones belongs together.
/// Only who holds the shard's lock writes. A key's notice is [taken down](Self::take_down) before its state changes in any
/// other way than by time.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Notice {
    version: AtomicU64,
    hash: AtomicU64,
    limit: AtomicU64,
    until: AtomicU64,
    amounts: AtomicU64,
}

impl Notice {
    /// The state of this key, if it is the one that was refused.
    #[inline]
    pub(super) fn read(&self, key: KeyHash, digest: u32) -> Option<State> {
        let version = self.version.load(Ordering::Acquire);
        let hash = self.hash.load(Ordering::Relaxed);
        let limit = self.limit.load(Ordering::Relaxed);
        let until = self.until.load(Ordering::Relaxed);
        let amounts = self.amounts.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let belong_together = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        if !belong_together || hash != key.hash || limit != u64::from(key.limit(digest)) {
            return None;
        }
        #[allow(clippy::cast_possible_truncation)] // the two halves
        let amounts = [(amounts >> 32) as u32, amounts as u32];
        Some(State::Counts { until: Timestamp::from_micros(until), amounts })
    }

    /// Says that this key is refused. The caller holds the shard's lock.
    pub(super) fn put_up(&self, key: KeyHash, digest: u32, state: &State) {
        if let State::Counts { until, amounts: [first, second] } = *state {
            let amounts = u64::from(first) << 32 | u64::from(second);
            self.write(key.hash, key.limit(digest).into(), until, amounts);
        }
    }

    /// Says nothing more. The caller holds the shard's lock.
    pub(super) fn take_down(&self) {
        // What has been forgotten since the epoch is refused nothing.
        self.write(0, 0, Timestamp::EPOCH, 0);
    }

    fn write(&self, hash: u64, limit: u64, until: Timestamp, amounts: u64) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.hash.store(hash, Ordering::Relaxed);
        self.limit.store(limit, Ordering::Relaxed);
        self.until.store(until.as_micros(), Ordering::Relaxed);
        self.amounts.store(amounts, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn key(hash: u64) -> KeyHash {
        KeyHash { hash, rest: 0 }
    }

    fn state(number: u32) -> State {
        State::Counts { until: Timestamp::from_micros(number.into()), amounts: [number, number] }
    }

    #[test]
    fn says_it_of_the_last_key_only_and_until_it_is_taken_down() {
        let notice = Notice::default();
        notice.put_up(key(1), 0, &state(1));
        assert_eq!(notice.read(key(1), 0), Some(state(1)));
        assert_eq!(notice.read(key(1), 2), None, "another limit");
        notice.put_up(key(2), 0, &state(2));
        assert_eq!((notice.read(key(1), 0), notice.read(key(2), 0)), (None, Some(state(2))));
        notice.take_down();
        assert_eq!(notice.read(key(2), 0), None);
    }

    /// What is read was written together, however the writer is interrupted.
    #[test]
    fn is_never_read_half_written() {
        let notice = Notice::default();
        let done = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in (1..).take_while(|_| done.load(Ordering::Relaxed) == 0) {
                    notice.put_up(key(u64::from(number % 2) + 1), 0, &state(number));
                }
            });
            for hash in [1, 2].into_iter().cycle().take(3_000_000) {
                let Some(read) = notice.read(key(hash), 0) else { continue };
                let State::Counts { amounts: [number, _], .. } = read else { unreachable!() };
                assert_eq!((read, u64::from(number % 2) + 1), (state(number), hash));
            }
            done.store(1, Ordering::Relaxed);
        });
    }
}
