//! The size of the states of a key, the room that a hit needs, and the bounds of a storage.

use std::mem;

use crate::policy::{Limit, Policy};
use crate::strategy::{Log, State};
use crate::time::Timestamp;

/// The bytes per state: 32 bytes for its slot, and 8 bytes for the vacant slots of the table. In a
/// large table, 73 % to 88 % of the slots are used.
const SLOT_BYTES: usize = 40;

/// The bytes of an entry in the slab of logs.
const LOG_ENTRY_BYTES: usize = 24;

/// The bytes of a new log.
const NEW_LOG: usize = LOG_ENTRY_BYTES + mem::size_of::<Log>() + 64;

/// An amount of keys, states and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) keys: usize,
    /// The number of states.
    pub(super) slots: usize,
    /// The number of bytes of logs.
    pub(super) logs: usize,
}

impl Size {
    /// A key with one small state.
    pub(super) const SMALL: Self = Self { keys: 1, slots: 1, logs: 0 };

    pub(super) const fn bytes(self) -> usize {
        self.slots * SLOT_BYTES + self.logs
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self { keys: self.keys + other.keys, slots: self.slots + other.slots, logs: self.logs + other.logs }
    }
}

/// Returns the bytes of a log in a storage.
#[inline]
pub(super) fn log_bytes(log: &Log) -> usize {
    LOG_ENTRY_BYTES + log.bytes()
}

/// The maximum room that a hit needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    pub(super) size: Size,
    /// The bytes of the longest growing log, after it has grown.
    pub(super) longest: usize,
}

impl Need {
    /// The need of a new key with one small state.
    pub(super) const SMALL: Self = Self { size: Size::SMALL, longest: 0 };

    /// Returns the maximum need of a hit at `now`. `is_new` is `true` if the key is not stored.
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

    /// Returns the need of a hit that is refused anyway. It is not stored, except as the first
    /// strike on a lockout by refusals.
    pub(super) fn of_refusal(&self, policy: &Policy, states: &[State]) -> Self {
        let strikes = |(limit, state): &(&Limit, &State)| limit.counts_refusals_of_others() && **state == State::Fresh;
        match policy.limits().iter().zip(states).filter(strikes).count() {
            0 => Self::default(),
            slots => Self { size: Size { keys: self.size.keys, slots, logs: 0 }, longest: 0 },
        }
    }

    fn grow(&mut self, bytes: usize, growth: usize) {
        self.size.logs += growth;
        self.longest = self.longest.max(bytes + growth);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.size == Size::default()
    }
}

fn keeps_log(limit: &Limit) -> bool {
    limit.strategy().log_entries(limit.quota()) > 0
}

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
    pub(super) fn logs_for(self, bytes: usize) -> usize {
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
