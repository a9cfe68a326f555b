//! Generators of random quotas, scripts and states, with many edge cases.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, Strategy as Generator, any};
use proptest::prop_oneof;
use proptest::sample::select;

use crate::policy::Limit;
use crate::quota::Quota;
use crate::strategy::{ElasticWindow, FixedWindow, LeakyBucket, Log, MovingWindow, State, TokenBucket};
use crate::time::Timestamp;

/// One hit of a script, `wait` microseconds after the previous one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) wait: u64,
    pub(super) cost: u32,
}

/// The start time of scripts: after the epoch, and not a round number.
pub(super) const START: Timestamp = Timestamp::from_micros(1_728_000_000_123_457);

pub(super) fn quotas(bursts: bool) -> impl Generator<Value = Quota> {
    let amounts = prop_oneof![4 => 1..=12_u32, 1 => 13..=5_000_u32, 1 => Just(u32::MAX)];
    let periods = prop_oneof![
        4 => 1..=60_u64,
        4 => 1_000..=5_000_000_u64,
        1 => Just(31_536_000_000_000),
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
pub(super) fn scripts(quota: Quota, capacity: u32) -> impl Generator<Value = Vec<Step>> {
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
pub(super) fn other_limits(quota: Quota) -> impl Generator<Value = Vec<Limit>> {
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
pub(super) fn states() -> impl Generator<Value = State> {
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
