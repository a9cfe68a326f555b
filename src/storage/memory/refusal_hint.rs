use super::shard::KeyHash;
use crate::strategy::State;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::time::Timestamp;

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
    limit: AtomicU64,
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
        let limit = self.limit.load(Ordering::Relaxed);
        let until = self.until.load(Ordering::Relaxed);
        let amounts = self.amounts.load(Ordering::Relaxed);
        let written = self.written.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_consistent = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        let is_for_key = hash == key.hash && limit == u64::from(key.limit(digest));
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
            self.write(key.hash, key.limit(digest).into(), until, amounts, now);
        }
    }

    /// Clears the hint. The caller holds the shard's lock.
    pub(super) fn clear(&self) {
        // A key whose hash is 0 may match, but a state that expired at the epoch refuses nothing.
        self.write(0, 0, Timestamp::EPOCH, 0, Timestamp::EPOCH);
    }

    fn write(&self, hash: u64, limit: u64, until: Timestamp, amounts: u64, now: Timestamp) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.hash.store(hash, Ordering::Relaxed);
        self.limit.store(limit, Ordering::Relaxed);
        self.until.store(until.as_micros(), Ordering::Relaxed);
        self.amounts.store(amounts, Ordering::Relaxed);
        self.written.store(now.as_micros(), Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(all(test, not(tower_ratelimit_loom)))]
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
    fn only_the_last_published_key_is_read() {
        let hint = RefusalHint::default();
        hint.publish(key(1), 0, &state(1), Timestamp::EPOCH);
        assert_eq!(hint.read(key(1), 0, Timestamp::EPOCH), Some(state(1)));
        assert_eq!(hint.read(key(1), 2, Timestamp::EPOCH), None, "another limit");
        hint.publish(key(2), 0, &state(2), Timestamp::EPOCH);
        assert_eq!(
            (hint.read(key(1), 0, Timestamp::EPOCH), hint.read(key(2), 0, Timestamp::EPOCH)),
            (None, Some(state(2)))
        );
        hint.clear();
        assert_eq!(hint.read(key(2), 0, Timestamp::EPOCH), None);
    }

    #[test]
    fn hint_is_not_read_before_the_time_of_its_write() {
        let hint = RefusalHint::default();
        let [earlier, now, later] = [9, 10, 11].map(Timestamp::from_micros);
        hint.publish(key(1), 0, &state(99), now);
        assert_eq!([earlier, now, later].map(|at| hint.read(key(1), 0, at).is_some()), [false, true, true]);
    }

    /// All fields of a read are from the same write.
    #[test]
    fn hint_is_never_read_partially_written() {
        let hint = RefusalHint::default();
        let done = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in (1..).take_while(|_| done.load(Ordering::Relaxed) == 0) {
                    hint.publish(key(u64::from(number % 2) + 1), 0, &state(number), Timestamp::EPOCH);
                }
            });
            for hash in [1, 2].into_iter().cycle().take(3_000_000) {
                let Some(read) = hint.read(key(hash), 0, Timestamp::EPOCH) else { continue };
                let State::Counts { amounts: [number, _], .. } = read else { unreachable!() };
                assert_eq!((read, u64::from(number % 2) + 1), (state(number), hash));
            }
            done.store(1, Ordering::Relaxed);
        });
    }
}
