//! Strategies with one fault each. The suite must report the law that each breaks.

use std::time::Duration;

use common::{assert_breaks, assert_each_breaks, decides_like};
use tower_ratelimit::strategy::{Hit, Outcome, State, Status, Strategy};
use tower_ratelimit::testing::StrategyLaws;
use tower_ratelimit::{ConfigError, FixedWindow, Lockout, MovingWindow, Quota, Timestamp, TokenBucket};

/// The fault of a fixed window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    RefusalsSpend,
    EndsTooEarly,
    EndsTooLate,
    RoundsWaitsDown,
    RoundsWaitsUp,
    RoundsLongWaitsUp,
    AdmitsMore,
    /// Admits a last hit whose cost exceeds the remaining units.
    Overdraws,
    ChargesALargeHitMore,
    /// `hit` differs from `check` and `spend`.
    HitDiffers,
    DiscardsFutureStates,
    /// `refuse` does not store the end of a window that is ahead of the clock.
    RefusesWithoutStoring,
    Underflows,
    RefundsNothing,
    RefundsTwice,
    RefundsTheWholeHit,
    ChargesNothing,
    /// A charge spends at most the remaining units.
    CapsCharges,
    /// A charge counts modulo 2^32.
    OverflowsOnCharges,
    /// A charge starts a new window, without the units of the live window.
    ForgetsOnCharges,
}

#[derive(Clone, Copy, Debug)]
struct Broken(Fault);

const CORRECT: FixedWindow = FixedWindow::new();

impl Broken {
    /// Returns the state that this strategy uses.
    fn seen(self, quota: &Quota, state: &State, now: Timestamp) -> State {
        match *state {
            State::Counts { until, amounts } if self.0 == Fault::EndsTooLate => {
                State::Counts { until: until.plus(1_000_000), amounts }
            }
            State::Counts { until, .. }
                if self.0 == Fault::DiscardsFutureStates && until.since(now) > quota.period_micros() =>
            {
                State::Fresh
            }
            _ => state.clone(),
        }
    }

    fn quota(self, quota: &Quota) -> Quota {
        let amount = if self.0 == Fault::AdmitsMore { quota.amount().saturating_mul(5) } else { quota.amount() };
        Quota::per(amount, quota.period())
    }
}

impl Strategy for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn capacity(&self, quota: &Quota) -> u32 {
        self.quota(quota).amount()
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (quota, state) = (self.quota(quota), self.seen(quota, state, now));
        let status = CORRECT.check(&quota, &state, now, cost);
        if let State::Counts { amounts: [spent, _], .. } = state
            && self.0 == Fault::Underflows
        {
            let _left = quota.amount().checked_sub(spent).expect("at most the amount is spent");
        }
        let (capacity, left, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
        let wait = status.retry_after().map(|wait| u64::try_from(wait.as_micros()).unwrap());
        match (self.0, wait) {
            (Fault::RoundsWaitsDown, Some(wait)) => Status::refused(capacity, left, reset, Some((wait - 1).max(1))),
            (Fault::RoundsLongWaitsUp, Some(wait)) if cost > 3 => {
                Status::refused(capacity, left, reset, Some(wait + 1))
            }
            (Fault::RoundsWaitsUp, Some(wait)) => Status::refused(capacity, left, reset, Some(wait + 1)),
            (Fault::Overdraws, Some(_)) if left > 0 && cost == left + 1 => Status::admitted(capacity, left, reset),
            _ => status,
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        *state = self.seen(quota, state, now);
        let cost = if self.0 == Fault::ChargesALargeHitMore && cost > 2 { cost.saturating_add(1) } else { cost };
        let delay = CORRECT.spend(&self.quota(quota), state, now, cost);
        if let State::Counts { until, .. } = state {
            match self.0 {
                Fault::EndsTooEarly => *until = until.minus(quota.period_micros() - quota.period_micros() / 10),
                Fault::EndsTooLate => *until = until.minus(1_000_000),
                _ => {}
            }
        }
        delay
    }

    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        if self.0 != Fault::RefusesWithoutStoring {
            CORRECT.refuse(quota, state, now);
        }
        if let State::Counts { amounts: [spent, _], .. } = state
            && self.0 == Fault::RefusalsSpend
        {
            *spent = spent.saturating_add(1);
        }
    }

