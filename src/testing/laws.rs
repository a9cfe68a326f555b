use std::fmt;
use std::sync::Arc;

use proptest::prelude::{Strategy as Generator, any};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use proptest::{prop_assert, prop_assert_eq};

use super::generate::{START, Step, besides, quotas, scripts, states};
use crate::strategy::{State, Status, Strategy};
use crate::{Decision, Limit, Op, Policy, Quota, Timestamp};

type Promise = dyn Fn(&Quota) -> u64;
type MakeLimit = dyn Fn(Quota) -> Option<Limit>;
type Outcome = Result<(), TestCaseError>;

/// The laws of a strategy, tried on random quotas and scripts, alone and beside other limits.
///
/// ```
/// use tower_ratelimit::{TokenBucket, testing::Laws};
///
/// Laws::new(TokenBucket::new())
///     .with_bursts()
///     .promise(|quota| u64::from(quota.burst_size().unwrap_or(quota.amount())) + u64::from(quota.amount()))
///     .check();
/// ```
#[must_use = "nothing is tried until `check` is called"]
pub struct Laws {
    limit: Arc<MakeLimit>,
    bursts: bool,
    promise: Option<Arc<Promise>>,
}

impl Laws {
    /// The laws of this strategy.
    pub fn new(strategy: impl Strategy + Clone) -> Self {
        let limit = move |quota| Limit::try_new(strategy.clone(), quota).ok();
        Self { limit: Arc::new(limit), bursts: false, promise: None }
    }

    /// On quotas with bursts too.
    pub fn with_bursts(self) -> Self {
        Self { bursts: true, ..self }
    }

    /// The most units it admits in any span of one period (law 4).
    pub fn promise(self, most: impl Fn(&Quota) -> u64 + 'static) -> Self {
        Self { promise: Some(Arc::new(most)), ..self }
    }

    /// Tries them all.
    ///
    /// # Panics
    ///
    /// When a law is broken; the message has the smallest script that breaks it.
    pub fn check(self) {
        self.each_hit("1: a refusal takes nothing", refusal_takes_nothing);
        self.each_hit("2: forgetting is invisible", forgetting_is_invisible);
        self.each_hit("3: retry_after and reset_after are tight", waits_are_tight);
        self.each_hit("5: a peek predicts the hit", peek_predicts);
        self.each_hit("5: a hit in one go is a check, then a spend or a refusal", hit_is_check_then_spend);
        self.each_hit("5: spending j then k is spending j + k", spending_adds_up);
        self.each_hit("6: a clock that goes back grants nothing", clock_goes_back);
        self.each_hit("a refund at once undoes the hit", refund_undoes);
        self.no_more_than_promised();
        self.total();
    }

    fn limits(&self) -> impl Generator<Value = Limit> + use<> {
        let limit = Arc::clone(&self.limit);
        quotas(self.bursts).prop_filter_map("the strategy cannot keep this quota", move |quota| limit(quota))
    }

    /// Runs `law` before each hit of random scripts, on the limit alone and beside others.
    fn each_hit(&self, name: &str, law: fn(&Policy, &[State], Timestamp, u32) -> Outcome) {
        let cases = self.limits().prop_flat_map(|limit| {
            let scripts = scripts(*limit.quota(), limit.capacity());
            (besides(*limit.quota()), scripts).prop_map(move |(besides, script)| (limit.clone(), besides, script))
        });
        run(name, &cases, |(limit, besides, script)| {
            let policy = besides.into_iter().fold(Policy::from(limit), Policy::with);
            let mut states = vec![State::Fresh; policy.limits().len()];
            let mut now = START;
            for Step { wait, cost } in script {
                now = now.plus(wait);
                law(&policy, &states, now, cost)?;
                let _ = policy.decide(&mut states, now, Op::Hit, cost);
            }
            Ok(())
        });
    }

    fn no_more_than_promised(&self) {
        let Some(promise) = self.promise.clone() else { return };
        let cases = self.limits().prop_flat_map(|limit| {
            scripts(*limit.quota(), limit.capacity()).prop_map(move |script| (limit.clone(), script))
        });
        run("4: no more is admitted than promised", &cases, |(limit, script)| {
            let (quota, most) = (*limit.quota(), promise(limit.quota()));
            let policy = Policy::from(limit);
            let mut states = [State::Fresh];
            let mut now = START;
            let mut admitted: Vec<(Timestamp, u64)> = Vec::new();
            for Step { wait, cost } in script {
                now = now.plus(wait);
                if policy.decide(&mut states, now, Op::Hit, cost).is_admitted() {
                    admitted.push((now, cost.into()));
                }
                let span = admitted.iter().filter(|(at, _)| now.since(*at) < quota.period_micros());
                let units: u64 = span.map(|(_, units)| units).sum();
                prop_assert!(units <= most, "{units} units in the last period, {most} promised");
            }
            Ok(())
        });
    }

