//! The suite of the laws of strategies, and its generators of random quotas, scripts and states.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator, any};
use proptest::sample::select;
use proptest::test_runner::{Config, TestError, TestRunner};
use proptest::{prop_assert, prop_assert_eq, prop_oneof};

use super::strategy_laws::{
    LawResult, Moment, charges_add_up, charges_are_spent, clock_change_after_a_charge_grants_no_units,
    clock_change_grants_no_units, hit_equals_check_then_spend, logs_have_at_most_log_entries, longest_wait,
    peek_predicts, refunds_do_not_pay_charges, refunds_leave_no_trace, refunds_of_parts_add_up, refunds_undo_hits,
    refusals_take_no_units, removing_expired_states_changes_nothing, settled_hits_have_their_actual_cost,
    spending_adds_up, waits_are_exact, waits_are_exact_above_the_limit, waits_are_exact_after_clock_change,
    waits_are_exact_after_quota_change,
};
use crate::policy::{Limit, Op, Policy};
use crate::quota::{DAY, MONTH, Quota, WEEK, YEAR};
use crate::strategy::{ElasticWindow, FixedWindow, LeakyBucket, Log, MovingWindow, State, Strategy, TokenBucket};
use crate::time::{Timestamp, micros};

type Promise = dyn Fn(&Quota) -> u64;
type LongestWait = dyn Fn(&Quota) -> Duration;
type MakeLimit = dyn Fn(Quota) -> Option<Limit>;

/// Checks that a custom strategy keeps the [laws of strategies](crate::strategy).
///
/// The suite generates random quotas and random scripts of hits. Most laws are checked with the
/// strategy alone and with other limits in the same policy. Quotas that the strategy
/// [rejects](Strategy::validate) are skipped.
///
/// ```
/// use tower_ratelimit::{TokenBucket, testing::StrategyLaws};
///
/// StrategyLaws::new(TokenBucket::new())
///     .with_bursts()
///     // At most a full bucket and a refill are admitted in any period.
///     .promise(|quota| u64::from(quota.burst_size().unwrap_or(quota.amount())) + u64::from(quota.amount()))
///     .check();
/// ```
#[must_use = "nothing is checked until `check` is called"]
pub struct StrategyLaws {
    limit: Arc<MakeLimit>,
    bursts: bool,
    promise: Option<Arc<Promise>>,
    longest_wait: Option<Arc<LongestWait>>,
}

impl StrategyLaws {
    /// Creates the suite for this strategy.
    pub fn new(strategy: impl Strategy + Clone) -> Self {
        let limit = move |quota| Limit::try_new(strategy.clone(), quota).ok();
        Self { limit: Arc::new(limit), bursts: false, promise: None, longest_wait: None }
    }

    /// Also checks quotas with a burst. Call it if the strategy supports bursts. By default, no
    /// quota has a burst.
    pub fn with_bursts(self) -> Self {
        Self { bursts: true, ..self }
    }

    /// Sets the maximum number of units that the strategy admits in any span of one period, which
    /// law 4 checks. `most` computes it from the quota. By default, law 4 is not checked.
    pub fn promise(self, most: impl Fn(&Quota) -> u64 + 'static) -> Self {
        Self { promise: Some(Arc::new(most)), ..self }
    }

    /// Sets the maximum `retry_after` of a limit, which law 6 and law 12 (waits after a change of
    /// the quota) check. `longest` computes it from the quota. Defaults to the refill time of the
    /// capacity, or three periods if they are longer. Set it for a strategy whose refusals last
    /// longer, such as a [`Lockout`](crate::Lockout).
    pub fn longest_wait(self, longest: impl Fn(&Quota) -> Duration + 'static) -> Self {
        Self { longest_wait: Some(Arc::new(longest)), ..self }
    }