    fn hit(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> Outcome {
        let checked = self.check(quota, state, now, cost);
        if !checked.is_admitted() {
            self.refuse(quota, state, now);
            return Outcome::Refused;
        }
        let delay = self.spend(quota, state, now, cost);
        Outcome::spent(delay, cost < checked.remaining() && self.0 != Fault::HitDiffers)
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let times = match self.0 {
            Fault::RefundsNothing => 0,
            Fault::RefundsTwice => 2,
            _ => 1,
        };
        let units = if self.0 == Fault::RefundsTheWholeHit { hit.cost } else { units };
        for _ in 0..times {
            CORRECT.refund(quota, state, now, hit, units);
        }
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        match self.0 {
            Fault::ChargesNothing => return,
            Fault::CapsCharges => {
                let units = units.min(self.check(quota, state, now, 0).remaining());
                if units > 0 {
                    self.spend(quota, state, now, units);
                }
                return;
            }
            Fault::ForgetsOnCharges => *state = State::Fresh,
            _ => {}
        }
        let before = if let State::Counts { until, amounts: [spent, _] } = *state
            && until > now
        {
            spent
        } else {
            0
        };
        self.spend(quota, state, now, units);
        if let State::Counts { amounts: [spent, _], .. } = state
            && self.0 == Fault::OverflowsOnCharges
        {
            *spent = before.wrapping_add(units);
        }
    }
}

fn check(fault: Fault) {
    StrategyLaws::new(Broken(fault)).promise(|quota| 3 * u64::from(quota.amount())).check();
}

#[test]
fn correct_implementation_obeys_all_laws() {
    check(Fault::None);
}

#[test]
fn each_fault_breaks_its_law() {
    let faults = [
        (Fault::RefusalsSpend, "law 1: "),
        (Fault::EndsTooLate, "law 2: "),
        (Fault::RoundsWaitsDown, "law 3: "),
        (Fault::RoundsWaitsUp, "law 3: "),
        (Fault::RoundsLongWaitsUp, "law 3: "),
        (Fault::EndsTooEarly, "law 4: "),
        (Fault::AdmitsMore, "law 4: "),
        (Fault::Overdraws, "law 5: a peek predicts the hit"),
        (Fault::HitDiffers, "law 5: `hit` equals `check`"),
        (Fault::ChargesALargeHitMore, "law 5: spending j then k"),
        (Fault::DiscardsFutureStates, "law 6: a clock that goes back grants no units"),
        (Fault::RefusesWithoutStoring, "law 6: waits are exact after the clock has gone back"),
        (Fault::Underflows, "law 7: "),
        (Fault::RefundsNothing, "law of refunds: "),
        (Fault::RefundsTwice, "law of refunds: "),
        (Fault::RefundsTheWholeHit, "law of refunds: parts of a hit add up"),
        (Fault::ChargesNothing, "law of charges: a charge is spent"),
        (Fault::CapsCharges, "law of charges: a refund of a hit pays no charge"),
        (Fault::OverflowsOnCharges, "law 7: "),
        (Fault::ForgetsOnCharges, "law 7: "),
    ];
    assert_each_breaks(faults, check);
}

/// Keeps a log and does not declare its length.
#[derive(Clone, Copy, Debug)]
struct UndeclaredLog(MovingWindow);

impl Strategy for UndeclaredLog {
    fn name(&self) -> &'static str {
        "undeclared-log"
    }

    decides_like!(|strategy: &Self| strategy.0);
}

#[test]
fn log_without_a_declared_length_breaks_a_law() {
    assert_breaks("law 11: a log has at most `log_entries` entries", "UndeclaredLog", || {
        StrategyLaws::new(UndeclaredLog(MovingWindow::new())).check();
    });
}

