//! The laws of a strategy: for each hit, for charges and settled hits, and after a change of the
//! clock or the quota.

use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};

use crate::decision::Decision;
use crate::policy::{Limit, Op, Policy};
use crate::strategy::{Outcome, State, Status};
use crate::time::{Timestamp, micros};

/// The result of a law. The error contains the message of the failed assertion.
pub(super) type LawResult = Result<(), TestCaseError>;

/// A moment of a script: the states of a policy, and the cost of the next hit. The methods do not
/// change the states, but return those after the request.
#[derive(Clone, Copy)]
pub(super) struct Moment<'a> {
    pub(super) policy: &'a Policy,
    pub(super) states: &'a [State],
    pub(super) now: Timestamp,
    pub(super) cost: u32,
    /// An upper bound of the wait of a refused hit, in microseconds.
    pub(super) longest_wait: u64,
}

impl<'a> Moment<'a> {
    /// Returns this moment with other states.
    fn with(self, states: &'a [State]) -> Self {
        Self { states, ..self }
    }

    /// Returns this moment at another time.
    fn at(self, now: Timestamp) -> Self {
        Self { now, ..self }
    }

    fn decide(self, op: Op, units: u32) -> (Decision, Vec<State>) {
        let mut after = self.states.to_vec();
        (self.policy.decide(&mut after, self.now, op, units), after)
    }

    fn hit(self, units: u32) -> (Decision, Vec<State>) {
        self.decide(Op::Hit, units)
    }

    fn charge(self, units: u32) -> (Decision, Vec<State>) {
        self.decide(Op::Charge, units)
    }

    fn peek(self, units: u32) -> Decision {
        self.decide(Op::Peek, units).0
    }

    /// Returns the states after a hit that returned `decision` is settled as `actual` units.
    fn settle(self, decision: &Decision, actual: u32) -> Vec<State> {
        let mut after = self.states.to_vec();
        self.policy.settle(&mut after, self.now, decision, actual);
        after
    }

    /// Returns the units that remain in each limit.
    fn remaining(self) -> Vec<u32> {
        remaining(&self.peek(1))
    }

    /// Returns the period of the first limit, which belongs to the tested strategy.
    fn period(self) -> u64 {
        self.policy.limits()[0].quota().period_micros()
    }

    /// Returns the instant from which no state has an effect.
    fn forgotten(self) -> Timestamp {
        self.states.iter().map(State::until).max().unwrap_or_default().max(self.now)
    }

    /// Returns the times to which a clock may go back, and by how many microseconds.
    fn earlier(self) -> [(u64, Timestamp); 5] {
        [1, self.period() / 2, self.period(), 3 * self.period(), u64::MAX].map(|back| (back, self.now.minus(back)))
    }

    /// Returns small and large charges: the cost, two that exceed the capacity, and the largest
    /// number.
    fn charges(self) -> [u32; 4] {
        let capacity = self.policy.limits().iter().map(Limit::capacity).max().unwrap_or(1);
        [self.cost, capacity.saturating_add(self.cost), capacity.saturating_mul(3), u32::MAX]
    }
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.statuses().iter().map(Status::remaining).collect()
}

fn less(remaining: &[u32], units: u32) -> Vec<u32> {
    remaining.iter().map(|remaining| remaining.saturating_sub(units)).collect()
}

/// Returns `true` if no limit has more units than before.
fn none_is_more(remaining: &[u32], before: &[u32]) -> bool {
    remaining.iter().zip(before).all(|(remaining, before)| remaining <= before)
}

pub(super) fn refusals_take_no_units(moment: Moment<'_>) -> LawResult {
    let (decision, after) = moment.hit(moment.cost);
    if decision.is_refused() {
        prop_assert_eq!(moment.remaining(), moment.with(&after).remaining());
    }
    Ok(())
}

