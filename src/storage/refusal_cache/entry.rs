//! A cached refusal, and the answers derived from it.

use crate::decision::Decision;
use crate::policy::{Limit, Policy};
use crate::strategy::Status;
use crate::time::{Timestamp, micros};

/// A refusal and the time for which it is valid.
#[derive(Debug)]
pub(super) struct CachedRefusal {
    policy: Policy,
    decision: Decision,
    /// A time just before the request was sent.
    sent: Timestamp,
    /// The time when the decision arrived. The decision is at least as old as the time since then,
    /// so a derived `retry_after` is never too short.
    received: Timestamp,
    /// The end of the time to live, counted from `sent`. The storage decided after `sent`, so the
    /// end is never too late.
    pub(super) end: Timestamp,
    /// The time until which the refusal may be served stale while a hit is in flight: one more
    /// `ttl`, unless `retry_after` ends earlier.
    stale_end: Timestamp,
    /// `true` while a hit that this entry refuses is in flight.
    serves_stale: bool,
}

impl CachedRefusal {
    /// Returns an entry that lives for at most `ttl` microseconds. Returns `None` if the decision
    /// is not a refusal, or is one that cannot be cached.
    pub(super) fn of(
        policy: &Policy,
        decision: &Decision,
        sent: Timestamp,
        received: Timestamp,
        ttl: u64,
    ) -> Option<Self> {
        let is_lasting = !decision.is_storage_full() && !decision.is_contended() && !decision.is_from_fallback();
        let unchanged =
            policy.limits().iter().zip(decision.statuses()).map(|(limit, status)| unchanged_for(limit, status));
        let refused_for = decision.retry_after().map_or(u64::MAX, micros).min(unchanged.min().unwrap_or(0));
        let refused_until = sent.plus(refused_for);
        let [end, stale_end] = [sent.plus(ttl), sent.plus(ttl).plus(ttl)].map(|end| end.min(refused_until));
        let is_valid = decision.is_refused() && is_lasting && received < end;
        let (policy, decision) = (policy.clone(), decision.clone().of_next_hit());
        is_valid.then_some(Self { policy, decision, sent, received, end, stale_end, serves_stale: false })
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(super) fn cost(&self) -> u32 {
        self.decision.cost()
    }

    /// Returns `true` if the entry is too old even for a stale answer, or if the clock has gone
    /// back.
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        now < self.received || now >= self.stale_end
    }

    /// Allows the entry to be served after its time to live, because a hit of `cost` is now in
    /// flight. Does nothing if the entry does not refuse that hit.
    pub(super) fn serve_stale(&mut self, policy: &Policy, cost: u32, now: Timestamp) {
        self.serves_stale |= self.refuses(policy, cost, now);
    }

    /// Revokes the permission of [`serve_stale`](Self::serve_stale).
    pub(super) fn stop_serving_stale(&mut self) {
        self.serves_stale = false;
    }

    /// Returns `true` if this entry makes the other one redundant, because it has the same policy
    /// and an exact answer to the other's cost.
    pub(super) fn replaces(&self, other: &Self) -> bool {
        self.policy == other.policy && self.is_exact(other.cost())
    }

    /// Returns `true` if this entry refuses a hit of this cost now.
    pub(super) fn answers(&self, policy: &Policy, cost: u32, now: Timestamp) -> bool {
        let is_over = now >= self.end && !self.serves_stale;
        !is_over && !self.is_expired(now) && self.refuses(policy, cost, now)
    }

    fn refuses(&self, policy: &Policy, cost: u32, now: Timestamp) -> bool {
        now < self.until(cost) && self.policy == *policy
    }

    /// Returns the time until which a hit of this cost is refused, or a lower bound of it.
    pub(super) fn until(&self, cost: u32) -> Timestamp {
        let waits = self.answers_to(cost).map(|answer| answer.status.retry_micros());
        self.sent.plus(waits.max().unwrap_or(0))
    }

    /// Returns `true` if the answer to a hit of this cost equals that of the storage. Otherwise the
    /// wait in the answer is a lower bound.
    pub(super) fn is_exact(&self, cost: u32) -> bool {
        self.answers_to(cost).all(|answer| answer.is_exact)
    }

    fn answers_to(&self, cost: u32) -> impl ExactSizeIterator<Item = CachedAnswer> {
        let limits = self.policy.limits().iter().zip(self.decision.statuses());
        limits.map(move |(limit, status)| CachedAnswer::to(cost, limit, status, self.cost()))
    }