    /// Checks all laws. Law 4 is checked only if [`promise`](Self::promise) was called.
    ///
    /// # Panics
    ///
    /// Panics if a law is broken. The message contains the smallest script that breaks it. Also
    /// panics if the strategy rejects too many of the random quotas.
    pub fn check(self) {
        self.each_hit("1: a refusal takes no units", refusals_take_no_units);
        self.each_hit("2: removing an expired state changes nothing", removing_expired_states_changes_nothing);
        self.each_hit("3: retry_after and reset_after are exact", waits_are_exact);
        self.admits_no_more_than_promised();
        self.each_hit("5: a peek predicts the hit", peek_predicts);
        self.each_hit("5: `hit` equals `check`, then `spend` or `refuse`", hit_equals_check_then_spend);
        self.each_hit("5: spending j then k equals spending j + k", spending_adds_up);
        self.each_hit("6: a clock that goes back grants no units", clock_change_grants_no_units);
        self.each_hit("6: waits are exact after the clock has gone back", waits_are_exact_after_clock_change);
        self.each_hit("11: a log has at most `log_entries` entries", logs_have_at_most_log_entries);
        self.each_hit("of refunds: an immediate refund undoes the hit", refunds_undo_hits);
        self.all_inputs_are_valid();
        self.waits_after_a_change();
        self.each_hit("of refunds: parts of a hit add up", refunds_of_parts_add_up);
        self.each_hit("of refunds: an immediate refund leaves no trace", refunds_leave_no_trace);
        self.each_hit("of charges: a charge is spent and never refused", charges_are_spent);
        self.each_hit("of charges: a refund of a hit pays no charge", refunds_do_not_pay_charges);
        self.each_hit("of charges: j and then k units are j + k units", charges_add_up);
        self.each_hit("of charges: waits are exact above the limit", waits_are_exact_above_the_limit);
        self.each_hit(
            "of charges: a clock that goes back grants no units",
            clock_change_after_a_charge_grants_no_units,
        );
        self.each_hit("of settling: a settled hit has its actual cost", settled_hits_have_their_actual_cost);
    }

    fn limits(&self) -> impl Generator<Value = Limit> + use<> {
        let limit = Arc::clone(&self.limit);
        quotas(self.bursts).prop_filter_map("the strategy does not support this quota", move |quota| limit(quota))
    }

    /// Returns the function that computes the longest wait of this limit with others.
    fn longest(&self) -> impl Fn(&Policy) -> u64 + use<> {
        let own = self.longest_wait.clone();
        move |policy| {
            let own = own.as_ref().map_or(0, |longest| micros(longest(policy.limits()[0].quota())));
            policy.limits().iter().map(longest_wait).max().unwrap_or(0).max(own)
        }
    }