pub(super) fn removing_expired_states_changes_nothing(moment: Moment<'_>) -> LawResult {
    let (_, after) = moment.hit(moment.cost);
    let fresh = vec![State::Fresh; after.len()];
    let after = moment.with(&after);
    for later in [0, 1, moment.period()] {
        let then = after.at(after.forgotten().plus(later));
        let ((kept, state), (forgot, expected)) = (then.hit(moment.cost), then.with(&fresh).hit(moment.cost));
        prop_assert_eq!(&kept, &forgot);
        if kept.is_admitted() {
            prop_assert_eq!(state, expected);
        }
    }
    Ok(())
}

pub(super) fn waits_are_exact(moment: Moment<'_>) -> LawResult {
    let (cost, now) = (moment.cost, moment.now);
    let (decision, after) = moment.hit(cost);
    let peek_at = |now: Timestamp| moment.with(&after).at(now).peek(cost);
    match decision.retry_after().map(micros) {
        Some(wait) => {
            prop_assert!(decision.is_refused() && wait > 0);
            prop_assert!(peek_at(now.plus(wait)).is_admitted(), "refused after {wait} us");
            prop_assert!(peek_at(now.plus(wait - 1)).is_refused(), "admitted before {wait} us");
        }
        None if decision.is_refused() => {
            prop_assert!(cost > decision.capacity());
            prop_assert!(peek_at(now.plus(u64::MAX)).is_refused());
        }
        None => {}
    }
    let reset = micros(decision.reset_after());
    let least = decision.remaining();
    prop_assert_eq!(reset == 0, least == decision.capacity());
    if reset > 0 {
        prop_assert!(peek_at(now.plus(reset)).remaining() > least, "no additional units after {reset} us");
        prop_assert_eq!(peek_at(now.plus(reset - 1)).remaining(), least);
    }
    Ok(())
}

pub(super) fn peek_predicts(moment: Moment<'_>) -> LawResult {
    let (peeked, untouched) = moment.decide(Op::Peek, moment.cost);
    prop_assert_eq!(&untouched[..], moment.states);
    let (hit, _) = moment.hit(moment.cost);
    prop_assert_eq!(peeked.is_admitted(), hit.is_admitted());
    prop_assert_eq!((peeked.delay(), peeked.retry_after()), (hit.delay(), hit.retry_after()));
    prop_assert_eq!(peeked.is_admitted(), moment.cost <= peeked.remaining());
    Ok(())
}

/// Checks that [`Strategy::hit`](crate::strategy::Strategy::hit), which a strategy may implement in
/// one step, equals `check` followed by `spend` or `refuse`.
pub(super) fn hit_equals_check_then_spend(moment: Moment<'_>) -> LawResult {
    let Moment { policy, states, now, cost, .. } = moment;
    for (limit, state) in policy.limits().iter().zip(states) {
        let (strategy, quota) = (limit.strategy(), limit.quota());
        let (mut in_one, mut in_two) = (state.clone(), state.clone());
        let hit = strategy.hit(quota, &mut in_one, now, cost);
        let checked = strategy.check(quota, &in_two, now, cost);
        let done = if checked.is_admitted() {
            let delay = strategy.spend(quota, &mut in_two, now, cost);
            prop_assert!(strategy.delays() || delay == 0, "a hit is delayed, but `delays` is false");
            Outcome::spent(delay, checked.remaining() > cost)
        } else {
            strategy.refuse(quota, &mut in_two, now);
            prop_assert!(
                strategy.counts_refusals() || in_two == *state,
                "a refusal changes the state, but `counts_refusals` is false"
            );
            Outcome::Refused
        };
        prop_assert_eq!((hit, in_one), (done, in_two));
    }
    Ok(())
}

pub(super) fn spending_adds_up(moment: Moment<'_>) -> LawResult {
    let Some(sum) = moment.cost.checked_mul(3) else { return Ok(()) };
    let (together, after) = moment.hit(sum);
    if together.is_admitted() {
        let (_, between) = moment.hit(moment.cost);
        let (apart, after_both) = moment.with(&between).hit(2 * moment.cost);
        prop_assert!(apart.is_admitted());
        prop_assert_eq!(after, after_both);
        prop_assert_eq!(remaining(&together), remaining(&apart));
        prop_assert_eq!(together.reset_after(), apart.reset_after());
    }
    Ok(())
}

