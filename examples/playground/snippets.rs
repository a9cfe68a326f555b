//! The code that the page offers to copy for some policies. Written by
//! `cargo run --example playground -- snippets`.

#![allow(unreachable_pub, reason = "the code is copied into other crates")]

mod sample_0 {
    use tower_ratelimit::{FixedWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: fixed-window 10/minute
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(FixedWindow::new(), Quota::per_minute(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_1 {
    use tower_ratelimit::{FixedWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: fixed-window-aligned 1000/day
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(FixedWindow::aligned(), Quota::per_day(1_000));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_2 {
    use tower_ratelimit::{PeerIp, Policy, Quota, RateLimitLayer, SlidingWindowCounter};

    /// For each client address: sliding-window-counter 10/minute
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(SlidingWindowCounter::new(), Quota::per_minute(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_3 {
    use tower_ratelimit::{PeerIp, Policy, Quota, RateLimitLayer, SlidingWindowCounter};

    /// For each client address: sliding-window-counter-aligned 10/hour
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(SlidingWindowCounter::aligned(), Quota::per_hour(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_4 {
    use std::time::Duration;

    use tower_ratelimit::{MovingWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: moving-window 5/15 minutes
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(MovingWindow::new(), Quota::per(5, Duration::from_secs(900)));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_5 {
    use tower_ratelimit::{ElasticWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: elastic-window 20/minute
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(ElasticWindow::new(), Quota::per_minute(20));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_6 {
    use tower_ratelimit::{PeerIp, Policy, Quota, RateLimitLayer, TokenBucket};

    /// For each client address: token-bucket 10/second
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(TokenBucket::new(), Quota::per_second(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_7 {
    use tower_ratelimit::{PeerIp, Policy, Quota, RateLimitLayer, TokenBucket};

    /// For each client address: token-bucket 10/second burst 1000000
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(TokenBucket::new(), Quota::per_second(10).burst(1_000_000));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_8 {
    use tower_ratelimit::{LeakyBucket, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: leaky-bucket 10/second
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(LeakyBucket::new(), Quota::per_second(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_9 {
    use tower_ratelimit::{LeakyBucket, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: leaky-bucket 10/second queue 0
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(LeakyBucket::new().queue(0), Quota::per_second(10));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_10 {
    use std::time::Duration;

    use tower_ratelimit::{
        ElasticWindow, FixedWindow, Limit, MovingWindow, PeerIp, Policy, Quota, RateLimitLayer,
    };

    /// For each client address: fixed-window 3/250ms; moving-window 7/1500ms; shadow elastic-window 9/week
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(FixedWindow::new(), Quota::per(3, Duration::from_millis(250)))
            .limit(MovingWindow::new(), Quota::per(7, Duration::from_millis(1_500)))
            .shadow(Limit::new(ElasticWindow::new(), Quota::per_week(9)));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_11 {
    use tower_ratelimit::{
        Limit, MovingWindow, PeerIp, Policy, Quota, RateLimitLayer, SlidingWindowCounter,
    };

    /// For each client address: "free": sliding-window-counter 10/second; "daily" moving-window 10000/day
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::new(SlidingWindowCounter::new(), Quota::per_second(10))
            .with(Limit::new(MovingWindow::new(), Quota::per_day(10_000)).named("daily"))
            .with_name("free");
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_12 {
    use tower_ratelimit::{Limit, PeerIp, Policy, Quota, RateLimitLayer, SlidingWindowCounter};

    /// For each client address: limit "first" sliding-window-counter 10/second; sliding-window-counter 20/minute
    pub fn rate_limit() -> RateLimitLayer {
        let policy = Policy::from(Limit::new(SlidingWindowCounter::new(), Quota::per_second(10)).named("first"))
            .limit(SlidingWindowCounter::new(), Quota::per_minute(20));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_13 {
    use std::time::Duration;

    use tower_ratelimit::{Lockout, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: lockout 5/10 minutes for 15 minutes x2 up to 1 day forget 1 week
    pub fn rate_limit() -> RateLimitLayer {
        let lockout = Lockout::lasting(Duration::from_secs(900))
            .escalating(2, Duration::from_secs(86_400))
            .forgetting_after(Duration::from_secs(604_800));
        let policy = Policy::new(lockout, Quota::per(5, Duration::from_secs(600)));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_14 {
    use std::time::Duration;

    use tower_ratelimit::{Limit, Lockout, PeerIp, Policy, Quota, RateLimitLayer, SlidingWindowCounter};

    /// For each client address: sliding-window-counter 10/second; "lockout 1 for all" lockout 100 refusals/minute for 1 hour; lockout 9/hour for 2 hours
    pub fn rate_limit() -> RateLimitLayer {
        let lockout = Lockout::lasting(Duration::from_secs(3_600))
            .by_refusals();
        let lockout_2 = Lockout::lasting(Duration::from_secs(7_200));
        let policy = Policy::new(SlidingWindowCounter::new(), Quota::per_second(10))
            .with(Limit::new(lockout, Quota::per_minute(100)).named("lockout 1 for all"))
            .limit(lockout_2, Quota::per_hour(9));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_15 {
    use tower_ratelimit::{CalendarWindow, PeerIp, Policy, Quota, RateLimitLayer, strategy::Weekday};

    /// For each client address: calendar 50/day; calendar 5/week from sunday
    pub fn rate_limit() -> RateLimitLayer {
        let calendar = CalendarWindow::new()
            .first_weekday(Weekday::Sunday);
        let policy = Policy::new(CalendarWindow::new(), Quota::per_day(50))
            .limit(calendar, Quota::per_week(5));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_16 {
    use tower_ratelimit::{CalendarWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: calendar 1000/month from 15 in Europe/Berlin
    pub fn rate_limit() -> RateLimitLayer {
        let calendar = CalendarWindow::new()
            .first_day(15)
            .expect("a valid day")
            .in_zone("Europe/Berlin")
            .expect("a known time zone");
        let policy = Policy::new(calendar, Quota::per_month(1_000));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod sample_17 {
    use tower_ratelimit::{CalendarWindow, PeerIp, Policy, Quota, RateLimitLayer};

    /// For each client address: calendar 9000/year from 04-01
    pub fn rate_limit() -> RateLimitLayer {
        let calendar = CalendarWindow::new()
            .first_date(4, 1)
            .expect("a valid date");
        let policy = Policy::new(calendar, Quota::per_year(9_000));
        RateLimitLayer::new(policy, PeerIp::new())
    }

    // In a router: .layer(rate_limit())
}

mod requests_in_flight {
    use tower_ratelimit::{InFlightLayer, PeerIp};

    /// For each client address: 1000 in flight
    pub fn in_flight_limit() -> InFlightLayer {
        InFlightLayer::new(1_000, PeerIp::new())
    }

    // In a router: .layer(in_flight_limit())
}

#[test]
fn code_builds_the_policy_of_its_text() {
    for (layer, text) in [
        (sample_0::rate_limit(), "fixed-window 10/minute"),
        (sample_1::rate_limit(), "fixed-window-aligned 1000/day"),
        (sample_2::rate_limit(), "sliding-window-counter 10/minute"),
        (sample_3::rate_limit(), "sliding-window-counter-aligned 10/hour"),
        (sample_4::rate_limit(), "moving-window 5/15 minutes"),
        (sample_5::rate_limit(), "elastic-window 20/minute"),
        (sample_6::rate_limit(), "token-bucket 10/second"),
        (sample_7::rate_limit(), "token-bucket 10/second burst 1000000"),
        (sample_8::rate_limit(), "leaky-bucket 10/second"),
        (sample_9::rate_limit(), "leaky-bucket 10/second queue 0"),
        (sample_10::rate_limit(), "fixed-window 3/250ms; moving-window 7/1500ms; shadow elastic-window 9/week"),
        (sample_11::rate_limit(), "\"free\": 10/second; \"daily\" moving-window 10000/day"),
        (sample_12::rate_limit(), "limit \"first\" 10/second; 20/minute"),
        (sample_13::rate_limit(), "lockout 5/10m for 15m x2 up to 1d forget 7d"),
        (sample_14::rate_limit(), "10/second; limit \"lockout 1 for all\" lockout 100 refusals/m for 1h; lockout 9/h for 2h"),
        (sample_15::rate_limit(), "calendar 50/day; calendar 5/week from sunday"),
        (sample_16::rate_limit(), "calendar 1000/month from 15 in Europe/Berlin"),
        (sample_17::rate_limit(), "calendar 9000/year from 04-01"),
    ] {
        let limiter = layer.limiter().expect("the policy is fixed");
        assert_eq!(limiter.policy(), text.parse::<tower_ratelimit::Policy>().unwrap());
    }
}

#[test]
fn code_builds_a_layer_with_the_slots() {
    let layer = requests_in_flight::in_flight_limit();
    assert!(format!("{layer:?}").contains("in-flight 1000"), "{layer:?}");
}
