//! Laws of a strategy after the clock has gone back or the quota has changed.

use proptest::prop_assert;

use super::hit_laws::{LawResult, hit, peek, waits_are_exact};
use crate::policy::{Limit, Policy};
use crate::strategy::State;
use crate::time::{Timestamp, micros};

/// Checks that waits are exact after the clock has gone back: the first refused hit determines the
/// time at which the next hit is admitted.
pub(super) fn waits_are_exact_after_clock_change(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    let period = policy.limits()[0].quota().period_micros();
    let longest = policy.limits().iter().map(longest).max().unwrap_or(0);
    for back in [1, period / 2, 3 * period, 1 << 40] {
        let (_, mut states) = hit(policy, states, now, cost);
        let mut now = now.minus(back);
        for _ in 0..3 {
            waits_are_exact(policy, &states, now, cost)?;
            let (decision, after) = hit(policy, &states, now, cost);
            let wait = decision.retry_after().map_or(0, micros);
            prop_assert!(
                wait <= longest,
                "with the clock {back} us back, the wait is {wait} us, but the maximum is {longest} us"
            );
            (states, now) = (after, now.plus(wait / 2));
        }
    }
    Ok(())
}

/// Checks that waits are exact if `after` decides on states that `before` has written.
pub(super) fn waits_are_exact_after_quota_change(
    before: &Policy,
    after: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    waits_are_exact(after, states, now, cost)?;
    let peeked = peek(after, states, now, cost);
    let [old, new] = [before, after].map(|policy| &policy.limits()[0]);
    let Some(wait) = peeked.retry_after().map(micros).filter(|_| !new.strategy().counts_refusals()) else {
        return Ok(());
    };
    prop_assert!(
        peek(after, states, now.plus(wait), cost).is_admitted(),
        "refused after the wait of a peek, {wait} us"
    );
    prop_assert!(
        peek(after, states, now.plus(wait - 1), cost).is_refused(),
        "admitted before the wait of a peek, {wait} us"
    );
    if new.capacity() >= old.capacity() && new.quota().amount() >= old.quota().amount() {
        let (_, exhausted) = hit(after, &[State::Fresh], now, new.capacity());
        let [empty, full] =
            [cost, new.capacity()].map(|cost| peek(after, &exhausted, now, cost).retry_after().map_or(0, micros));
        // A tolerance of 1/500, because a state may store the size of its quota rounded.
        let longest = empty + full / 500 + 2;
        prop_assert!(wait <= longest, "{old} changed to {new} refuses for {wait} us, but the maximum is {longest}");
    }
    Ok(())
}

/// Returns an upper bound for the wait of a limit in microseconds: the refill time of the capacity,
/// or three periods if they are longer. With the clock back, the current bucket of an aligned
/// sliding window counter may start up to one period from now, and its units count for two more
/// periods.
fn longest(limit: &Limit) -> u64 {
    let (quota, capacity) = (limit.quota(), u128::from(limit.capacity()));
    let full = (capacity * u128::from(quota.period_micros())).div_ceil(quota.amount().into());
    // A tolerance of 1/500, because a state may store the size of its quota rounded.
    let full = u64::try_from(full + full / 500 + 1).unwrap_or(u64::MAX);
    full.max(3 * quota.period_micros())
}
