//! The units of a window that a node has taken from the storage and spends locally.
//!
//! A slice is at most a sixteenth of the remaining units. With a quarter, sixteen nodes that began
//! a window at the same time leased all of it, because each assumes that all remains. The last ones
//! were refused with 99 % unused. A sixteenth costs half a round trip more per hundred hits
//! (`scripts/leases`).
//!
//! A charge takes what the slice has and charges the rest to the storage. From then on, refunds of
//! that window go to the storage, because they pay the charge before they make units available.

use crate::decision::Decision;
use crate::policy::Policy;
use crate::strategy::Status;
use crate::time::Timestamp;

/// Units that the storage counts as spent, and that this node has not spent yet.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) policy: Policy,
    capacity: u32,
    /// The window of the slice: its end and its anchor, as returned by the storage.
    pub(super) window: (Timestamp, u32),
    pub(super) unspent: u32,
    /// `true` after units were charged to the storage. Refunds then go to the storage too, because
    /// a refund pays off the charge before it makes units available.
    pub(super) is_charged: bool,
    /// The units that remained in the storage after its latest answer, and the units that were
    /// refunded to the storage since then. A refund can still fail.
    pub(super) in_storage: u32,
    /// The time of the decision by the storage's clock.
    at: Timestamp,
    /// The time when the decision arrived, by the local clock. The decision was made at this time
    /// or before.
    received: Timestamp,
    /// The time until which the window is certainly open, by the local clock: the time to the
    /// window's end, counted from when the request was sent.
    pub(super) end: Timestamp,
}

impl Lease {
    /// Creates a lease from a hit that the storage admitted. The hit was sent at `sent`, and the
    /// decision arrived at `received`.
    pub(super) fn of(policy: &Policy, slice: &Decision, sent: Timestamp, received: Timestamp) -> Self {
        let status = slice.shown();
        Self {
            policy: policy.clone(),
            capacity: status.capacity(),
            window: window(slice),
            unspent: slice.cost(),
            is_charged: false,
            in_storage: status.remaining(),
            at: slice.at(),
            received,
            end: sent.plus(status.reset_after_micros()),
        }
    }

    /// Adds the unspent units of an older slice of the same window.
    pub(super) fn add(&mut self, older: &Self) {
        if older.window == self.window && older.policy == self.policy {
            self.unspent = self.unspent.saturating_add(older.unspent);
            self.end = self.end.max(older.end);
            self.is_charged |= older.is_charged;
        }
    }

    pub(super) fn is_live(&self, now: Timestamp) -> bool {
        self.received <= now && now < self.end
    }

    /// Spends units if there are enough. The caller checks that the window is open.
    pub(super) fn take(&mut self, cost: u32, now: Timestamp) -> Option<Decision> {
        self.unspent = self.unspent.checked_sub(cost)?;
        let at = self.at.plus(now.since(self.received));
        Some(Decision::of(at, cost, self.spent(at)))
    }

    /// Takes up to `units` for a charge. The caller charges the rest to the storage.
    pub(super) fn take_for_charge(&mut self, units: u32) -> u32 {
        let taken = units.min(self.unspent);
        self.unspent -= taken;
        self.is_charged |= taken < units;
        taken
    }

    /// Returns the decision on a charge for which the slice had enough units.
    pub(super) fn charged(&self, units: u32, now: Timestamp) -> Decision {
        let at = self.at.plus(now.since(self.received));
        Decision::of(at, units, self.spent(at).spent(Timestamp::EPOCH, 0))
    }

    /// Returns the status of a hit on this lease. The hit can be refunded to the lease or to the
    /// storage.
    fn spent(&self, at: Timestamp) -> Status {
        let (until, anchor) = self.window;
        let remaining = self.unspent.saturating_add(self.in_storage).min(self.capacity);
        Status::admitted(self.capacity, remaining, until.since(at)).spent(until, anchor)
    }

    /// Puts back units that a hit has spent of this window. Returns `false` if the caller must
    /// refund the hit to the storage instead:
    ///
    /// - The hit is of another window.
    /// - Units of the window were charged to the storage, so a refund pays off the charge first.
    /// - The lease and the storage together would have more units than the window.
    ///
    /// In the last two cases, this method adds the refund to `in_storage`.
    pub(super) fn put_back(&mut self, window: (Timestamp, u32), units: u32) -> bool {
        if window != self.window {
            return false;
        }
        let unspent = self.unspent.saturating_add(units);
        let fits = !self.is_charged && unspent <= self.capacity.saturating_sub(self.in_storage);
        if fits {
            self.unspent = unspent;
        } else {
            let most = self.capacity.saturating_sub(self.unspent);
            self.in_storage = self.in_storage.saturating_add(units).min(most);
        }
        fits
    }

    /// Puts back units of a failed charge, if the lease is still of the same window.
    pub(super) fn put_back_charge(&mut self, window: (Timestamp, u32), units: u32) {
        if window == self.window {
            self.unspent = self.unspent.saturating_add(units);
        }
    }

    /// Returns `true` if no units of the window are known to be spent.
    pub(super) fn is_unspent(&self) -> bool {
        self.unspent.saturating_add(self.in_storage) >= self.capacity
    }

    /// Returns the unspent units as a hit, for a refund to the storage.
    pub(super) fn as_hit(&self) -> Option<Decision> {
        let hit = || Decision::of(self.at, self.unspent, self.spent(self.at));
        (self.unspent > 0).then(hit)
    }
}

/// Derives the refusal of a hit with this cost from the refusal of another hit. Returns `None` if
/// the costs differ, and this cost may still fit or exceeds the capacity.
pub(super) fn derive_refusal(refusal: &Decision, cost: u32) -> Option<Decision> {
    let status = refusal.shown();
    let (capacity, remaining, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
    if cost == refusal.cost() {
        return Some(refusal.clone());
    }
    let status = Status::refused(capacity, remaining, reset, Some(reset));
    (cost > remaining && cost <= capacity).then(|| Decision::of(refusal.at(), cost, status))
}

/// Decides a hit or peek by the remaining units of the window. `reset` is the time until the window
/// ends, in microseconds.
pub(super) fn decide_locally(policy: &Policy, at: Timestamp, cost: u32, remaining: u32, reset: u64) -> Decision {
    let capacity = policy.limits()[0].capacity();
    let remaining = remaining.min(capacity);
    let status = if cost <= remaining {
        Status::admitted(capacity, remaining, reset)
    } else {
        Status::refused(capacity, remaining, reset, (cost <= capacity).then_some(reset))
    };
    Decision::of(at, cost, status)
}

/// Returns the decision on a charge, with these remaining units.
pub(super) fn charged_locally(policy: &Policy, decision: &Decision, remaining: u32) -> Decision {
    let capacity = policy.limits()[0].capacity();
    let status = Status::admitted(capacity, remaining.min(capacity), decision.shown().reset_after_micros());
    Decision::of(decision.at(), decision.cost(), status)
}

/// Returns the window of a hit: its end and its anchor.
pub(super) fn window(decision: &Decision) -> (Timestamp, u32) {
    let hit = decision.shown().hit(decision.at(), decision.cost());
    (hit.until, hit.anchor)
}
