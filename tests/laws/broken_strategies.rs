//! Strategies with one fault each: the suite reports the law that each breaks.

use common::{assert_breaks, assert_each_breaks, decides_like};
use tower_ratelimit::strategy::{Hit, Outcome, State, Status, Strategy};
use tower_ratelimit::testing::Laws;
use tower_ratelimit::{FixedWindow, MovingWindow, Quota, Timestamp};

/// The fault of a fixed window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    RefusalsTake,
    EndsTooEarly,
    EndsTooLate,
    RoundsWaitsDown,
    RoundsWaitsUp,
    AdmitsMore,
    /// Admits a last hit that costs more than remains.
    Overdraws,
    ChargesALargeHitMore,
    /// A hit differs from a check and a spend.
    HitsOtherwise,
    DistrustsTheFuture,
    Underflows,
    RefundsNothing,
    RefundsTwice,
}

#[derive(Clone, Copy, Debug)]
struct Broken(Wrong);

const RIGHT: FixedWindow = FixedWindow::new();

impl Broken {
    /// The state as this strategy reads it.
    fn seen(self, quota: &Quota, state: &State, now: Timestamp) -> State {
        match *state {
            State::Counts { until, amounts } if self.0 == Wrong::EndsTooLate => {
                State::Counts { until: until.plus(1_000_000), amounts }
            }
            State::Counts { until, .. }
                if self.0 == Wrong::DistrustsTheFuture && until.since(now) > quota.period_micros() =>
            {
                State::Fresh
            }
            _ => state.clone(),
        }
    }

    fn quota(self, quota: &Quota) -> Quota {
        let amount = if self.0 == Wrong::AdmitsMore { quota.amount().saturating_mul(5) } else { quota.amount() };
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
        let status = RIGHT.check(&quota, &state, now, cost);
        if let State::Counts { amounts: [spent, _], .. } = state
            && self.0 == Wrong::Underflows
        {
            let _left = quota.amount().checked_sub(spent).expect("no more is spent than there is");
        }
        let (capacity, left, reset) = (status.capacity(), status.remaining(), status.reset_after_micros());
        let wait = status.retry_after().map(|wait| u64::try_from(wait.as_micros()).unwrap());
        match (self.0, wait) {
            (Wrong::RoundsWaitsDown, Some(wait)) => Status::refused(capacity, left, reset, Some((wait - 1).max(1))),
            (Wrong::RoundsWaitsUp, Some(wait)) => Status::refused(capacity, left, reset, Some(wait + 1)),
            (Wrong::Overdraws, Some(_)) if left > 0 && cost == left + 1 => Status::admitted(capacity, left, reset),
            _ => status,
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        *state = self.seen(quota, state, now);
        let cost = if self.0 == Wrong::ChargesALargeHitMore && cost > 2 { cost.saturating_add(1) } else { cost };
        let delay = RIGHT.spend(&self.quota(quota), state, now, cost);
        if let State::Counts { until, .. } = state {
            match self.0 {
                Wrong::EndsTooEarly => *until = until.minus(quota.period_micros() - quota.period_micros() / 10),
                Wrong::EndsTooLate => *until = until.minus(1_000_000),
                _ => {}
            }
        }
        delay
    }

    fn refuse(&self, _: &Quota, state: &mut State, _: Timestamp) {
        if let State::Counts { amounts: [spent, _], .. } = state
            && self.0 == Wrong::RefusalsTake
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
        Outcome::spent(delay, cost < checked.remaining() && self.0 != Wrong::HitsOtherwise)
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit) {
        let times = match self.0 {
            Wrong::RefundsNothing => 0,
            Wrong::RefundsTwice => 2,
            _ => 1,
        };
        for _ in 0..times {
            RIGHT.refund(quota, state, now, hit);
        }
    }
}

fn check(wrong: Wrong) {
    Laws::new(Broken(wrong)).promise(|quota| 3 * u64::from(quota.amount())).check();
}

#[test]
fn without_a_fault_all_laws_are_kept() {
    check(Wrong::Nothing);
}

#[test]
fn each_fault_breaks_its_law() {
    let faults = [
        (Wrong::RefusalsTake, "law 1: "),
        (Wrong::EndsTooLate, "law 2: "),
        (Wrong::RoundsWaitsDown, "law 3: "),
        (Wrong::RoundsWaitsUp, "law 3: "),
        (Wrong::EndsTooEarly, "law 4: "),
        (Wrong::AdmitsMore, "law 4: "),
        (Wrong::Overdraws, "law 5: a peek predicts the hit"),
        (Wrong::HitsOtherwise, "law 5: a hit in one go"),
        (Wrong::ChargesALargeHitMore, "law 5: spending j then k"),
        (Wrong::DistrustsTheFuture, "law 6: "),
        (Wrong::Underflows, "law 7: "),
        (Wrong::RefundsNothing, "law of refunds: "),
        (Wrong::RefundsTwice, "law of refunds: "),
    ];
    assert_each_breaks(faults, check);
}

/// Keeps a log and does not declare its length.
#[derive(Clone, Copy, Debug)]
struct Unsaid(MovingWindow);

impl Strategy for Unsaid {
    fn name(&self) -> &'static str {
        "unsaid"
    }

    decides_like!(|unsaid: &Self| unsaid.0);
}

#[test]
fn log_without_a_declared_length_breaks_a_law() {
    assert_breaks("law 11: a log is as long as it says", "Unsaid", || Laws::new(Unsaid(MovingWindow::new())).check());
}