/// A token bucket that reduces a debt above its capacity to the capacity at each decision, as if
/// the bucket had just been emptied.
#[derive(Clone, Copy, Debug)]
struct Clamping(TokenBucket);

impl Clamping {
    fn seen(quota: &Quota, state: &State, now: Timestamp) -> State {
        let capacity = u128::from(quota.burst_size().unwrap_or(quota.amount()));
        let full = (u128::from(quota.period_micros()) * capacity).div_ceil(quota.amount().into());
        let full = u64::try_from(full).unwrap();
        match *state {
            State::Counts { until, amounts } => {
                State::Counts { until: until.min(now.plus(full)), amounts: [amounts[0], amounts[1] & 0xffff] }
            }
            _ => state.clone(),
        }
    }
}

impl Strategy for Clamping {
    fn name(&self) -> &'static str {
        "clamping"
    }

    fn capacity(&self, quota: &Quota) -> u32 {
        self.0.capacity(quota)
    }

    fn validate(&self, quota: &Quota) -> Result<(), ConfigError> {
        self.0.validate(quota)
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        self.0.check(quota, &Self::seen(quota, state, now), now, cost)
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        *state = Self::seen(quota, state, now);
        self.0.spend(quota, state, now, cost)
    }

    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let seen = Self::seen(quota, state, now);
        if seen.until() != state.until() {
            *state = seen;
        }
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        *state = Self::seen(quota, state, now);
        let fits = self.0.check(quota, state, now, 0).remaining();
        if fits > 0 {
            self.0.charge(quota, state, now, units.min(fits));
        }
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        *state = Self::seen(quota, state, now);
        self.0.refund(quota, state, now, hit, units);
    }
}

/// Guards against this defect: 181 consecutive refusals have a `retry_after` of 0.6 s.
#[test]
fn clamping_the_debt_at_each_decision_breaks_a_law() {
    let clamping = Clamping(TokenBucket::new());
    let law = "law 12: waits are exact after a quota has changed";
    assert_breaks(law, clamping, || StrategyLaws::new(clamping).with_bursts().check());
}

/// The fault of a lockout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockoutFault {
    RefusalsExtend,
    /// A refund ends the lock, but the lock counts for the level.
    RefundLeavesTheLevel,
}

#[derive(Clone, Copy, Debug)]
struct BrokenLockout(LockoutFault);

impl BrokenLockout {
    fn correct() -> Lockout {
        Lockout::lasting(Duration::from_millis(1)).escalating(2, Duration::from_secs(60))
    }
}

impl Strategy for BrokenLockout {
    fn name(&self) -> &'static str {
        "broken-lockout"
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        Self::correct().check(quota, state, now, cost)
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        Self::correct().spend(quota, state, now, cost)
    }

    fn charge(&self, quota: &Quota, state: &mut State, now: Timestamp, units: u32) {
        Self::correct().charge(quota, state, now, units);
    }

    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        Self::correct().refuse(quota, state, now);
        let is_locked = Self::correct().check(quota, state, now, 1).lock().is_some();
        if is_locked && let (LockoutFault::RefusalsExtend, State::Counts { until, .. }) = (self.0, state) {
            *until = until.plus(1);
        }
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        let was_locked = Self::correct().check(quota, state, now, 1).lock().is_some();
        Self::correct().refund(quota, state, now, hit, units);
        if self.0 == LockoutFault::RefundLeavesTheLevel
            && was_locked
            && let State::Counts { amounts: [_, mark], .. } = state
            && *mark < 1 << 24
        {
            *mark += 1 << 24;
        }
    }
}

#[test]
fn each_fault_of_a_lockout_breaks_a_law() {
    let faults = [
        (LockoutFault::RefusalsExtend, "law 3: "),
        (LockoutFault::RefundLeavesTheLevel, "law of refunds: an immediate refund"),
    ];
    assert_each_breaks(faults, |fault| {
        let longest = |quota: &Quota| quota.period().max(Duration::from_secs(60));
        StrategyLaws::new(BrokenLockout(fault)).longest_wait(longest).check();
    });
}
