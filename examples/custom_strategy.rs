//! A strategy of one's own: a penalty box. So many units in a period, and whoever wants more waits for a whole period from its
//! last admitted hit on.
//!
//! `cargo run --example custom_strategy` shows it on the clock of a test.

use std::time::Duration;

use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::strategy::{Hit, State, Status, Strategy};
use tower_ratelimit::{BoxError, Key, MemoryStorage, Policy, Quota, RateLimiter, Timestamp};

/// Admits the quota's amount, and nothing more until a period has passed since the last admitted hit.
#[derive(Clone, Copy, Debug)]
struct PenaltyBox;

/// What its state means: how much is spent, and for how long that counts. What it cannot have written is nothing, and an end that
/// is too far ahead is of a clock that has gone back.
fn spent(quota: &Quota, state: &State, now: Timestamp) -> (u32, u64) {
    match *state {
        State::Counts { until, amounts: [spent, _] } if until > now && spent > 0 => {
            (spent.min(quota.amount()), until.since(now).min(quota.period_micros()))
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
        let remaining = capacity - spent;
        if cost <= remaining {
            Status::admitted(capacity, remaining, left)
        } else {
            // What is more than all can never be admitted.
            Status::refused(capacity, remaining, left, (cost <= capacity).then_some(left))
        }
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        let (spent, _) = spent(quota, state, now);
        let until = now.plus(quota.period_micros());
        *state = State::Counts { until, amounts: [spent.saturating_add(cost), 0] };
        0
    }

    /// An end that is ahead of a clock that has gone back is stored as of now, so that the client is not refused for longer.
    fn refuse(&self, quota: &Quota, state: &mut State, now: Timestamp) {
        let (_, left) = spent(quota, state, now);
        if let State::Counts { until, .. } = state
            && left > 0
        {
            *until = now.plus(left);
        }
    }

    /// Only the last hit can be given back: where the end was before it nobody remembers, so it stays where it is.
    fn refund(&self, _: &Quota, state: &mut State, _: Timestamp, hit: &Hit) {
        if let State::Counts { until, amounts: [spent, _] } = state
            && *until == hit.until
        {
            *spent = spent.saturating_sub(hit.cost);
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
    fn it_keeps_the_laws() {
        // Up to all of it just before the last hit is a period old, and all of it again.
        StrategyLaws::new(PenaltyBox).promise(|quota| 2 * u64::from(quota.amount()) - 1).check();
    }

    #[cfg(feature = "testing")]
    #[test]
    fn it_runs_on_storages() {
        let policies = [Policy::new(PenaltyBox, Quota::per_second(3)), "5/minute".parse().unwrap()];
        let memory = |clock| MemoryStorage::builder().clock(clock).build().unwrap();
        decides_like_the_model(&policies, memory);
    }

    #[tokio::test]
    async fn who_comes_back_too_early_waits_for_the_rest() {
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
