//! Laws of a strategy that hold for each hit, in any state.

use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};

use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::strategy::{State, Status};
use crate::time::{Timestamp, micros};

/// The result of a law. The error contains the message of the failed assertion.
pub(super) type LawResult = Result<(), TestCaseError>;

pub(super) fn peek(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Decision {
    policy.decide(&mut states.to_vec(), now, Op::Peek, cost)
}

pub(super) fn hit(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> (Decision, Vec<State>) {
    let mut after = states.to_vec();
    let decision = policy.decide(&mut after, now, Op::Hit, cost);
    (decision, after)
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.limits().iter().map(Status::remaining).collect()
}

pub(super) fn refusals_take_no_units(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let (decision, after) = hit(policy, states, now, cost);
    if decision.is_refused() {
        prop_assert_eq!(remaining(&peek(policy, states, now, 1)), remaining(&peek(policy, &after, now, 1)));
    }
    Ok(())
}

pub(super) fn removing_expired_states_changes_nothing(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    let (_, after) = hit(policy, states, now, cost);
    let period = policy.limits()[0].quota().period_micros();
    let fresh = vec![State::Fresh; after.len()];
    let forgotten = after.iter().map(State::until).max().unwrap_or_default().max(now);
    for later in [0, 1, period] {
        let then = forgotten.plus(later);
        let ((kept, state), (forgot, expected)) = (hit(policy, &after, then, cost), hit(policy, &fresh, then, cost));
        prop_assert_eq!(&kept, &forgot);
        if kept.is_admitted() {
            prop_assert_eq!(state, expected);
        }
    }
    Ok(())
}

pub(super) fn waits_are_exact(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let (decision, after) = hit(policy, states, now, cost);
    match decision.retry_after().map(micros) {
        Some(wait) => {
            prop_assert!(decision.is_refused() && wait > 0);
            prop_assert!(peek(policy, &after, now.plus(wait), cost).is_admitted(), "refused after {wait} us");
            prop_assert!(peek(policy, &after, now.plus(wait - 1), cost).is_refused(), "admitted before {wait} us");
        }
        None if decision.is_refused() => {
            prop_assert!(cost > decision.capacity());
            prop_assert!(peek(policy, &after, now.plus(u64::MAX), cost).is_refused());
        }
        None => {}
    }
    let reset = micros(decision.reset_after());
    let least = decision.remaining();
    prop_assert_eq!(reset == 0, least == decision.capacity());
    if reset > 0 {
        prop_assert!(
            peek(policy, &after, now.plus(reset), cost).remaining() > least,
            "no additional units after {reset} us"
        );
        prop_assert_eq!(peek(policy, &after, now.plus(reset - 1), cost).remaining(), least);
    }
    Ok(())
}

pub(super) fn peek_predicts(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let mut untouched = states.to_vec();
    let peeked = policy.decide(&mut untouched, now, Op::Peek, cost);
    prop_assert_eq!(&untouched[..], states);
    let (hit, _) = hit(policy, states, now, cost);
    prop_assert_eq!(peeked.is_admitted(), hit.is_admitted());
    prop_assert_eq!((peeked.delay(), peeked.retry_after()), (hit.delay(), hit.retry_after()));
    prop_assert_eq!(peeked.is_admitted(), cost <= peeked.remaining());
    Ok(())
}

/// Checks that [`Strategy::hit`](crate::strategy::Strategy::hit), which a strategy may implement in
/// one step, equals `check` followed by `spend` or `refuse`.
pub(super) fn hit_equals_check_then_spend(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    for (limit, state) in policy.limits().iter().zip(states) {
        let (strategy, quota) = (limit.strategy(), limit.quota());
        let (mut in_one, mut in_two) = (state.clone(), state.clone());
        let hit = strategy.hit(quota, &mut in_one, now, cost);
        let checked = strategy.check(quota, &in_two, now, cost);
        let done = if checked.is_admitted() {
            let delay = strategy.spend(quota, &mut in_two, now, cost);
            prop_assert!(strategy.delays() || delay == 0, "a hit is delayed, but `delays` is false");
            crate::strategy::Outcome::spent(delay, checked.remaining() > cost)
        } else {
            strategy.refuse(quota, &mut in_two, now);
            prop_assert!(
                strategy.counts_refusals() || in_two == *state,
                "a refusal changes the state, but `counts_refusals` is false"
            );
            crate::strategy::Outcome::Refused
        };
        prop_assert_eq!((hit, in_one), (done, in_two));
    }
    Ok(())
}

pub(super) fn spending_adds_up(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let Some(sum) = cost.checked_mul(3) else { return Ok(()) };
    let (together, after) = hit(policy, states, now, sum);
    if together.is_admitted() {
        let (_, between) = hit(policy, states, now, cost);
        let (apart, after_both) = hit(policy, &between, now, 2 * cost);
        prop_assert!(apart.is_admitted());
        prop_assert_eq!(after, after_both);
        prop_assert_eq!(remaining(&together), remaining(&apart));
        prop_assert_eq!(together.reset_after(), apart.reset_after());
    }
    Ok(())
}

pub(super) fn clock_change_grants_no_units(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let period = policy.limits()[0].quota().period_micros();
    let (decision, after) = hit(policy, states, now, cost);
    for back in [1, period / 2, period, 3 * period, u64::MAX] {
        let earlier = now.minus(back);
        let (then, _) = hit(policy, &after, earlier, 1);
        prop_assert!(
            peek(policy, &after, earlier, 1).remaining() <= decision.remaining(),
            "units granted with the clock {back} us back"
        );
        prop_assert!(then.remaining() <= decision.remaining());
        // With the clock back, the current bucket of an aligned sliding window counter may start up
        // to one period from now. Its units count during this bucket and the next one, which is two
        // more periods.
        let longest = 3 * policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap_or(0);
        for waiting in [then, peek(policy, &after, earlier, 1)] {
            prop_assert!(
                micros(waiting.reset_after()) <= longest,
                "`reset_after` exceeds the maximum with the clock {back} us back"
            );
        }
    }
    Ok(())
}

pub(super) fn refunds_undo_hits(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let before = peek(policy, states, now, 1);
    let (decision, mut after) = hit(policy, states, now, cost);
    policy.settle(&mut after, now, &decision, 0);
    prop_assert_eq!(remaining(&peek(policy, &after, now, 1)), remaining(&before));
    let (second, mut later) = hit(policy, states, now, cost);
    let forgotten = later.iter().map(State::until).max().unwrap_or_default().max(now);
    let (_, mut next) = hit(policy, &later, forgotten, 1);
    let untouched = next.clone();
    policy.settle(&mut next, forgotten, &second, 0);
    prop_assert_eq!(next, untouched, "the refund of an expired hit changes the state");
    later.fill(State::Fresh);
    policy.settle(&mut later, now, &second, 0);
    prop_assert!(
        later.iter().all(|state| *state == State::Fresh),
        "the refund of a hit before a clear changes the state"
    );
    Ok(())
}

pub(super) fn logs_have_at_most_log_entries(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let (_, after) = hit(policy, states, now, cost);
    for (limit, state) in policy.limits().iter().zip(&after) {
        if let State::Log(log) = state {
            let (most, entries) = (limit.strategy().log_entries(limit.quota()), log.entries().count());
            let is_within = u32::try_from(entries).is_ok_and(|entries| entries <= most);
            prop_assert!(is_within, "{entries} entries in the log of {limit}, but `log_entries` returned {most}");
        }
    }
    Ok(())
}
