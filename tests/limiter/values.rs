//! Quotas, policies and keys: values that round trip as text, validation and equality.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::panic::catch_unwind;
use std::time::Duration;

use common::panic_message;
use tower_ratelimit::{
    Decision, ElasticWindow, FixedWindow, Key, LeakyBucket, Limit, MovingWindow, Policy, Quota, SlidingWindowCounter,
    Timestamp, TokenBucket,
};

#[test]
fn quota_uses_a_sliding_window_counter_or_with_a_burst_a_token_bucket() {
    assert_eq!(Policy::from(Quota::per_minute(60)).to_string(), "sliding-window-counter 60/minute");
    assert_eq!(Policy::from(Quota::per_second(10).burst(20)).to_string(), "token-bucket 10/second burst 20");
    assert_eq!("60/minute".parse(), Ok(Policy::from(Quota::per_minute(60))));
    assert_eq!("10/second burst 20".parse(), Ok(Policy::from(Quota::per_second(10).burst(20))));
}

#[test]
fn policies_round_trip_as_text() {
    let second = Quota::per_second(10);
    let policies = [
        Policy::new(FixedWindow::new(), second),
        Policy::new(FixedWindow::aligned(), Quota::per_hour(3)),
        Policy::new(ElasticWindow::new(), Quota::per(1, Duration::from_millis(1_500))),
        Policy::new(MovingWindow::new(), Quota::per(u32::MAX, Duration::from_secs(3 * 604_800))),
        Policy::new(SlidingWindowCounter::aligned(), Quota::per_day(1)),
        Policy::new(TokenBucket::new(), second.burst(20)).limit(TokenBucket::new(), Quota::per_day(1_000)),
        Policy::new(LeakyBucket::new().queue(0), second).limit(LeakyBucket::new(), second),
        Policy::named("free tier: \"a\\b\"; 1/s").limit(SlidingWindowCounter::new(), second),
        Policy::named("p")
            .with(Limit::new(FixedWindow::new(), second).named("short, \"one\""))
            .with(Limit::from(second).named("q")),
        Policy::from(Limit::from(second).named("only")),
    ];
    for policy in policies {
        let text = policy.to_string();
        let read = text.parse::<Policy>().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(read, policy);
        assert_eq!(read.to_string(), text);
        assert_eq!((read.identity(), read.digest()), (policy.identity(), policy.digest()));
        assert_eq!(read.name(), policy.name());
    }
}

#[test]
fn quotas_round_trip_as_text() {
    let periods =
        [1, 7, 1_000, 1_001, 60_000, 90_000, 3_600_000, 86_400_000, 604_800_000, 2_592_000_000, 31_536_000_000];
    for millis in periods {
        for amount in [1, 2, u32::MAX] {
            let quota = Quota::per(amount, Duration::from_millis(millis));
            assert_eq!(quota.to_string().parse(), Ok(quota), "{quota}");
        }
    }
    assert_eq!(Quota::per(3, Duration::from_secs(7_200)).to_string(), "3/2 hours");
    assert_eq!(Quota::per(3, Duration::from_micros(1_500)).to_string(), "3/1500us", "which has no text form");
}

/// Guards against this defect: a policy's name is injected into a structured field.
#[test]
fn names_that_are_no_valid_header_values_are_rejected() {
    for name in ["", "a\nb", "a\u{0}", "caf\u{e9}", "\u{7f}"] {
        assert!(catch_unwind(|| Policy::named(name)).is_err(), "{name:?}");
        assert!(Policy::from(Quota::per_second(1)).try_with_name(name).is_err());
        assert!(catch_unwind(|| Limit::from(Quota::per_second(1)).named(name)).is_err());
    }
    let _ = Policy::named("/login \"quoted\" \\ {x}");
}

#[test]
fn invalid_values_panic_in_constructors_and_are_errors_in_try_constructors() {
    let messages = [
        panic_message(|| Quota::per_second(0)),
        panic_message(|| Quota::per_minute(0)),
        panic_message(|| Quota::per_hour(0)),
        panic_message(|| Quota::per_day(0)),
        panic_message(|| Quota::per_week(0)),
        panic_message(|| Quota::per_month(0)),
        panic_message(|| Quota::per_year(0)),
        panic_message(|| Quota::per(1, Duration::ZERO)),
        panic_message(|| Quota::per(1, Duration::MAX)),
        panic_message(|| Quota::per_second(1).burst(0)),
        panic_message(|| Quota::per_day(1).burst(u32::MAX)),
        panic_message(|| Policy::new(FixedWindow::new(), Quota::per_second(1).burst(2))),
        panic_message(|| Policy::named("\n")),
    ];
    for message in messages {
        assert!(["must", "does not support", "not a valid"].iter().any(|part| message.contains(part)), "{message}");
    }
    assert!(Quota::try_per(0, Duration::from_secs(1)).is_err());
    assert!(Quota::try_per(1, Duration::ZERO).is_err() && Quota::try_per(1, Duration::MAX).is_err());
    assert!(Quota::per_second(1).try_burst(0).is_err() && Quota::per_day(1).try_burst(u32::MAX).is_err());
    assert!(Policy::try_new(ElasticWindow::new(), Quota::per_second(1).burst(2)).is_err());
    assert!(Limit::try_new(LeakyBucket::new().queue(u32::MAX), Quota::per_second(1)).is_err());
}