pub(super) fn clock_change_grants_no_units(moment: Moment<'_>) -> LawResult {
    let (decision, after) = moment.hit(moment.cost);
    for (back, earlier) in moment.earlier() {
        let then = moment.with(&after).at(earlier);
        for waiting in [then.peek(1), then.hit(1).0] {
            prop_assert!(waiting.remaining() <= decision.remaining(), "units granted with the clock {back} us back");
            prop_assert!(
                micros(waiting.reset_after()) <= moment.longest_wait,
                "`reset_after` exceeds the maximum with the clock {back} us back"
            );
        }
    }
    Ok(())
}

pub(super) fn refunds_undo_hits(moment: Moment<'_>) -> LawResult {
    let (decision, after) = moment.hit(moment.cost);
    let after = moment.with(&after);
    let refunded = after.settle(&decision, 0);
    prop_assert_eq!(moment.with(&refunded).remaining(), moment.remaining());
    let limits = moment.policy.limits().iter().zip(decision.statuses());
    let free = limits.map(|(limit, status)| {
        limit.strategy().refundable_until(limit.quota(), &status.hit(decision.at(), decision.cost()))
    });
    let free = after.at(free.fold(moment.now, Timestamp::max));
    prop_assert_eq!(free.settle(&decision, 0), free.states, "a refund at `refundable_until` changes the state");
    let late = after.at(after.forgotten());
    let (_, next) = late.hit(1);
    let cleared = vec![State::Fresh; next.len()];
    prop_assert_eq!(late.with(&next).settle(&decision, 0), next, "the refund of an expired hit changes the state");
    prop_assert_eq!(
        moment.with(&cleared).settle(&decision, 0),
        cleared,
        "the refund of a hit before a clear changes the state"
    );
    Ok(())
}

/// Checks that the next charge is spent as if a refunded hit had never been.
pub(super) fn refunds_leave_no_trace(moment: Moment<'_>) -> LawResult {
    // A refund does not move the end of a window that each hit moves.
    if moment.policy.limits().iter().any(Limit::counts_refusals) {
        return Ok(());
    }
    let (decision, after) = moment.hit(moment.cost);
    let refunded = moment.with(&after).settle(&decision, 0);
    for units in moment.charges() {
        let [expected, got] = [moment.states, &refunded].map(|states| moment.with(states).charge(units).0);
        prop_assert_eq!(got, expected, "a charge of {} units after the refund differs", units);
    }
    Ok(())
}

pub(super) fn logs_have_at_most_log_entries(moment: Moment<'_>) -> LawResult {
    let (_, after) = moment.hit(moment.cost);
    for (limit, state) in moment.policy.limits().iter().zip(&after) {
        if let State::Log(log) = state {
            let (most, entries) = (limit.strategy().log_entries(limit.quota()), log.entries().count());
            let is_within = u32::try_from(entries).is_ok_and(|entries| entries <= most);
            prop_assert!(is_within, "{entries} entries in the log of {limit}, but `log_entries` returned {most}");
        }
    }
    Ok(())
}

pub(super) fn charges_are_spent(moment: Moment<'_>) -> LawResult {
    let before = moment.remaining();
    for units in moment.charges() {
        let (decision, after) = moment.charge(units);
        prop_assert!(decision.is_admitted(), "a charge of {units} units is refused");
        prop_assert!(!decision.has_spent(), "a charge of {units} units can be refunded");
        let left = moment.with(&after).remaining();
        prop_assert_eq!(&left, &less(&before, units), "after a charge of {} units", units);
        prop_assert_eq!(remaining(&decision), left, "the decision on a charge of {} units", units);
        prop_assert_eq!(decision.reset_after(), moment.with(&after).peek(1).reset_after());
        let (admitted, as_hit) = moment.hit(units);
        if admitted.is_admitted() {
            prop_assert_eq!(after, as_hit, "a charge of {} units differs from a hit", units);
        }
    }
    Ok(())
}

