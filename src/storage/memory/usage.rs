use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Policy;
use crate::strategy::{Log, State};
use crate::{Limit, Timestamp};

/// The bytes of a slot with its share of the vacant slots. 73 % to 88 % of a large table are used.
pub(super) const SLOT_BYTES: usize = 40;

/// The bytes of a log's place in the slab.
pub(super) const LISTED: usize = 24;

/// The bytes that a new log takes.
const NEW_LOG: usize = LISTED + mem::size_of::<Log>() + 64;

/// A log that takes more than this part of the room for logs, and more bytes than 128 entries take,
/// makes no room at the expense of others.
const FAIR_PART: usize = 10_000;
const LEAST_FAIR: usize = 2_304;

/// How much something takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) keys: usize,
    /// One for each state.
    pub(super) slots: usize,
    /// The bytes of logs.
    pub(super) logs: usize,
}

impl Size {
    /// A key with one small state.
    pub(super) const SMALL: Self = Self { keys: 1, slots: 1, logs: 0 };

    pub(super) const fn bytes(self) -> usize {
        self.slots * SLOT_BYTES + self.logs
    }
}

/// The bytes of a log in a storage.
#[inline]
pub(super) fn log_bytes(log: &Log) -> usize {
    LISTED + log.bytes()
}

/// What a hit would add.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    pub(super) size: Size,
    /// The bytes of the longest of the logs that grow.
    longest: usize,
}

impl Need {
    /// What a key with one small state needs.
    pub(super) const SMALL: Self = Self { size: Size::SMALL, longest: 0 };

    /// What a hit at `now` adds at most. `is_new` is `true` if nothing is stored of the key.
    #[inline]
    pub(super) fn of(policy: &Policy, states: &[State], now: Timestamp, is_new: bool) -> Self {
        let mut need = Self { size: Size { keys: usize::from(is_new), slots: 0, logs: 0 }, longest: 0 };
        for (limit, state) in policy.limits().iter().zip(states) {
            match state {
                State::Fresh => {
                    need.size.slots += 1;
                    if keeps_log(limit) {
                        need.grow(0, NEW_LOG);
                    }
                }
                State::Log(log) => {
                    let growth = log.growth_at(now);
                    if growth > 0 {
                        need.grow(log.bytes(), growth);
                    }
                }
                State::Counts { .. } => {}
            }
        }
        need
    }

    fn grow(&mut self, bytes: usize, growth: usize) {
        self.size.logs += growth;
        self.longest = self.longest.max(bytes + growth);
    }

    #[inline]
    pub(super) fn is_nothing(&self) -> bool {
        self.size == Size::default()
    }
}

fn keeps_log(limit: &Limit) -> bool {
    limit.strategy().log_entries(limit.quota()) > 0
}

/// The most that a storage holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) keys: usize,
    pub(super) bytes: usize,
}

impl Bounds {
    /// The room for logs. The other half of the storage stays free of them.
    const fn logs(self) -> usize {
        self.bytes / 2
    }

    /// Returns `true` if a log of so many bytes takes more than its part.
    pub(super) fn is_long(self, bytes: usize) -> bool {
        bytes > (self.logs() / FAIR_PART).max(LEAST_FAIR)
    }

    /// The room that a log of so many bytes can grow in. The last quarter is for short logs.
    fn logs_for(self, bytes: usize) -> usize {
        if self.is_long(bytes) { self.logs() / 4 * 3 } else { self.logs() }
    }

    /// The number of clients that have exhausted the policy when they fill the storage.
    pub(super) fn clients(self, policy: &Policy) -> usize {
        let full = |limit: &Limit| match limit.strategy().log_entries(limit.quota()) {
            0 => 0,
            entries => LISTED + Log::full_bytes(entries, limit.quota().period_micros()),
        };
        let logs = || policy.limits().iter().map(full);
        let size = Size { keys: 1, slots: policy.limits().len(), logs: logs().sum() };
        let by_logs = self.logs_for(logs().max().unwrap_or(0)).checked_div(size.logs).unwrap_or(usize::MAX);
        self.keys.min(self.bytes / size.bytes()).min(by_logs)
    }
}

/// What has to go before a hit can be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Any key.
    Room,
    /// A key that has a log.
    LogRoom,
}

/// What a storage holds.
#[derive(Debug, Default)]
pub(super) struct Usage {
    keys: AtomicUsize,
    slots: AtomicUsize,
    logs: AtomicUsize,
}