    /// Checks `law` before each hit of random scripts, for the limit alone and with others.
    fn each_hit(&self, name: &str, law: fn(Moment<'_>) -> LawResult) {
        let cases = self.limits().prop_flat_map(|limit| {
            let scripts = scripts(*limit.quota(), limit.capacity());
            (other_limits(*limit.quota()), scripts)
                .prop_map(move |(other_limits, script)| (limit.clone(), other_limits, script))
        });
        let longest = self.longest();
        run(name, &cases, |(limit, other_limits, script)| {
            let policy = other_limits.into_iter().fold(Policy::from(limit), Policy::with);
            let longest_wait = longest(&policy);
            let mut states = vec![State::Fresh; policy.limits().len()];
            let mut now = START;
            for Step { wait, cost } in script {
                now = now.plus(wait);
                law(Moment { policy: &policy, states: &states, now, cost, longest_wait })?;
                let _ = policy.decide(&mut states, now, Op::Hit, cost);
            }
            Ok(())
        });
    }

    /// Checks law 12: two quotas with the same period decide on the same state, one after the
    /// other.
    fn waits_after_a_change(&self) {
        let (make, bursts) = (Arc::clone(&self.limit), self.bursts);
        let cases = self.limits().prop_flat_map(move |limit| {
            let (make, period) = (Arc::clone(&make), limit.quota().period());
            let other = quotas(bursts).prop_filter_map("the strategy does not support this quota", move |other| {
                let quota = Quota::try_per(other.amount(), period).ok()?;
                make(other.burst_size().map_or(Ok(quota), |burst| quota.try_burst(burst)).ok()?)
            });
            let script = scripts(*limit.quota(), limit.capacity());
            (other, script).prop_map(move |(other, script)| ([limit.clone(), other], script))
        });
        let longest = self.longest_wait.clone();
        run("12: waits are exact after a quota has changed", &cases, |(limits, script)| {
            let [first, second] = limits.map(Policy::from);
            let (mut states, mut now) = (vec![State::Fresh], START);
            for (number, Step { wait, cost }) in script.into_iter().enumerate() {
                now = now.plus(wait);
                let [before, after] = if number < 20 { [&first, &second] } else { [&second, &first] };
                for cost in [1, cost, after.limits()[0].capacity()] {
                    let longest_wait = longest.as_ref().map_or(0, |longest| micros(longest(after.limits()[0].quota())));
                    let moment = Moment { policy: after, states: &states, now, cost, longest_wait };
                    waits_are_exact_after_quota_change(before, moment)?;
                    let mut charged = states.clone();
                    let _ = before.decide(&mut charged, now, Op::Charge, cost.saturating_mul(3));
                    waits_are_exact(Moment { states: &charged, cost: 1, ..moment })?;
                    // An amount above a million may be taken for another one, see `fingerprint`.
                    if after.limits()[0].quota().amount() <= 1_000_000 {
                        let mut owing = vec![State::Fresh];
                        let units = cost.saturating_mul(3).min(after.limits()[0].capacity());
                        let _ = before.decide(&mut owing, now, Op::Charge, units);
                        waits_are_exact_after_quota_change(before, Moment { states: &owing, cost: 1, ..moment })?;
                    }
                }
                let _ = before.decide(&mut states, now, Op::Hit, cost);
            }
            Ok(())
        });
    }

    fn admits_no_more_than_promised(&self) {
        let Some(promise) = self.promise.clone() else { return };
        let cases = self.limits().prop_flat_map(|limit| {
            scripts(*limit.quota(), limit.capacity()).prop_map(move |script| (limit.clone(), script))
        });
        run("4: no more units are admitted than promised", &cases, |(limit, script)| {
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

    fn all_inputs_are_valid(&self) {
        let cases = (self.limits(), states(), any::<u64>(), any::<u32>(), any::<u32>());
        run("7: all states, times and costs are valid", &cases, |(limit, state, ahead, cost, units)| {
            let policy = Policy::from(limit);
            for now in [START, Timestamp::from_micros(ahead), state.until(), state.until().minus(1)] {
                let mut states = [state.clone()];
                let peek = policy.decide(&mut states, now, Op::Peek, cost);
                prop_assert_eq!(peek.is_admitted(), cost <= peek.remaining());
                prop_assert!(peek.remaining() <= peek.capacity());
                let hit = policy.decide(&mut states, now, Op::Hit, cost);
                prop_assert_eq!(peek.is_admitted(), hit.is_admitted());
                let again = policy.decide(&mut states, now, Op::Hit, units);
                let mut charged = states.clone();
                let charge = policy.decide(&mut charged, now, Op::Charge, units);
                prop_assert!(charge.is_admitted() && charge.remaining() <= peek.remaining());
                policy.settle(&mut charged, now, &hit, units);
                prop_assert!(policy.decide(&mut charged, now, Op::Peek, 1).remaining() <= peek.capacity());
                policy.settle(&mut states, now, &hit, 0);
                policy.settle(&mut states, now.plus(ahead), &again, 0);
                prop_assert!(policy.decide(&mut states, now, Op::Peek, 1).remaining() <= peek.capacity());
            }
            Ok(())
        });
    }
}

impl fmt::Debug for StrategyLaws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StrategyLaws").field("bursts", &self.bursts).finish_non_exhaustive()
    }
}

/// Runs `test` on generated cases, as many as proptest's default. Panics if one fails.
pub(super) fn run<G: Generator>(name: &str, cases: &G, test: impl Fn(G::Value) -> LawResult) {
    run_some(name, Config::default().cases, cases, test);
}

/// Runs `test` on `count` generated cases. Panics if one fails.
pub(super) fn run_some<G: Generator>(name: &str, count: u32, cases: &G, test: impl Fn(G::Value) -> LawResult) {
    let config = Config { cases: count, failure_persistence: None, ..Config::default() };
    match TestRunner::new(config).run(cases, test) {
        Ok(()) => {}
        Err(TestError::Fail(why, input)) => {
            let why = why.message().lines().map(str::trim).collect::<Vec<_>>().join(" ");
            panic!("law {name}: {why}\nsmallest script: {input:?}")
        }
        Err(TestError::Abort(why)) => panic!("law {name}: no script was generated: {why}"),
    }
}

/// One hit of a script, `wait` microseconds after the previous one.
#[derive(Clone, Copy, Debug)]
struct Step {
    wait: u64,
    cost: u32,
}

/// The start time of scripts: after the epoch, and not a round number.
const START: Timestamp = Timestamp::from_micros(1_728_000_000_123_457);

fn quotas(bursts: bool) -> impl Generator<Value = Quota> {
    let amounts = prop_oneof![4 => 1..=12_u32, 1 => 13..=5_000_u32, 1 => Just(u32::MAX)];
    let periods = prop_oneof![
        4 => 1..=60_u64,
        4 => 1_000..=5_000_000_u64,
        2 => select(vec![DAY, WEEK, MONTH, YEAR]),
        1 => Just(1_u64 << 51),
    ];
    let burst = prop_oneof![Just(None), (1..=20_u32).prop_map(Some)];
    (amounts, periods, burst).prop_map(move |(amount, period, burst)| {
        let quota = Quota::per(amount, Duration::from_micros(period));
        burst.filter(|_| bursts).and_then(|burst| quota.try_burst(burst).ok()).unwrap_or(quota)
    })
}

/// Generates scripts with waits close to the period and the interval of one unit, and costs up to
/// the capacity and beyond.
fn scripts(quota: Quota, capacity: u32) -> impl Generator<Value = Vec<Step>> {
    let period = quota.period_micros();
    let pace = (period / u64::from(quota.amount())).max(1);
    let waits = prop_oneof![
        3 => Just(0),
        2 => 0..=pace,
        2 => Just(pace),
        2 => 0..=period,
        1 => period.saturating_sub(1)..=period + 1,
        1 => period..=2 * period + 1,
    ];
    let costs = prop_oneof![6 => Just(1), 3 => 1..=4_u32, 1 => 1..=capacity, 1 => capacity..=capacity.saturating_add(1), 1 => 1..=u32::MAX];
    vec((waits, costs).prop_map(|(wait, cost)| Step { wait, cost }), 1..40)
}

/// Generates up to two additional limits: strategies of the crate with this quota, without its
/// burst.
fn other_limits(quota: Quota) -> impl Generator<Value = Vec<Limit>> {
    let plain = Quota::per(quota.amount(), quota.period());
    let limits = [
        Limit::new(FixedWindow::new(), plain),
        Limit::new(ElasticWindow::new(), plain),
        Limit::new(MovingWindow::new(), plain),
        Limit::from(plain),
        Limit::new(TokenBucket::new(), plain),
        Limit::try_new(LeakyBucket::new().queue(1), plain).unwrap_or_else(|_| plain.into()),
    ];
    vec(select(limits.to_vec()), 0..3)
}

/// Generates states of any kind, including states that no strategy writes.
fn states() -> impl Generator<Value = State> {
    let instants = || prop_oneof![any::<u64>(), START.as_micros() - 100..START.as_micros() + 5_000_000].boxed();
    let amounts = || prop_oneof![0..4_u32, any::<u32>(), Just(u32::MAX)].boxed();
    prop_oneof![
        1 => Just(State::Fresh),
        4 => (instants(), amounts(), amounts()).prop_map(|(until, first, second)| {
            State::Counts { until: Timestamp::from_micros(until), amounts: [first, second] }
        }),
        2 => (instants(), vec((instants(), amounts()), 0..8)).prop_map(|(until, entries)| {
            let entries = entries.into_iter().map(|(at, units)| (Timestamp::from_micros(at), units));
            State::Log(Box::new(Log::from_entries(Timestamp::from_micros(until), entries)))
        }),
    ]
}
