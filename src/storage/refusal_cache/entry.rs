//! A refusal that is known, and what it says later.

use crate::strategy::Status;
use crate::time::micros;
use crate::{Decision, Limit, Policy, Timestamp};

/// A refusal, and for how long it can be relied on.
#[derive(Debug)]
pub(super) struct Entry {
    policy: Policy,
    decision: Decision,
    /// When the storage had not been asked yet.
    sent: Timestamp,
    /// When it was here. It was decided before, so what has passed since then is less than has passed in truth: what is told of
    /// later is never too early.
    received: Timestamp,
    /// Counted from before it was asked for: it was decided after that, so this is never too late.
    pub(super) end: Timestamp,
    /// Until when it may serve others while somebody asks again: for another life, if it is true for so long.
    last: Timestamp,
    is_lent: bool,
}

impl Entry {
    /// Takes note of a refusal for at most `ttl` microseconds, if it is one that stays true.
    pub(super) fn of(
        policy: &Policy,
        decision: &Decision,
        sent: Timestamp,
        received: Timestamp,
        ttl: u64,
    ) -> Option<Self> {
        let stays = !decision.is_storage_full()
            && !decision.is_contended()
            && !decision.is_from_fallback()
            && policy.limits().iter().all(stays_true);
        let truth = sent.plus(decision.retry_after().map_or(u64::MAX, micros));
        let [end, last] = [sent.plus(ttl), sent.plus(ttl).plus(ttl)].map(|end| end.min(truth));
        let holds = decision.is_refused() && stays && received < end;
        let (policy, decision) = (policy.clone(), decision.clone());
        holds.then_some(Self { policy, decision, sent, received, end, last, is_lent: false })
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

    /// Serves other callers while one of them asks the storage again about a hit of this cost.
    pub(super) fn lend(&mut self, policy: &Policy, cost: u32, now: Timestamp) {
        self.is_lent |= self.refuses(policy, cost, now);
    }

    /// Serves nobody after its end any more.
    pub(super) fn take_back(&mut self) {
        self.is_lent = false;
    }

    /// Returns `true` if this entry is of the other's policy and gives the exact answer to its cost.
    pub(super) fn is_instead_of(&self, other: &Self) -> bool {
        self.policy == other.policy && self.is_exact(other.cost())
    }

    /// Returns `true` if a hit of this cost is refused now, and this entry may be used for that.
    pub(super) fn answers(&self, policy: &Policy, cost: u32, now: Timestamp) -> bool {
        let is_over = now >= self.end && !self.is_lent;
        !is_over && !self.is_gone(now) && self.refuses(policy, cost, now)
    }

    fn refuses(&self, policy: &Policy, cost: u32, now: Timestamp) -> bool {
        now < self.until(cost) && self.policy == *policy
    }

    /// Returns the instant until which a hit of this cost is refused at least.
    pub(super) fn until(&self, cost: u32) -> Timestamp {
        let waits = self.answers_to(cost).map(|answer| answer.status.retry_micros());
        self.sent.plus(waits.max().unwrap_or(0))
    }

    /// Returns `true` if the answer to this cost is the storage's. Otherwise its wait is a lower bound.
    pub(super) fn is_exact(&self, cost: u32) -> bool {
        self.answers_to(cost).all(|answer| answer.is_exact)
    }

    fn answers_to(&self, cost: u32) -> impl ExactSizeIterator<Item = Answer> {
        let limits = self.policy.limits().iter().zip(self.decision.limits());
        limits.map(move |(limit, status)| Answer::to(cost, limit, status, self.cost()))
    }

    /// Returns the refusal of a hit of this cost, where this entry [answers](Self::answers).
    pub(super) fn answer(&self, cost: u32, now: Timestamp) -> Decision {
        let passed = now.since(self.received);
        let statuses = self.answers_to(cost).map(|answer| answer.later(cost, passed));
        Decision::of_limits(self.decision.at().plus(passed), cost, statuses)
    }
}

/// The answer of one limit to a cost, derived from its answer to another cost.
struct Answer {
    status: Status,
    /// Otherwise the limit refuses for at least as long as the status says.
    is_exact: bool,
}

impl Answer {
    /// Derives the answer to `cost` from the answer to `known`.
    fn to(cost: u32, limit: &Limit, status: &Status, known: u32) -> Self {
        if cost == known {
            return Self { status: *status, is_exact: true };
        }
        let (capacity, remaining, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
        if cost <= remaining {
            return Self { status: Status::admitted(capacity, remaining, reset), is_exact: true };
        }
        if cost > capacity {
            return Self { status: Status::refused(capacity, remaining, reset, None), is_exact: true };
        }
        // One more unit than what remains fits after `reset`, and a larger cost fits no earlier than
        // a smaller one.
        let (fits, wait) =
            if cost > known && known > remaining { (known, status.retry_micros()) } else { (remaining + 1, reset) };
        let wait = wait.saturating_add(refill(limit, cost - fits));
        let is_exact = cost == fits || is_window(limit);
        Self { status: Status::refused(capacity, remaining, reset, Some(wait)), is_exact }
    }

    /// Returns the answer after `passed` microseconds.
    fn later(&self, cost: u32, passed: u64) -> Status {
        let status = &self.status;
        if !self.is_exact && status.retry_micros() <= passed {
            // The limit may admit the cost by now, or later. Another limit refuses it.
            let reset = status.reset_after_micros().saturating_sub(passed).max(1);
            return Status::refused(status.capacity(), status.remaining(), reset, Some(1));
        }
        later_on(status, cost, passed)
    }
}

/// Returns the least number of microseconds in which so many units come back, if the strategy tells.
fn refill(limit: &Limit, units: u32) -> u64 {
    if limit.strategy().name() != "token-bucket" {
        return 0;
    }
    let quota = limit.quota();
    let micros = u128::from(units) * u128::from(quota.period_micros()) / u128::from(quota.amount());
    u64::try_from(micros).unwrap_or(u64::MAX)
}

/// Returns `true` for a limit whose units all come back at the same instant.
fn is_window(limit: &Limit) -> bool {
    matches!(limit.strategy().name(), "fixed-window" | "fixed-window-aligned")
}

/// Whether a refusal by this limit changes nothing, and is true for as long as it says.
fn stays_true(limit: &Limit) -> bool {
    let strategy = limit.strategy();
    !strategy.counts_refusals() && strategy.name() != "leaky-bucket"
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
