use std::fmt;
use std::sync::Arc;

use proptest::prelude::{Strategy as Generator, any};
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use proptest::{prop_assert, prop_assert_eq};

use super::each_change::{waits_are_tight_after_a_change, waits_are_tight_after_a_clock_went_back};
use super::each_hit::{
    clock_goes_back, forgetting_is_invisible, hit_is_check_then_spend, log_is_as_long_as_said, peek_predicts,
    refund_undoes, refusal_takes_nothing, spending_adds_up, waits_are_tight,
};
use super::generate::{START, Step, besides, quotas, scripts, states};
use crate::strategy::{State, Strategy};
use crate::{Limit, Op, Policy, Quota, Timestamp};

type Promise = dyn Fn(&Quota) -> u64;
type MakeLimit = dyn Fn(Quota) -> Option<Limit>;
pub(super) type Outcome = Result<(), TestCaseError>;

/// The laws of a strategy, tried on random quotas and scripts, alone and beside other limits.
///
/// ```
/// use tower_ratelimit::{TokenBucket, testing::StrategyLaws};
///
/// StrategyLaws::new(TokenBucket::new())
///     .with_bursts()
///     .promise(|quota| u64::from(quota.burst_size().unwrap_or(quota.amount())) + u64::from(quota.amount()))
///     .check();
/// ```
#[must_use = "nothing is tried until `check` is called"]
pub struct StrategyLaws {
    limit: Arc<MakeLimit>,
    bursts: bool,
    promise: Option<Arc<Promise>>,
}

impl StrategyLaws {
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
        self.no_more_than_promised();
        self.each_hit("5: a peek predicts the hit", peek_predicts);
        self.each_hit("5: a hit in one go is a check, then a spend or a refusal", hit_is_check_then_spend);
        self.each_hit("5: spending j then k is spending j + k", spending_adds_up);
        self.each_hit("6: a clock that goes back grants nothing", clock_goes_back);
        self.each_hit("6: waits are tight after a clock has gone back", waits_are_tight_after_a_clock_went_back);
        self.each_hit("11: a log is as long as it says", log_is_as_long_as_said);
        self.each_hit("of refunds: one at once undoes the hit", refund_undoes);
        self.total();
        self.waits_after_a_change();
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

    /// Two quotas of one period decide in turn.
    fn waits_after_a_change(&self) {
        let (make, bursts) = (Arc::clone(&self.limit), self.bursts);
        let cases = self.limits().prop_flat_map(move |limit| {
            let (make, period) = (Arc::clone(&make), limit.quota().period());
            let other = quotas(bursts).prop_filter_map("the strategy cannot keep this quota", move |other| {
                let quota = Quota::try_per(other.amount(), period).ok()?;
                make(other.burst_size().map_or(Ok(quota), |burst| quota.try_burst(burst)).ok()?)
            });
            let script = scripts(*limit.quota(), limit.capacity());
            (other, script).prop_map(move |(other, script)| ([limit.clone(), other], script))
        });
        run("12: waits are tight after a quota has changed", &cases, |(limits, script)| {
            let [first, second] = limits.map(Policy::from);
            let (mut states, mut now) = (vec![State::Fresh], START);
            for (number, Step { wait, cost }) in script.into_iter().enumerate() {
                now = now.plus(wait);
                let [before, after] = if number < 20 { [&first, &second] } else { [&second, &first] };
                for cost in [1, cost, after.limits()[0].capacity()] {
                    waits_are_tight_after_a_change(before, after, &states, now, cost)?;
                }
                let _ = before.decide(&mut states, now, Op::Hit, cost);
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

impl fmt::Debug for StrategyLaws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Laws").field("bursts", &self.bursts).finish_non_exhaustive()
    }
}

/// Tests each generated case. The number of cases is proptest's default.
pub(super) fn run<G: Generator>(name: &str, cases: &G, test: impl Fn(G::Value) -> Outcome) {
    run_some(name, Config::default().cases, cases, test);
}

/// Tests this many generated cases.
pub(super) fn run_some<G: Generator>(name: &str, count: u32, cases: &G, test: impl Fn(G::Value) -> Outcome) {
    let config = Config { cases: count, failure_persistence: None, ..Config::default() };
    match TestRunner::new(config).run(cases, test) {
        Ok(()) => {}
        Err(TestError::Fail(why, input)) => {
            let why = why.message().lines().map(str::trim).collect::<Vec<_>>().join(" ");
            panic!("law {name}: {why}\nsmallest script: {input:?}")
        }
        Err(TestError::Abort(why)) => panic!("law {name}: no script could be made: {why}"),
    }
}