pub(super) fn waits_are_exact_above_the_limit(moment: Moment<'_>) -> LawResult {
    let (now, period) = (moment.now, moment.period());
    for units in moment.charges() {
        let (_, after) = moment.charge(units);
        let after = moment.with(&after);
        for wait in [0, period / 3, period] {
            waits_are_exact(after.at(now.plus(wait)))?;
        }
        let later = after.at(now.plus(period / 2));
        let (_, twice) = later.charge(units);
        waits_are_exact(Moment { cost: 1, ..later.with(&twice) })?;
        removing_expired_states_changes_nothing(after)?;
    }
    Ok(())
}

/// Checks that the refund of a hit returns only the units of the hit, and none of a charge after
/// it.
pub(super) fn refunds_do_not_pay_charges(moment: Moment<'_>) -> LawResult {
    let before = moment.remaining();
    let (decision, after) = moment.hit(moment.cost);
    for units in moment.charges() {
        // Counts saturate near the largest number, and debts at 2^52 microseconds.
        let is_large = moment.policy.limits().iter().any(|limit| {
            let (quota, owed) = (limit.quota(), u128::from(limit.capacity()) + u128::from(units));
            let debt = owed * u128::from(quota.period_micros()) / u128::from(quota.amount());
            limit.capacity() > u32::MAX / 4 || debt >= 1 << 52
        });
        if decision.is_refused() || is_large || units > u32::MAX / 4 {
            continue;
        }
        let (_, charged) = moment.with(&after).charge(units);
        let refunded = moment.with(&charged).settle(&decision, 0);
        let left = moment.with(&refunded).remaining();
        let mut owing = less(&before, units);
        for (position, owing) in owing.iter_mut().enumerate() {
            // A lockout ignores charges while it is locked.
            if charged[position] == after[position] {
                *owing = before[position];
            }
        }
        let owes = none_is_more(&left, &owing);
        prop_assert!(owes, "{:?} of {:?} units remain after a charge of {} units", left, before, units);
    }
    Ok(())
}

pub(super) fn charges_add_up(moment: Moment<'_>) -> LawResult {
    for units in moment.charges() {
        let Some(sum) = moment.cost.checked_add(units) else { continue };
        let (_, together) = moment.charge(sum);
        let (_, first) = moment.charge(moment.cost);
        let (_, apart) = moment.with(&first).charge(units);
        // A lockout does not count units while it is locked, so only its answers are equal.
        let [expected, got] = [&together, &apart].map(|states| moment.with(states));
        for cost in [1, moment.cost] {
            prop_assert_eq!(got.peek(cost), expected.peek(cost), "charges of {} and {} units", moment.cost, units);
        }
        if moment.with(&first).remaining().iter().all(|&remaining| remaining > 0) {
            prop_assert_eq!(together, apart, "charges of {} and {} units", moment.cost, units);
        }
    }
    Ok(())
}

pub(super) fn settled_hits_have_their_actual_cost(moment: Moment<'_>) -> LawResult {
    let (cost, before) = (moment.cost, moment.remaining());
    let (decision, after) = moment.hit(cost);
    let after = moment.with(&after);
    if decision.is_refused() {
        for actual in [cost / 2, u32::MAX] {
            prop_assert_eq!(after.settle(&decision, actual), after.states, "settling a refusal changes the states");
        }
        return Ok(());
    }
    for actual in [0, 1, cost / 2, cost - 1, cost, cost.saturating_add(1), cost.saturating_mul(3), u32::MAX] {
        let settled = after.settle(&decision, actual);
        let left = moment.with(&settled).remaining();
        prop_assert_eq!(left, less(&before, actual), "a hit of {} units was settled as {} units", cost, actual);
        waits_are_exact(moment.with(&settled))?;
    }
    Ok(())
}

