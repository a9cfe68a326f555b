//! A slice of a window that is spent here.

use crate::strategy::{Hit, Status};
use crate::{Decision, Policy, Timestamp};

/// Units that the storage counts as spent, and that nobody has spent yet.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) policy: Policy,
    capacity: u32,
    /// Which window it is a slice of, as the storage says: its end and what tells it from a later one.
    window: (Timestamp, u32),
    pub(super) left: u32,
    /// What the storage said is left to everybody.
    pub(super) elsewhere: u32,
    /// When it decided, by its own clock, and when that was known here. What passes here since then has passed there at least.
    at: Timestamp,
    received: Timestamp,
    /// Until when the window is open for certain, by the clock here: counted from before the storage was asked.
    pub(super) end: Timestamp,
}

impl Lease {
    /// The slice that the storage admitted as one hit, which was asked for at `sent`.
    pub(super) fn of(policy: &Policy, slice: &Decision, sent: Timestamp, received: Timestamp) -> Self {
        let status = slice.shown();
        Self {
            policy: policy.clone(),
            capacity: status.capacity(),
            window: window(&hit(slice)),
            left: slice.cost(),
            elsewhere: status.remaining(),
            at: slice.at(),
            received,
            end: sent.plus(status.reset_after_micros()),
        }
    }

    /// Adds what is left of an older slice, if it is of the same window.
    pub(super) fn add(&mut self, older: &Self) {
        if older.window == self.window && older.policy == self.policy {
            self.left = self.left.saturating_add(older.left);
            self.end = self.end.max(older.end);
        }
    }

    pub(super) fn is_live(&self, now: Timestamp) -> bool {
        self.received <= now && now < self.end
    }

    /// Spends some of it, if there is enough; whether the window is still open is for the caller to know.
    pub(super) fn take(&mut self, cost: u32, now: Timestamp) -> Option<Decision> {
        self.left = self.left.checked_sub(cost)?;
        let at = self.at.plus(now.since(self.received));
        Some(Decision::of(at, cost, self.spent(at)))
    }

    /// What a hit that has taken something is told: it can be given back to the storage as well as to this.
    fn spent(&self, at: Timestamp) -> Status {
        let (until, anchor) = self.window;
        let remaining = self.left.saturating_add(self.elsewhere).min(self.capacity);
        Status::admitted(self.capacity, remaining, until.since(at)).spent(until, anchor)
    }

    /// Puts back what a hit has taken from this window. More than was taken for this, as far as that is known, is not from here: it is
    /// the storage's, as is what others took beside it.
    pub(super) fn put_back(&mut self, decision: &Decision) -> bool {
        let left = self.left.saturating_add(decision.cost());
        let is_of_it = window(&hit(decision)) == self.window && left <= self.capacity.saturating_sub(self.elsewhere);
        if is_of_it {
            self.left = left;
        }
        is_of_it
    }

    /// Whether all that is known to have been taken from the window is here.
    pub(super) fn is_all(&self) -> bool {
        self.left.saturating_add(self.elsewhere) >= self.capacity
    }

    /// What is left as a hit that can be given back to the storage.
    pub(super) fn as_hit(&self) -> Option<Decision> {
        (self.left > 0).then(|| Decision::of(self.at, self.left, self.spent(self.at)))
    }
}

/// What a hit is told that costs so much, when another one was refused, if that can be told: it may fit where that did not, and what
/// no window of this storage has room for may be decided by another one.
pub(super) fn refused_too(refusal: &Decision, cost: u32) -> Option<Decision> {
    let status = refusal.shown();
    let (capacity, remaining, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
    if cost == refusal.cost() {
        return Some(refusal.clone());
    }
    let refused = || Decision::of(refusal.at(), cost, Status::refused(capacity, remaining, reset, Some(reset)));
    (cost > remaining && cost <= capacity).then(refused)
}

/// What is told of a cost by who knows how much remains of the window, and for how long it is open.
pub(super) fn told(policy: &Policy, at: Timestamp, cost: u32, remaining: u32, reset: u64) -> Decision {
    let capacity = policy.limits()[0].capacity();
    let remaining = remaining.min(capacity);
    let status = if cost <= remaining {
        Status::admitted(capacity, remaining, reset)
    } else {
        Status::refused(capacity, remaining, reset, (cost <= capacity).then_some(reset))
    };
    Decision::of(at, cost, status)
}

fn hit(decision: &Decision) -> Hit {
    decision.shown().hit(decision.at(), decision.cost())
}

fn window(hit: &Hit) -> (Timestamp, u32) {
    (hit.until, hit.anchor)
}