    /// Returns the refusal of a hit of this cost. The entry must [answer](Self::answers) it.
    pub(super) fn answer(&self, cost: u32, now: Timestamp) -> Decision {
        let passed = now.since(self.received);
        // A clone keeps the difference between the storage's clock and the wall clock.
        let mut refusal = self.decision.clone().with_at(self.decision.at().plus(passed)).of_cost(cost);
        for (status, answer) in refusal.statuses_mut().iter_mut().zip(self.answers_to(cost)) {
            *status = answer.after(cost, passed);
        }
        refusal
    }
}

/// The answer of one limit to a cost, derived from its answer to another cost.
struct CachedAnswer {
    status: Status,
    /// `false` if the wait in `status` is a lower bound.
    is_exact: bool,
}

impl CachedAnswer {
    /// Derives the answer to `cost` from `status`, the answer to a hit of the cost `known_cost`.
    fn to(cost: u32, limit: &Limit, status: &Status, known_cost: u32) -> Self {
        // A lockout by refusals is locked for every cost.
        if cost == known_cost || limit.counts_refusals() {
            return Self { status: *status, is_exact: true };
        }
        let (cost, known_cost) = (limit.needed(cost), limit.needed(known_cost));
        let (capacity, remaining, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
        if cost <= remaining {
            return Self { status: Status::admitted(capacity, remaining, reset), is_exact: true };
        }
        if cost > capacity {
            return Self {
                status: Status::refused(capacity, remaining, reset, None).with_lock_of(status),
                is_exact: true,
            };
        }
        // `reset` is the time until one more unit remains, so a cost of `remaining + 1` then fits.
        // A larger cost fits no earlier than a smaller one.
        let (fits, wait) = if cost > known_cost && known_cost > remaining {
            (known_cost, status.retry_micros())
        } else {
            (remaining + 1, reset)
        };
        let wait = wait.saturating_add(refill(limit, cost - fits));
        let is_exact = cost == fits || is_window(limit);
        Self { status: Status::refused(capacity, remaining, reset, Some(wait)).with_lock_of(status), is_exact }
    }

    /// Returns the answer after `passed` microseconds.
    fn after(&self, cost: u32, passed: u64) -> Status {
        let status = &self.status;
        if !self.is_exact && status.retry_micros() <= passed {
            // This limit may already admit the cost. Another limit of the policy refuses it.
            let reset = status.reset_after_micros().saturating_sub(passed).max(1);
            return Status::refused(status.capacity(), status.remaining(), reset, Some(1));
        }
        after(status, cost, passed)
    }
}

/// Returns the minimum time in microseconds to refill this number of units, or 0 if it is unknown.
fn refill(limit: &Limit, units: u32) -> u64 {
    if limit.strategy().name() != "token-bucket" {
        return 0;
    }
    let quota = limit.quota();
    let micros = u128::from(units) * u128::from(quota.period_micros()) / u128::from(quota.amount());
    u64::try_from(micros).unwrap_or(u64::MAX)
}

/// Returns `true` for a limit whose units are all refilled at the same time.
fn is_window(limit: &Limit) -> bool {
    limit.is_fixed_window() || limit.strategy().name() == "lockout"
}

/// Returns the time in microseconds for which refusals change no state of this limit, and hold for
/// their whole `retry_after`.
fn unchanged_for(limit: &Limit, status: &Status) -> u64 {
    match status.lock() {
        // Refusals count again after the lock.
        Some(_) if limit.counts_refusals() => status.retry_micros(),
        _ if limit.counts_refusals() || limit.strategy().name() == "leaky-bucket" => 0,
        _ => u64::MAX,
    }
}

/// Returns the status of a limit after `passed` microseconds, as part of a refusal. Units that were
/// refilled meanwhile are unknown, so `remaining` is a lower bound.
fn after(status: &Status, cost: u32, passed: u64) -> Status {
    let capacity = status.capacity();
    // A full limit has nothing to refill. Any other limit needs at least 1 microsecond.
    let reset = |remaining| match status.reset_after_micros().saturating_sub(passed) {
        _ if remaining == capacity => 0,
        left => left.max(1),
    };
    let remaining = status.remaining();
    if status.is_admitted() {
        return Status::admitted(capacity, remaining, reset(remaining));
    }
    match status.retry_after().map(micros) {
        // This limit admits the cost now, but another limit of the policy refuses it.
        Some(wait) if wait <= passed => {
            let remaining = remaining.max(cost);
            Status::admitted(capacity, remaining, reset(remaining))
        }
        wait => {
            Status::refused(capacity, remaining, reset(remaining), wait.map(|wait| wait - passed)).with_lock_of(status)
        }
    }
}
