//! The laws that hold when the clock is put back or the quota is another one, in whatever state the hits before have left.

use proptest::prop_assert;

use super::each_hit::{hit, micros, peek, waits_are_tight};
use super::laws::Outcome;
use crate::strategy::State;
use crate::{Limit, Policy, Timestamp};

/// The first refused hit after the clock went back fixes when the next one is admitted.
pub(super) fn waits_are_tight_after_a_clock_went_back(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> Outcome {
    let period = policy.limits()[0].quota().period_micros();
    let longest = policy.limits().iter().map(longest).max().unwrap_or(0);
    for back in [1, period / 2, 3 * period, 1 << 40] {
        let (_, mut states) = hit(policy, states, now, cost);
        let mut now = now.minus(back);
        for _ in 0..3 {
            waits_are_tight(policy, &states, now, cost)?;
            let (decision, after) = hit(policy, &states, now, cost);
            let wait = decision.retry_after().map_or(0, micros);
            prop_assert!(wait <= longest, "{back} us back it refuses for {wait} us, and never for more than {longest}");
            (states, now) = (after, now.plus(wait / 2));
        }
    }
    Ok(())
}

/// `after` decides on a state that `before` has written.
pub(super) fn waits_are_tight_after_a_change(
    before: &Policy,
    after: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> Outcome {
    waits_are_tight(after, states, now, cost)?;
    let peeked = peek(after, states, now, cost);
    let [old, new] = [before, after].map(|policy| &policy.limits()[0]);
    let Some(wait) = peeked.retry_after().map(micros).filter(|_| !new.strategy().counts_refusals()) else {
        return Ok(());
    };
    prop_assert!(peek(after, states, now.plus(wait), cost).is_admitted(), "a peek said {wait} us, and then refuses");
    prop_assert!(
        peek(after, states, now.plus(wait - 1), cost).is_refused(),
        "a peek said {wait} us, and admits before"
    );
    if new.capacity() >= old.capacity() && new.quota().amount() >= old.quota().amount() {
        let (_, exhausted) = hit(after, &[State::Fresh], now, new.capacity());
        let [empty, full] =
            [cost, new.capacity()].map(|cost| peek(after, &exhausted, now, cost).retry_after().map_or(0, micros));
        // A 500th, as a state need not say exactly by which quota it was written.
        let longest = empty + full / 500 + 2;
        prop_assert!(wait <= longest, "{old} became {new}, and refuses for {wait} us instead of at most {longest}");
    }
    Ok(())
}

/// How long a limit may refuse: until all of a bucket has come back, or the third window or bucket on a grid begins.
fn longest(limit: &Limit) -> u64 {
    let (quota, capacity) = (limit.quota(), u128::from(limit.capacity()));
    let full = (capacity * u128::from(quota.period_micros())).div_ceil(quota.amount().into());
    // A state need not say exactly how long it is.
    let full = u64::try_from(full + full / 500 + 1).unwrap_or(u64::MAX);
    full.max(3 * quota.period_micros())
}