    fn total(&self) {
        let cases = (self.limits(), states(), any::<u64>(), any::<u32>(), any::<u32>());
        run("7: any state, instant and cost", &cases, |(limit, state, ahead, cost, units)| {
            let policy = Policy::from(limit);
            for now in [START, Timestamp::from_micros(ahead), state.until(), state.until().minus(1)] {
                let mut states = [state.clone()];
                let peek = policy.decide(&mut states, now, Op::Peek, cost);
                prop_assert_eq!(peek.is_admitted(), cost <= peek.remaining());
                prop_assert!(peek.remaining() <= peek.capacity());
                let hit = policy.decide(&mut states, now, Op::Hit, cost);
                prop_assert_eq!(peek.is_admitted(), hit.is_admitted());
                let again = policy.decide(&mut states, now, Op::Hit, units);
                policy.refund(&mut states, now, &hit);
                policy.refund(&mut states, now.plus(ahead), &again);
                prop_assert!(policy.decide(&mut states, now, Op::Peek, 1).remaining() <= peek.capacity());
            }
            Ok(())
        });
    }
}

impl fmt::Debug for Laws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Laws").field("bursts", &self.bursts).finish_non_exhaustive()
    }
}

pub(super) fn run<G: Generator>(name: &str, cases: &G, test: impl Fn(G::Value) -> Outcome) {
    let config = Config { failure_persistence: None, ..Config::default() };
    if let Err(error) = TestRunner::new(config).run(cases, test) {
        panic!("law {name}: {error}");
    }
}

fn peek(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Decision {
    policy.decide(&mut states.to_vec(), now, Op::Peek, cost)
}

fn hit(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> (Decision, Vec<State>) {
    let mut after = states.to_vec();
    let decision = policy.decide(&mut after, now, Op::Hit, cost);
    (decision, after)
}

fn remaining(decision: &Decision) -> Vec<u32> {
    decision.limits().iter().map(Status::remaining).collect()
}

fn micros(span: std::time::Duration) -> u64 {
    crate::time::micros(span)
}

fn refusal_takes_nothing(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
    let (decision, after) = hit(policy, states, now, cost);
    if decision.is_refused() {
        prop_assert_eq!(remaining(&peek(policy, states, now, 1)), remaining(&peek(policy, &after, now, 1)));
    }
    Ok(())
}

fn forgetting_is_invisible(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
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

fn waits_are_tight(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
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
        prop_assert!(peek(policy, &after, now.plus(reset), cost).remaining() > least, "no more after {reset} us");
        prop_assert_eq!(peek(policy, &after, now.plus(reset - 1), cost).remaining(), least);
    }
    Ok(())
}

fn peek_predicts(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
    let mut untouched = states.to_vec();
    let peeked = policy.decide(&mut untouched, now, Op::Peek, cost);
    prop_assert_eq!(&untouched[..], states);
    let (hit, _) = hit(policy, states, now, cost);
    prop_assert_eq!(peeked.is_admitted(), hit.is_admitted());
    prop_assert_eq!((peeked.delay(), peeked.retry_after()), (hit.delay(), hit.retry_after()));
    prop_assert_eq!(peeked.is_admitted(), cost <= peeked.remaining());
    Ok(())
}

/// A strategy may do all of a hit in one go: it must come to the same as doing it in two.
fn hit_is_check_then_spend(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
    for (limit, state) in policy.limits().iter().zip(states) {
        let (strategy, quota) = (limit.strategy(), limit.quota());
        let (mut in_one, mut in_two) = (state.clone(), state.clone());
        let hit = strategy.hit(quota, &mut in_one, now, cost);
        let checked = strategy.check(quota, &in_two, now, cost);
        let done = if checked.is_admitted() {
            let delay = strategy.spend(quota, &mut in_two, now, cost);
            crate::strategy::Outcome::spent(delay, checked.remaining() > cost)
        } else {
            strategy.refuse(quota, &mut in_two, now);
            prop_assert!(strategy.counts_refusals() || in_two == *state, "it counts refusals");
            crate::strategy::Outcome::Refused
        };
        prop_assert_eq!((hit, in_one), (done, in_two));
    }
    Ok(())
}

fn spending_adds_up(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
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

fn clock_goes_back(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
    let period = policy.limits()[0].quota().period_micros();
    let (decision, after) = hit(policy, states, now, cost);
    for back in [1, period / 2, period, 3 * period, u64::MAX] {
        let earlier = now.minus(back);
        let (then, _) = hit(policy, &after, earlier, 1);
        prop_assert!(peek(policy, &after, earlier, 1).remaining() <= decision.remaining(), "granted {back} us back");
        prop_assert!(then.remaining() <= decision.remaining());
        let longest = 2 * policy.limits().iter().map(|limit| limit.quota().period_micros()).max().unwrap_or(0);
        for waiting in [then, peek(policy, &after, earlier, 1)] {
            prop_assert!(micros(waiting.reset_after()) <= longest, "{back} us back it waits for longer than ever");
        }
    }
    Ok(())
}

fn refund_undoes(policy: &Policy, states: &[State], now: Timestamp, cost: u32) -> Outcome {
    let before = peek(policy, states, now, 1);
    let (decision, mut after) = hit(policy, states, now, cost);
    policy.refund(&mut after, now, &decision);
    prop_assert_eq!(remaining(&peek(policy, &after, now, 1)), remaining(&before));
    let (second, mut later) = hit(policy, states, now, cost);
    let forgotten = later.iter().map(State::until).max().unwrap_or_default().max(now);
    let (_, mut next) = hit(policy, &later, forgotten, 1);
    let untouched = next.clone();
    policy.refund(&mut next, forgotten, &second);
    prop_assert_eq!(next, untouched, "a hit that is forgotten is given back");
    later.fill(State::Fresh);
    policy.refund(&mut later, now, &second);
    prop_assert!(later.iter().all(|state| *state == State::Fresh), "a cleared key is given something back");
    Ok(())
}