pub(super) fn refunds_of_parts_add_up(moment: Moment<'_>) -> LawResult {
    let before = moment.remaining();
    let (decision, after) = moment.hit(moment.cost);
    if decision.is_refused() {
        return Ok(());
    }
    let part = moment.cost / 3;
    let first = moment.with(&after).settle(&decision, moment.cost - part);
    prop_assert_eq!(moment.with(&first).remaining(), less(&before, moment.cost - part));
    let second = moment.with(&first).settle(&decision, part);
    let is_bounded = none_is_more(&moment.with(&second).remaining(), &before);
    prop_assert!(is_bounded, "two parts of a hit refund more than it has spent");
    Ok(())
}

/// Checks that a clock that goes back after a charge grants no units.
pub(super) fn clock_change_after_a_charge_grants_no_units(moment: Moment<'_>) -> LawResult {
    for units in moment.charges() {
        let (_, after) = moment.charge(units);
        let left = moment.with(&after).remaining();
        for (back, earlier) in moment.earlier() {
            let then = moment.with(&after).at(earlier);
            let (_, refused) = then.hit(1);
            for now_left in [then.remaining(), then.with(&refused).remaining()] {
                prop_assert!(
                    none_is_more(&now_left, &left),
                    "units granted with the clock {} us back, after a charge of {} units",
                    back,
                    units
                );
            }
        }
    }
    Ok(())
}

/// Checks that waits are exact after the clock has gone back: the first refused hit determines the
/// time at which the next hit is admitted.
pub(super) fn waits_are_exact_after_clock_change(moment: Moment<'_>) -> LawResult {
    let longest = moment.longest_wait;
    for back in [1, moment.period() / 2, 3 * moment.period(), 1 << 40] {
        let (_, mut states) = moment.hit(moment.cost);
        let mut now = moment.now.minus(back);
        for _ in 0..3 {
            let then = moment.with(&states).at(now);
            waits_are_exact(then)?;
            let (decision, after) = then.hit(moment.cost);
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

/// Checks that waits are exact if the policy of `moment` decides on states that `before` has
/// written.
pub(super) fn waits_are_exact_after_quota_change(before: &Policy, moment: Moment<'_>) -> LawResult {
    waits_are_exact(moment)?;
    let (cost, now) = (moment.cost, moment.now);
    let [old, new] = [before, moment.policy].map(|policy| &policy.limits()[0]);
    let peeked = moment.peek(cost).retry_after().map(micros);
    let Some(wait) = peeked.filter(|_| !new.strategy().counts_refusals()) else { return Ok(()) };
    let [early, then] = [wait - 1, wait].map(|wait| moment.at(now.plus(wait)).peek(cost));
    prop_assert!(then.is_admitted(), "refused after the wait of a peek, {wait} us");
    prop_assert!(early.is_refused(), "admitted before the wait of a peek, {wait} us");
    if new.capacity() >= old.capacity() && new.quota().amount() >= old.quota().amount() {
        let (_, exhausted) = moment.with(&[State::Fresh]).hit(new.capacity());
        let [empty, full] =
            [cost, new.capacity()].map(|cost| moment.with(&exhausted).peek(cost).retry_after().map_or(0, micros));
        // A tolerance of 1/500, because a state may store the size of its quota rounded.
        let longest = (empty + full / 500 + 2).max(moment.longest_wait);
        prop_assert!(wait <= longest, "{old} changed to {new} refuses for {wait} us, but the maximum is {longest}");
    }
    Ok(())
}

/// Returns an upper bound for the wait of a limit in microseconds: the refill time of the capacity,
/// or three periods if they are longer. With the clock back, the current bucket of an aligned
/// sliding window counter may start up to one period from now, and its units count for two more
/// periods.
pub(super) fn longest_wait(limit: &Limit) -> u64 {
    let (quota, capacity) = (limit.quota(), u128::from(limit.capacity()));
    let full = (capacity * u128::from(quota.period_micros())).div_ceil(quota.amount().into());
    // A tolerance of 1/500, because a state may store the size of its quota rounded.
    let full = u64::try_from(full + full / 500 + 1).unwrap_or(u64::MAX);
    full.max(3 * quota.period_micros())
}
