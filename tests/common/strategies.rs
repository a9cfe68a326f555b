//! Policies of every strategy, and a custom strategy.

use std::time::Duration;

use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{Policy, Quota};

/// The name of every strategy.
pub const STRATEGY_NAMES: [&str; 8] = [
    "fixed-window",
    "fixed-window-aligned",
    "elastic-window",
    "moving-window",
    "sliding-window-counter",
    "sliding-window-counter-aligned",
    "token-bucket",
    "leaky-bucket",
];

/// Every strategy, each with a period of 7 s and an amount of 3, which does not divide it.
pub const EVERY_STRATEGY: [&str; 10] = [
    "fixed-window 3 per 7 seconds",
    "fixed-window-aligned 3 per 7 seconds",
    "elastic-window 3 per 7 seconds",
    "moving-window 3 per 7 seconds",
    "sliding-window-counter 3 per 7 seconds",
    "sliding-window-counter-aligned 3 per 7 seconds",
    "token-bucket 3 per 7 seconds",
    "token-bucket 3 per 7 seconds burst 5",
    "leaky-bucket 3 per 7 seconds queue 0",
    "lockout 3 per 7 seconds for 7 seconds",
];

/// A limit of each strategy that can keep units, and keeps some.
pub const KEEPING: [&str; 9] = [
    "fixed-window 3 per 7 seconds keep 1",
    "fixed-window-aligned 4 per 7 seconds keep 2",
    "elastic-window 3 per 7 seconds keep 1",
    "moving-window 4 per 7 seconds keep 2",
    "sliding-window-counter 3 per 7 seconds keep 1",
    "sliding-window-counter-aligned 3 per 7 seconds keep 1",
    "token-bucket 3 per 7 seconds burst 5 keep 2",
    "leaky-bucket 3 per 7 seconds queue 3 keep 1",
    "calendar 3/day keep 1",
];

/// Parses a policy.
pub fn policy(text: &str) -> Policy {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Implements the methods of a strategy like a fixed window.
#[macro_export]
macro_rules! decides_like_a_fixed_window {
    () => {
        $crate::decides_like!(|_: &Self| tower_ratelimit::FixedWindow::new());
    };
}

/// Implements the methods of a strategy by another strategy, which the closure returns.
#[macro_export]
macro_rules! decides_like {
    ($other:expr) => {
        fn check(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            cost: u32,
        ) -> tower_ratelimit::strategy::Status {
            tower_ratelimit::strategy::Strategy::check(&($other)(self), quota, state, now, cost)
        }

        fn spend(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            cost: u32,
        ) -> u64 {
            tower_ratelimit::strategy::Strategy::spend(&($other)(self), quota, state, now, cost)
        }

        fn refuse(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
        ) {
            tower_ratelimit::strategy::Strategy::refuse(&($other)(self), quota, state, now);
        }

        fn charge(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            units: u32,
        ) {
            tower_ratelimit::strategy::Strategy::charge(&($other)(self), quota, state, now, units);
        }

        fn refund(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            hit: &tower_ratelimit::strategy::Hit,
            units: u32,
        ) {
            tower_ratelimit::strategy::Strategy::refund(&($other)(self), quota, state, now, hit, units);
        }
    };
}

/// A custom strategy without a script: the fixed window under another name.
#[derive(Clone, Copy, Debug)]
pub struct Foreign;

impl Strategy for Foreign {
    fn name(&self) -> &'static str {
        "foreign:{1}"
    }

    decides_like_a_fixed_window!();
}

/// A policy of the custom strategy with this limit per day.
pub fn foreign(limit: u32) -> Policy {
    Policy::new(Foreign, Quota::per(limit, Duration::from_secs(86_400)))
}
