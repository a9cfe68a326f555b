//! The bounds of a storage, and its current size.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

#[cfg(feature = "metrics")]
use super::published::Published;
use super::size::{LOG_ENTRY_BYTES, Need, Size};
use crate::policy::{Limit, Policy};
use crate::strategy::Log;

/// A log is long if it takes more than 1/`LONG_FRACTION` of the room for logs, and more than
/// [`MIN_LONG`] bytes. A long log does not evict other keys.
const LONG_FRACTION: usize = 10_000;

/// The size of a log with 128 entries, in bytes. A log of this size is never long.
const MIN_LONG: usize = 2_304;

/// The maximum size of a storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) keys: usize,
    pub(super) bytes: usize,
}

impl Bounds {
    /// Returns the room for logs in bytes. The other half of the storage is for states.
    const fn logs(self) -> usize {
        self.bytes / 2
    }

    /// Returns `true` if a log of this size is long.
    pub(super) fn is_long(self, bytes: usize) -> bool {
        bytes > (self.logs() / LONG_FRACTION).max(MIN_LONG)
    }

    /// Returns the room in which a log of this size can grow. The last quarter is for short logs.
    fn logs_for(self, bytes: usize) -> usize {
        if self.is_long(bytes) { self.logs() / 4 * 3 } else { self.logs() }
    }

    /// Returns the number of clients that fill the storage when each has used up the policy.
    pub(super) fn clients(self, policy: &Policy) -> usize {
        let full = |limit: &Limit| match limit.strategy().log_entries(limit.quota()) {
            0 => 0,
            entries => LOG_ENTRY_BYTES + Log::full_bytes(entries, limit.quota().period_micros()),
        };
        let logs = || policy.limits().iter().map(full);
        let size = Size { keys: 1, slots: policy.limits().len(), logs: logs().sum() };
        let by_logs = self.logs_for(logs().max().unwrap_or(0)).checked_div(size.logs).unwrap_or(usize::MAX);
        self.keys.min(self.bytes / size.bytes()).min(by_logs)
    }
}

/// The kind of key that must be evicted before a hit can be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Any key.
    Room,
    /// A key that has a log.
    LogRoom,
}

/// The current size of a storage.
#[derive(Debug, Default)]
pub(super) struct Usage {
    keys: AtomicUsize,
    slots: AtomicUsize,
    logs: AtomicUsize,
    /// The number of keys that were evicted before they expired.
    evicted: AtomicU64,
    #[cfg(feature = "metrics")]
    published: Published,
}

impl Usage {
    pub(super) fn size(&self) -> Size {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        Size { keys: load(&self.keys), slots: load(&self.slots), logs: load(&self.logs) }
    }

    /// Replaces the size `before` by the size `after`.
    #[inline]
    pub(super) fn settle(&self, before: Size, after: Size) {
        for (count, before, after) in [
            (&self.keys, before.keys, after.keys),
            (&self.slots, before.slots, after.slots),
            (&self.logs, before.logs, after.logs),
        ] {
            if before != after {
                count.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
            }
        }
        #[cfg(feature = "metrics")]
        if before.keys != after.keys {
            self.published.keys_changed(self.size().keys);
        }
    }

