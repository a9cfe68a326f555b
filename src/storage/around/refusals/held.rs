//! A refusal that is known, and what it says later.

use crate::strategy::Status;
use crate::time::micros;
use crate::{Decision, Limit, Policy, Timestamp};

/// A refusal, and for how long it can be relied on.
#[derive(Debug)]
pub(super) struct Held {
    policy: Policy,
    decision: Decision,
    /// When it was here. It was decided before, so what has passed since then is less than has passed in truth: what is told of
    /// later is never too early.
    received: Timestamp,
    /// Counted from before it was asked for: it was decided after that, so this is never too late.
    pub(super) end: Timestamp,
    /// Until when it may serve others while somebody asks again: for another life, if it is true for so long.
    last: Timestamp,
    is_lent: bool,
}

impl Held {
    /// Takes note of a refusal for at most `life` microseconds, if it is one that stays true.
    pub(super) fn of(
        policy: &Policy,
        decision: &Decision,
        sent: Timestamp,
        received: Timestamp,
        life: u64,
    ) -> Option<Self> {
        let stays = !decision.is_crowded()
            && !decision.is_contended()
            && !decision.is_from_fallback()
            && policy.limits().iter().all(stays_true);
        let truth = sent.plus(decision.retry_after().map_or(u64::MAX, micros));
        let [end, last] = [sent.plus(life), sent.plus(life).plus(life)].map(|end| end.min(truth));
        let holds = decision.is_refused() && stays && received < end;
        let (policy, decision) = (policy.clone(), decision.clone());
        holds.then_some(Self { policy, decision, received, end, last, is_lent: false })
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(super) fn cost(&self) -> u32 {
        self.decision.cost()
    }

    /// Whether it is of no use any more: because it is over, or the clock has gone back.
    pub(super) fn is_gone(&self, now: Timestamp) -> bool {
        now < self.received || now >= self.last
    }

    /// Somebody asks for this again, so others need not.
    pub(super) fn lend(&mut self, policy: &Policy, cost: u32) {
        self.is_lent |= self.says(policy, cost);
    }

    /// Nobody asks again any more.
    pub(super) fn take_back(&mut self) {
        self.is_lent = false;
    }

    pub(super) fn is_of(&self, policy: &Policy, cost: u32) -> bool {
        self.cost() == cost && self.policy == *policy
    }

    pub(super) fn is_instead_of(&self, other: &Self) -> bool {
        other.is_of(&self.policy, self.cost())
    }

    /// Whether it says what a hit of this cost is answered now.
    pub(super) fn answers(&self, policy: &Policy, cost: u32, now: Timestamp) -> bool {
        let is_over = now >= self.end && !self.is_lent;
        !is_over && !self.is_gone(now) && self.says(policy, cost)
    }

    /// Whether it says what a hit of this cost is answered, while it is true.
    fn says(&self, policy: &Policy, cost: u32) -> bool {
        let says = |limits: &[Limit]| cost == self.cost() || limits.iter().all(|limit| says_all(limit, cost));
        cost >= self.cost() && self.policy == *policy && says(policy.limits())
    }

    /// What it says, if it does.
    pub(super) fn answer(&self, cost: u32, now: Timestamp) -> Decision {
        let passed = now.since(self.received);
        let later = |status: &Status| if cost == self.cost() { *status } else { of_cost(status, cost) };
        let statuses = self.decision.limits().iter().map(|status| later_on(&later(status), cost, passed));
        Decision::of_limits(self.decision.at().plus(passed), cost, statuses)
    }
}

/// Whether a refusal by this limit changes nothing, and is true for as long as it says.
fn stays_true(limit: &Limit) -> bool {
    let strategy = limit.strategy();
    !strategy.counts_refusals() && strategy.name() != "leaky-bucket"
}

/// Whether what this limit said of one cost tells what it would say of this larger one: a window, in which all of it comes back at
/// once, and any limit that the cost can never fit.
fn says_all(limit: &Limit, cost: u32) -> bool {
    matches!(limit.strategy().name(), "fixed-window" | "fixed-window-aligned") || cost > limit.capacity()
}

/// The same of a larger cost, for limits that [say all](says_all).
fn of_cost(status: &Status, cost: u32) -> Status {
    let (capacity, remaining, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
    if cost <= remaining {
        return *status;
    }
    Status::refused(capacity, remaining, reset, (cost <= capacity).then_some(reset))
}

/// The same when so much has passed, while the decision it is part of is still a refusal. What has come back meanwhile is not known:
/// then the remaining units are the least there are.
fn later_on(status: &Status, cost: u32, passed: u64) -> Status {
    let capacity = status.capacity();
    // Of what is full nothing comes back; of what is not, it takes some time at least.
    let reset = |remaining| match status.reset_after_micros().saturating_sub(passed) {
        _ if remaining == capacity => 0,
        left => left.max(1),
    };
    let remaining = status.remaining();
    if status.is_admitted() {
        return Status::admitted(capacity, remaining, reset(remaining));
    }
    match status.retry_after().map(micros) {
        // This limit admits again, though another one does not.
        Some(wait) if wait <= passed => {
            let remaining = remaining.max(cost);
            Status::admitted(capacity, remaining, reset(remaining))
        }
        wait => Status::refused(capacity, remaining, reset(remaining), wait.map(|wait| wait - passed)),
    }
}