#[test]
fn limits_are_named_by_policy_and_number() {
    let one: Policy = "5/second".parse().unwrap();
    assert_eq!(one.limit_name(0), "sliding-window-counter 5/second");
    assert_eq!(one.clone().with_name("free").limit_name(0), "free");
    let two = one.with(Limit::from(Quota::per_day(9)).named("daily")).with_name("free");
    assert_eq!((two.limit_name(0), two.limit_name(1)), ("free-1".into(), "daily".into()));
}

/// Guards against this defect: different composite keys are equal after joining with a separator.
#[test]
fn keys_of_different_values_differ() {
    let (a, ab, bc, c) = (Key::from("a"), Key::from("ab"), Key::from("bc"), Key::from("c"));
    let long = Key::from("x".repeat(300));
    let keys = [
        Key::global(),
        Key::from(""),
        Key::from("*"),
        Key::from("1.2.3.4"),
        Key::from(IpAddr::V4(Ipv4Addr::new(1, 2, 3, 4))),
        Key::from(Ipv4Addr::new(1, 2, 3, 4).to_ipv6_mapped()),
        Key::from(Ipv6Addr::LOCALHOST),
        Key::from(16_909_060_u64),
        Key::from(&[1, 2, 3, 4][..]),
        Key::join([]),
        Key::join([&a]),
        Key::join([&a, &bc]),
        Key::join([&ab, &c]),
        Key::join([&Key::join([&a, &bc])]),
        Key::join([&a, &bc, &c]),
        Key::join([&long, &a]),
        Key::join([&a, &long]),
        Key::join([&bc, &a]),
        a.within(&bc),
        bc.within(&a),
        a.within(&a),
        a.within(&bc).within(&c),
        a.within(&bc.within(&c)),
        long.within(&a),
        a.within(&long),
        Key::from("@:(t:bc,t:a)"),
        a,
        long,
    ];
    for (i, first) in keys.iter().enumerate() {
        for (j, second) in keys.iter().enumerate() {
            assert_eq!(first == second, i == j, "{first:?} and {second:?}");
        }
    }
    let text = "y".repeat(45);
    assert_eq!(Key::from(&*text), Key::from(text.clone()), "equal from any source");
    assert_eq!(Key::from(text.clone() + "y"), Key::from((text + "y").as_bytes()));
}

#[test]
fn public_types_are_send_sync_and_debug() {
    use tower_ratelimit::*;
    type Inner = tower::util::BoxCloneSyncService<http::Request<()>, http::Response<String>, std::convert::Infallible>;
    fn check<T: Send + Sync + Debug>() {}
    fn check_future<T: Send + Debug>() {}
    type Store = common::fake_cas_store::FakeCasStore;

    check::<Quota>();
    check::<Policy>();
    check::<PolicyBuilder>();
    check::<Limit>();
    check::<Key>();
    check::<Timestamp>();
    check::<Decision>();
    check::<ConfigError>();
    check::<Headers>();
    check::<OnError>();
    check::<PolicySource>();
    check::<(RateLimiter, LocalLimiter)>();
    check::<(Reservation, Reservations, Counter)>();
    check_future::<SettleFuture>();
    check::<RateLimitLayer>();
    check::<RateLimitLayer<EmptyRejection>>();
    check::<RateLimit<()>>();
    check::<(RejectReason<'_>, LimitExceeded<'_>)>();
    check::<(TextRejection, EmptyRejection, ProblemRejection, GrpcRejection)>();
    check::<MemoryStorage>();
    check::<storage::MemoryStorageBuilder>();
    check::<storage::StorageRequest<'_>>();
    check::<(storage::SystemClock, storage::ManualClock, storage::TokioClock)>();
    check::<(strategy::State, strategy::Status, strategy::Hit, strategy::Log)>();
    check::<(FixedWindow, ElasticWindow, MovingWindow, SlidingWindowCounter, TokenBucket, LeakyBucket)>();
    check::<(extract::Head<'_>, extract::KeyError, Header, Global, PeerIp, extract::Path, extract::Method)>();
    check::<(ClientIp, extract::AllowList)>();
    check::<(extract::MatchedPath, extract::Or<Header, PeerIp>, extract::And<Header, PeerIp>)>();
    check::<(storage::Cas<Store>, storage::StorageError, storage::Loaded<u64>, storage::Swapped<u64>)>();
    check_future::<ResponseFuture<Inner, (), TextRejection>>();
}

#[test]
fn decision_without_limits_shows_zeros() {
    let decision = Decision::from_statuses(Timestamp::EPOCH, 1, std::iter::empty());
    assert!(decision.is_admitted());
    let shown = decision.shown();
    assert_eq!((shown.capacity(), shown.remaining(), shown.reset_after()), (0, 0, Duration::ZERO));
    assert_eq!((decision.capacity(), decision.remaining(), decision.retry_after()), (0, 0, None));
}