impl Usage {
    pub(super) fn size(&self) -> Size {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        Size { keys: load(&self.keys), slots: load(&self.slots), logs: load(&self.logs) }
    }

    /// Counts what has been stored or removed.
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
    }

    /// Counts a key with one small state.
    #[inline]
    pub(super) fn add_small(&self) {
        self.keys.fetch_add(1, Ordering::Relaxed);
        self.slots.fetch_add(1, Ordering::Relaxed);
    }

    /// What is lacking for a hit, if anything is.
    #[inline]
    pub(super) fn lack(&self, bounds: Bounds, need: &Need) -> Option<Lack> {
        let used = self.size();
        if need.size.logs > 0 && used.logs + need.size.logs > bounds.logs_for(need.longest) {
            return Some(Lack::LogRoom);
        }
        let is_full = used.keys + need.size.keys > bounds.keys || used.bytes() + need.size.bytes() > bounds.bytes;
        is_full.then_some(Lack::Room)
    }

    /// Returns `true` if only the hit's own client can pay for its need: a long log grows.
    pub(super) fn is_own_fault(bounds: Bounds, need: &Need) -> bool {
        need.size.keys == 0 && bounds.is_long(need.longest)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::time::Duration;

    use super::*;
    use crate::storage::{ManualClock, Storage, StorageRequest};
    use crate::{Key, MemoryStorage, Op};

    /// Text of a number with commas between thousands.
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

    /// Rounded to two digits, since logs differ a little.
    fn rounded(number: u64) -> u64 {
        let unit = 10_u64.pow(number.max(1).ilog10().saturating_sub(1));
        (number + unit / 2) / unit * unit
    }

    /// The bytes of a client that spends all of the policy, evenly over the period.
    fn bytes_of_exhausted(policy: &Policy) -> usize {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
        let quota = policy.limits()[0].quota();
        let (key, step) = (Key::from("client"), quota.period_micros() / u64::from(quota.amount()) * 999 / 1_000);
        loop {
            clock.advance(Duration::from_micros(step));
            let hit = storage.0.decide(&StorageRequest::new(policy, &key, Op::Hit, 1));
            // A bucket refills meanwhile: it is exhausted at once.
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
    fn table_of_the_docs_is_computed() {
        let mut table = String::from(
            "| policy | bytes of a client that has used it up | such clients fill the default storage | with so many requests |\n\
             |---|---|---|---|\n",
        );
        for (name, texts) in [
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
            for strategy in texts {
                let policy: Policy = format!("{strategy} {name}").parse().unwrap();
                let bytes = bytes_of_exhausted(&policy);
                let clients = MemoryStorage::new().clients_to_fill(&policy).unwrap();
                let requests = clients * u64::from(policy.limits()[0].quota().amount());
                let [bytes, clients, requests] =
                    [bytes as u64, clients, requests].map(|number| grouped(rounded(number)));
                writeln!(table, "| `{strategy} {name}` | {bytes} | {clients} | {requests} |").unwrap();
            }
        }
        assert_eq!(include_str!("capacity.md"), table, "write this into capacity.md:\n{table}");
    }

    /// Lets so many clients spend all of a policy, evenly over the period. Returns `true` if the storage
    /// has neither refused nor evicted any.
    fn fit(policy: &Policy, max_bytes: usize, clients: u64) -> bool {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_bytes(max_bytes).clock(clock.clone()).build().unwrap();
        let quota = policy.limits()[0].quota();
        let step = quota.period_micros() / (u64::from(quota.amount()) + 1);
        let ask = |client: u64, op: Op| storage.0.decide(&StorageRequest::new(policy, &Key::from(client), op, 1));
        for _ in 0..quota.amount() {
            clock.advance(Duration::from_micros(step));
            if !(0..clients).all(|client| ask(client, Op::Hit).is_admitted()) {
                return false;
            }
        }
        (0..clients).all(|client| ask(client, Op::Peek).is_refused())
    }

    #[test]
    fn clients_that_fill_the_storage_are_those_that_fit() {
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
            let expected = storage.clients_to_fill(&policy).unwrap();
            assert!(fit(&policy, max_bytes, expected * 85 / 100), "85 % of {expected}: {text}");
            assert!(!fit(&policy, max_bytes, expected * 120 / 100), "120 % of {expected}: {text}");
        }
    }
}