    /// Adds a key with one small state.
    #[inline]
    pub(super) fn add_small(&self) {
        self.keys.fetch_add(1, Ordering::Relaxed);
        self.slots.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "metrics")]
        self.published.keys_changed(self.size().keys);
    }

    /// Counts a key that was evicted before it expired.
    pub(super) fn count_evicted(&self) {
        let evicted = self.evicted.fetch_add(1, Ordering::Relaxed) + 1;
        #[cfg(feature = "metrics")]
        self.published.evicted_changed(evicted);
        let _ = evicted;
    }

    /// Returns the number of keys that were evicted before they expired.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Publishes the metrics.
    #[cfg(feature = "metrics")]
    pub(super) fn publish(&self) {
        self.published.all(self.size().keys, self.evicted());
    }

    /// Returns the kind of key to evict before a hit can be stored, or `None` if there is room.
    #[inline]
    pub(super) fn lack(&self, bounds: Bounds, need: &Need) -> Option<Lack> {
        let used = self.size();
        if need.size.logs > 0 && used.logs + need.size.logs > bounds.logs_for(need.longest) {
            return Some(Lack::LogRoom);
        }
        let is_full = used.keys + need.size.keys > bounds.keys || used.bytes() + need.size.bytes() > bounds.bytes;
        is_full.then_some(Lack::Room)
    }

    /// Returns `true` if a hit must not evict others, because it makes a long log grow.
    pub(super) fn must_not_evict(bounds: Bounds, need: &Need) -> bool {
        need.size.keys == 0 && bounds.is_long(need.longest)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::time::Duration;

    use super::*;
    use crate::key::Key;
    use crate::policy::Op;
    use crate::storage::{ManualClock, MemoryStorage, StorageRequest};

    /// Formats a number with commas between thousands.
    fn grouped(number: u64) -> String {
        let digits = number.to_string();
        let mut text = String::new();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        text
    }

    /// Rounds to two digits, because the sizes of logs vary a little.
    fn rounded(number: u64) -> u64 {
        let unit = 10_u64.pow(number.max(1).ilog10().saturating_sub(1));
        (number + unit / 2) / unit * unit
    }

    /// Returns the bytes of a client that uses up the policy, with hits spread over the period.
    fn bytes_of_exhausted(policy: &Policy) -> usize {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
        let quota = policy.limits()[0].quota();
        let (key, step) = (Key::from("client"), quota.period_micros() / u64::from(quota.amount()) * 999 / 1_000);
        loop {
            clock.advance(Duration::from_micros(step));
            let hit = storage.0.decide(&StorageRequest::new(policy, &key, Op::Hit, 1));
            // A bucket refills between the hits, so its rest is spent in one hit.
            let rest = hit.remaining();
            if policy.limits()[0].strategy().log_entries(quota) == 0 && rest > 0 {
                let _ = storage.0.decide(&StorageRequest::new(policy, &key, Op::Hit, rest));
            }
            if hit.is_refused() || storage.0.decide(&StorageRequest::new(policy, &key, Op::Peek, 1)).is_refused() {
                return storage.stats().bytes;
            }
        }
    }

    #[test]
    fn capacity_table_is_up_to_date() {
        let mut table = String::from(
            "| policy | bytes per client that has used it up | clients that fill the default storage | requests of these clients |\n\
             |---|---|---|---|\n",
        );
        for (quota, strategies) in [
            (
                "10/minute",
                &[
                    "fixed-window",
                    "elastic-window",
                    "sliding-window-counter",
                    "token-bucket",
                    "leaky-bucket",
                    "moving-window",
                ][..],
            ),
            ("100/minute", &["moving-window"]),
            ("1000/hour", &["moving-window"]),
            ("10000/day", &["moving-window"]),
            ("1000000/day", &["moving-window"]),
        ] {
            for strategy in strategies {
                let policy: Policy = format!("{strategy} {quota}").parse().unwrap();
                let bytes = bytes_of_exhausted(&policy);
                let clients = MemoryStorage::new().clients_to_fill(&policy);
                let requests = clients * u64::from(policy.limits()[0].quota().amount());
                let [bytes, clients, requests] =
                    [bytes as u64, clients, requests].map(|number| grouped(rounded(number)));
                writeln!(table, "| `{strategy} {quota}` | {bytes} | {clients} | {requests} |").unwrap();
            }
        }
        assert_eq!(include_str!("capacity.md"), table, "replace capacity.md by:\n{table}");
    }

    /// Returns `true` if this number of clients can use up a policy, with hits spread over the
    /// period, before the storage is full and refuses or evicts any of them.
    fn fit(policy: &Policy, max_bytes: usize, clients: u64) -> bool {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_bytes(max_bytes).clock(clock.clone()).build().unwrap();
        let quota = policy.limits()[0].quota();
        let step = quota.period_micros() / (u64::from(quota.amount()) + 1);
        let request = |client: u64, op: Op| storage.0.decide(&StorageRequest::new(policy, &Key::from(client), op, 1));
        for _ in 0..quota.amount() {
            clock.advance(Duration::from_micros(step));
            if !(0..clients).all(|client| request(client, Op::Hit).is_admitted()) {
                return false;
            }
        }
        (0..clients).all(|client| request(client, Op::Peek).is_refused())
    }

    #[test]
    fn clients_to_fill_is_accurate_to_20_percent() {
        for (text, max_bytes) in [
            ("fixed-window 3/day", 200_000),
            ("fixed-window 3/day; fixed-window 5/2 days", 200_000),
            ("moving-window 20/day", 300_000),
            ("moving-window 100/day", 1_000_000),
            ("moving-window 1000/day", 2_000_000),
            ("moving-window 300/day; fixed-window 400/day", 2_000_000),
        ] {
            let policy: Policy = text.parse().unwrap();
            let storage = MemoryStorage::builder().max_bytes(max_bytes).build().unwrap();
            let expected = storage.clients_to_fill(&policy);
            assert!(fit(&policy, max_bytes, expected * 85 / 100), "85 % of {expected}: {text}");
            assert!(!fit(&policy, max_bytes, expected * 120 / 100), "120 % of {expected}: {text}");
        }
    }
}
