//! A custom strategy: a penalty box. A client that has spent the quota waits until a whole period
//! has passed since its last admitted hit.
//!
//! `cargo run --example custom_strategy` demonstrates the strategy with a manual clock.

use std::time::Duration;

use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
use tower_ratelimit::{BoxError, Key, MemoryStorage, Policy, Quota, RateLimiter, Timestamp};

/// Admits the quota's amount, then refuses until a period has passed since the last admitted hit.
#[derive(Clone, Copy, Debug)]
struct PenaltyBox;

/// Returns the spent units and the microseconds until they expire. A charge can spend more than the
/// quota has.
///
/// A state that this strategy cannot have written counts as fresh. An end that is more than a
/// period ahead was written before the clock went back, and counts as one period ahead.
fn spent(quota: &Quota, state: &State, now: Timestamp) -> (u32, u64) {
    match *state {
        State::Counts { until, amounts: [spent, _] } if until > now && spent > 0 => {
            (spent, until.since(now).min(quota.period_micros()))
        }
        _ => (0, 0),
    }
}

impl Strategy for PenaltyBox {
    fn name(&self) -> &'static str {
        "penalty-box"
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        let (capacity, (spent, left)) = (quota.amount(), spent(quota, state, now));
        let remaining = capacity.saturating_sub(spent);
        if cost <= remaining {
            Status::admitted(capacity, remaining, left)
        } else {
            // A cost above the capacity can never be admitted.
            Status::refused(capacity, remaining, left, (cost <= capacity).then_some(left))
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let (spent, _) = spent(quota, state, now);
        let until = now.plus(quota.period_micros());
        *state = State::Counts { until, amounts: [spent.saturating_add(cost), 0] };
        0
    }

    /// Replaces an end that is more than a period ahead, because the clock went back, by one period
    /// from now. Otherwise each later refusal would move the end.
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let (_, left) = spent(quota, state, now);
        if let State::Counts { until, .. } = state
            && left > 0
        {
            *until = now.plus(left);
        }
    }

    /// Refunds the last hit only. The end stays, because the state does not contain the previous
    /// end.
    fn refund(&self, _: &Quota, state: &mut State, _: Timestamp, hit: &Hit, units: u32) {
        if let State::Counts { until, amounts: [spent, _] } = state
            && *until == hit.until
        {
            *spent = spent.saturating_sub(units);
            if *spent == 0 {
                *state = State::Fresh;
            }
        }
    }
}

async fn app() -> Result<Vec<String>, BoxError> {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
    let limiter = RateLimiter::with_storage(Policy::new(PenaltyBox, Quota::per_minute(2)), storage);
    let mut lines = Vec::new();
    for wait in [0, 30, 1, 58, 1] {
        clock.advance(Duration::from_secs(wait));
        let decision = limiter.hit(&Key::from("alice")).await?;
        lines.push(match decision.retry_after() {
            None => format!("{wait} s later: admitted, {} left", decision.remaining()),
            Some(wait_for) => format!("{wait} s later: refused, for {} s", wait_for.as_secs()),
        });
    }
    Ok(lines)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    for line in app().await? {
        println!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "testing")]
    use tower_ratelimit::testing::{StrategyLaws, decides_like_the_model};

    use super::*;

    #[cfg(feature = "testing")]
    #[test]
    fn penalty_box_obeys_the_laws() {
        // Units become available again one period after the last admitted hit, so no period has
        // more units than the quota.
        StrategyLaws::new(PenaltyBox).promise(|quota| quota.amount().into()).check();
    }

    #[cfg(feature = "testing")]
    #[test]
    fn storage_with_a_penalty_box_decides_like_the_model() {
        let policies = [Policy::new(PenaltyBox, Quota::per_second(3)), "5/minute".parse().unwrap()];
        let memory = |clock| MemoryStorage::builder().clock(clock).build().unwrap();
        decides_like_the_model(&policies, memory);
    }

    #[tokio::test]
    async fn client_without_units_is_refused_until_a_period_after_its_last_hit() {
        assert_eq!(
            app().await.unwrap(),
            [
                "0 s later: admitted, 1 left",
                "30 s later: admitted, 0 left",
                "1 s later: refused, for 59 s",
                "58 s later: refused, for 1 s",
                "1 s later: admitted, 1 left",
            ]
        );
    }
}
