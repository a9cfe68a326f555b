//! The units that a fleet spends, and those that the strategies promise.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

use tower_ratelimit::storage::Leases;
use tower_ratelimit::{Decision, Key, Limit, Policy, Timestamp};

/// The units that the strategy of a limit promises for a span of time.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// The units that are promised for an instant.
    most: u64,
    /// The units that a further period adds.
    more: u64,
    period: u64,
    /// `true` if units are added all the time, and `false` if at the end of each period.
    refills: bool,
}

impl Promise {
    pub fn of(limit: &Limit) -> Self {
        let (quota, units) = (limit.quota(), u64::from(limit.quota().amount()));
        let (most, more, refills) = match limit.strategy().name() {
            "moving-window" => (units, units, false),
            "sliding-window-counter" | "sliding-window-counter-aligned" => (2 * units, 2 * units, false),
            "token-bucket" => (u64::from(quota.burst_size().unwrap_or(quota.amount())), units, true),
            // The end of one window, and the begin of the next one.
            name if is_window(name) => (2 * units, units, false),
            other => panic!("{other} cannot be leased"),
        };
        Self { most, more, period: quota.period_micros(), refills }
    }

    /// Returns the most units in a span of microseconds.
    pub fn units(self, span: u64) -> u64 {
        let more = if self.refills { self.more * span / self.period } else { self.more * (span / self.period) };
        self.most + more
    }
}

fn is_window(strategy: &str) -> bool {
    matches!(strategy, "fixed-window" | "fixed-window-aligned" | "calendar")
}

/// Units that a process has spent. A settlement changes the units of a hit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spent {
    pub(super) at: Timestamp,
    pub(super) key: usize,
    pub(super) units: u64,
}

/// The windows in which the storage has admitted hits: the key, the position of the limit, and the
/// end.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows(Arc<Mutex<HashSet<(Key, usize, Timestamp)>>>);

impl Windows {
    /// Records the windows of an admitted hit.
    pub(super) fn record(&self, policy: &Policy, key: &Key, hit: &Decision) {
        let limits = policy.limits().iter().zip(hit.statuses()).enumerate();
        for (position, (_, status)) in limits.filter(|(_, (limit, _))| is_window(limit.strategy().name())) {
            let left = u64::try_from(status.reset_after().as_micros()).unwrap();
            self.0.lock().unwrap().insert((key.clone(), position, hit.at().plus(left)));
        }
    }
}

/// The units that a fleet has spent.
#[derive(Debug, Default)]
pub struct Spending {
    pub(super) spent: Vec<Spent>,
    windows: Windows,
    /// The number of hits that were admitted from leases.
    pub local: u64,
    /// The number of calls to the storage for hits and slices.
    pub calls: u64,
}

impl Spending {
    pub(super) fn windows(&self) -> Windows {
        self.windows.clone()
    }

    /// Adds the counts of a process that has ended.
    pub(super) fn count(&mut self, leases: &Leases) {
        self.local += leases.local_decisions();
        self.calls += leases.misses();
    }

    /// Calls `visit` with the length of each span that begins and ends with a spent unit, in
    /// microseconds, and with the units that were spent on one key in it.
    pub fn visit_spans(&self, mut visit: impl FnMut(u64, u64)) {
        let mut keys = BTreeMap::<usize, BTreeMap<Timestamp, u64>>::new();
        for spent in &self.spent {
            *keys.entry(spent.key).or_default().entry(spent.at).or_insert(0) += spent.units;
        }
        for instants in keys.into_values() {
            let instants: Vec<_> = instants.into_iter().collect();
            for (first, (begin, _)) in instants.iter().enumerate() {
                let mut sum = 0;
                for (end, units) in &instants[first..] {
                    sum += units;
                    visit(end.since(*begin), sum);
                }
            }
        }
    }

    /// Calls `visit` for each fixed, aligned or calendar window, with its limit and the units that
    /// were spent in it.
    pub fn visit_windows(&self, policy: &Policy, mut visit: impl FnMut(&Limit, u64)) {
        for (key, position, end) in &*self.windows.0.lock().unwrap() {
            let limit = &policy.limits()[*position];
            let begin = end.minus(limit.quota().period_micros());
            let inside = |spent: &&Spent| super::key(spent.key) == *key && begin <= spent.at && spent.at < *end;
            visit(limit, self.spent.iter().filter(inside).map(|spent| spent.units).sum());
        }
    }
}
