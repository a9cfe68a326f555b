//! Laws of charges and of hits whose cost is settled.

use proptest::{prop_assert, prop_assert_eq};

use super::hit_laws::{LawResult, hit, peek, removing_expired_states_changes_nothing, waits_are_exact};
use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::strategy::{State, Status};
use crate::time::Timestamp;

fn charge(policy: &Policy, states: &[State], now: Timestamp, units: u32) -> (Decision, Vec<State>) {
    let mut after = states.to_vec();
    let decision = policy.decide(&mut after, now, Op::Charge, units);
    (decision, after)
}

fn remaining(policy: &Policy, states: &[State], now: Timestamp) -> Vec<u32> {
    peek(policy, states, now, 1).limits().iter().map(Status::remaining).collect()
}

fn less(remaining: &[u32], units: u32) -> Vec<u32> {
    remaining.iter().map(|remaining| remaining.saturating_sub(units)).collect()
}

/// Returns small and large charges: the cost, two that exceed the capacity, and the largest number.
fn charges(policy: &Policy, cost: u32) -> [u32; 4] {
    let capacity = policy.limits().iter().map(crate::Limit::capacity).max().unwrap_or(1);
    [cost, capacity.saturating_add(cost), capacity.saturating_mul(3), u32::MAX]
}

pub(super) fn charges_are_spent(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let before = remaining(policy, states, now);
    for units in charges(policy, cost) {
        let (decision, after) = charge(policy, states, now, units);
        prop_assert!(decision.is_admitted(), "a charge of {units} units is refused");
        prop_assert!(!decision.has_spent(), "a charge of {units} units can be refunded");
        let left = remaining(policy, &after, now);
        prop_assert_eq!(&left, &less(&before, units), "after a charge of {} units", units);
        let reported: Vec<u32> = decision.limits().iter().map(Status::remaining).collect();
        prop_assert_eq!(reported, left, "the decision on a charge of {} units", units);
        prop_assert_eq!(decision.reset_after(), peek(policy, &after, now, 1).reset_after());
        let (admitted, as_hit) = hit(policy, states, now, units);
        if admitted.is_admitted() {
            prop_assert_eq!(after, as_hit, "a charge of {} units differs from a hit", units);
        }
    }
    Ok(())
}

pub(super) fn waits_are_exact_above_the_limit(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    let period = policy.limits()[0].quota().period_micros();
    for units in charges(policy, cost) {
        let (_, after) = charge(policy, states, now, units);
        for wait in [0, period / 3, period] {
            waits_are_exact(policy, &after, now.plus(wait), cost)?;
        }
        let (_, twice) = charge(policy, &after, now.plus(period / 2), units);
        waits_are_exact(policy, &twice, now.plus(period / 2), 1)?;
        removing_expired_states_changes_nothing(policy, &after, now, cost)?;
    }
    Ok(())
}

/// Checks that the refund of a hit returns only the units of the hit, and none of a charge after
/// it.
pub(super) fn refunds_do_not_pay_charges(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let before = remaining(policy, states, now);
    let (decision, after) = hit(policy, states, now, cost);
    for units in charges(policy, cost) {
        // Counts saturate near the largest number, and debts at 2^52 microseconds.
        let is_large = policy.limits().iter().any(|limit| {
            let (quota, owed) = (limit.quota(), u128::from(limit.capacity()) + u128::from(units));
            let debt = owed * u128::from(quota.period_micros()) / u128::from(quota.amount());
            limit.capacity() > u32::MAX / 4 || debt >= 1 << 52
        });
        if decision.is_refused() || is_large || units > u32::MAX / 4 {
            continue;
        }
        let (_, mut after) = charge(policy, &after, now, units);
        policy.settle(&mut after, now, &decision, 0);
        let left = remaining(policy, &after, now);
        let owed = left.iter().zip(less(&before, units)).all(|(left, most)| *left <= most);
        prop_assert!(owed, "{:?} of {:?} units remain after a charge of {} units", left, before, units);
    }
    Ok(())
}

pub(super) fn charges_add_up(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    for units in charges(policy, cost) {
        let Some(sum) = cost.checked_add(units) else { continue };
        let (_, together) = charge(policy, states, now, sum);
        let (_, first) = charge(policy, states, now, cost);
        let (_, apart) = charge(policy, &first, now, units);
        prop_assert_eq!(together, apart, "charges of {} and {} units", cost, units);
    }
    Ok(())
}

pub(super) fn settled_hits_have_their_actual_cost(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    let before = remaining(policy, states, now);
    let (decision, after) = hit(policy, states, now, cost);
    if decision.is_refused() {
        let mut settled = after.clone();
        policy.settle(&mut settled, now, &decision, cost / 2);
        policy.settle(&mut settled, now, &decision, u32::MAX);
        prop_assert_eq!(settled, after, "settling a refusal changes the states");
        return Ok(());
    }
    for actual in [0, 1, cost / 2, cost - 1, cost, cost.saturating_add(1), cost.saturating_mul(3), u32::MAX] {
        let mut settled = after.clone();
        policy.settle(&mut settled, now, &decision, actual);
        prop_assert_eq!(
            remaining(policy, &settled, now),
            less(&before, actual),
            "a hit of {} units was settled as {} units",
            cost,
            actual
        );
        waits_are_exact(policy, &settled, now, cost)?;
    }
    Ok(())
}

pub(super) fn refunds_of_parts_add_up(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> LawResult {
    let before = remaining(policy, states, now);
    let (decision, mut after) = hit(policy, states, now, cost);
    if decision.is_refused() {
        return Ok(());
    }
    let part = cost / 3;
    policy.settle(&mut after, now, &decision, cost - part);
    prop_assert_eq!(remaining(policy, &after, now), less(&before, cost - part));
    policy.settle(&mut after, now, &decision, part);
    let left = remaining(policy, &after, now);
    prop_assert!(
        left.iter().zip(&before).all(|(left, before)| left <= before),
        "two parts of a hit refund more than it has spent"
    );
    Ok(())
}

/// Checks that a clock that goes back after a charge grants no units.
pub(super) fn clock_change_after_a_charge_grants_no_units(
    policy: &Policy,
    states: &[State],
    now: Timestamp,
    cost: u32,
) -> LawResult {
    let period = policy.limits()[0].quota().period_micros();
    for units in charges(policy, cost) {
        let (_, after) = charge(policy, states, now, units);
        let left = remaining(policy, &after, now);
        for back in [1, period / 2, period, 3 * period, u64::MAX] {
            let earlier = now.minus(back);
            for then in [remaining(policy, &after, earlier), {
                let (_, refused) = hit(policy, &after, earlier, 1);
                remaining(policy, &refused, earlier)
            }] {
                prop_assert!(
                    then.iter().zip(&left).all(|(then, left)| then <= left),
                    "units granted with the clock {} us back, after a charge of {} units",
                    back,
                    units
                );
            }
        }
    }
    Ok(())
}
