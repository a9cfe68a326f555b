//! Processes whose clocks differ, on real memcached and etcd servers. Each storage has its own
//! clock, as in a process on another machine.

use std::time::{Duration, Instant};

use common::policy;
use common::servers::{Etcd, Memcached, with_timeout};
use futures_util::future::join_all;
use tokio::task::JoinSet;
use tower_ratelimit::storage::{Clock, EtcdStorage, MemcachedStorage};
use tower_ratelimit::{Key, RateLimiter, Storage, Timestamp};

const LONG: Duration = Duration::from_secs(60);

/// The least number of hits that are admitted in one and a half periods.
const LEAST: u32 = 5;
const SECOND: u64 = 1_000_000;
const YEAR: u64 = 365 * 86_400 * SECOND;

/// Each strategy, with the most units that it may admit in any second.
const POLICIES: [(&str, u32); 8] = [
    ("fixed-window 10/second", 20),
    ("fixed-window-aligned 10/second", 20),
    ("elastic-window 10/second", 10),
    ("moving-window 10/second", 10),
    ("sliding-window-counter 10/second", 20),
    ("sliding-window-counter-aligned 10/second", 20),
    ("token-bucket 10/second", 20),
    ("leaky-bucket 10/second queue 0", 10),
];

/// The machine's clock, ahead by this many microseconds.
#[derive(Debug)]
struct Ahead(u64);

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        Timestamp::wall_clock().plus(self.0)
    }
}

/// Hits from all nodes in turn for one and a half periods, or longer on a machine that is too busy to
/// make enough hits. Returns the number of admitted hits and the elapsed time.
async fn hit_by_turns(limiters: Vec<RateLimiter>) -> (u32, Duration) {
    let (started, mut admitted) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(1_500) || (admitted < LEAST && started.elapsed() < LONG) {
        for limiter in &limiters {
            let decision = limiter.hit(&Key::from("k")).await;
            admitted += u32::from(decision.unwrap_or_else(|error| panic!("{error:#}")).is_admitted());
        }
        // The nodes make ten times as many hits as are admitted.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (admitted, started.elapsed())
}

/// Asserts that three nodes together admit at most the documented number of hits. The clock of the
/// fastest node is ahead by `skew` microseconds. If a slower node hits first, the key's time can
/// jump ahead once, by at most `residual` microseconds.
async fn assert_promise<S: Storage>(skew: u64, residual: u64, storage: impl Fn(u64) -> S) {
    let mut all = JoinSet::new();
    for (number, (text, in_a_second)) in POLICIES.into_iter().enumerate() {
        let mut limiters = Vec::new();
        for ahead in [skew, 0, skew / 2] {
            let storage = storage(ahead);
            storage.ready(LONG).await.unwrap();
            limiters.push(RateLimiter::with_storage(policy(text).with_name(format!("{number}")), storage));
        }
        all.spawn(async move {
            let (admitted, took) = hit_by_turns(limiters).await;
            let seconds = (took + Duration::from_micros(residual)).as_millis().div_ceil(1_000);
            let most = in_a_second * u32::try_from(seconds).unwrap();
            assert!((LEAST..=most).contains(&admitted), "{text}, {skew} us: {admitted} of {most} in {took:?}");
        });
    }
    all.join_all().await;
}

#[tokio::test]
async fn memcached_enforces_limits_with_any_clock_skew() {
    let server = Memcached::start(&[]);
    let skews = [0, 3, 9, 12, 30, 610, YEAR / SECOND * 10].into_iter().map(async |skew| {
        let url = format!("{}?prefix=p{skew}", server.url());
        let storage = |ahead| MemcachedStorage::new(&with_timeout(&url, LONG)).unwrap().machine_clock(Ahead(ahead));
        let skew = skew * SECOND / 10;
        // The server's time corrects all but a second and a half.
        assert_promise(skew, skew.min(3 * SECOND / 2), storage).await;
    });
    join_all(skews).await;
}

#[tokio::test]
async fn etcd_enforces_limits_with_any_clock_skew() {
    let etcd = Etcd::start(1);
    // One after another, because a member stores some hundreds of hits per second.
    for skew in [0, 30, 70, 610, YEAR / SECOND * 10] {
        let url = format!("{}?prefix=p{skew}", etcd.url());
        let storage = |ahead| EtcdStorage::new(&with_timeout(&url, LONG)).unwrap().clock(Ahead(ahead));
        // Each of the two faster clocks adds at most a quota, which is less than that of a second.
        let skew = skew * SECOND / 10;
        assert_promise(skew, skew.min(2 * SECOND), storage).await;
    }
}

/// memcached treats a time to live above 30 days as an instant of its own clock.
#[tokio::test]
async fn memcached_enforces_long_periods_although_a_clock_is_a_year_ahead() {
    let server = Memcached::start(&[]);
    for (number, text) in
        ["fixed-window 1/year", "token-bucket 1/year", "moving-window 1 per 60 days"].into_iter().enumerate()
    {
        let limiters = [0, YEAR].map(|ahead| {
            let storage =
                MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap().machine_clock(Ahead(ahead));
            RateLimiter::with_storage(policy(text).with_name(format!("long{number}")), storage)
        });
        for limiter in &limiters {
            limiter.storage().ready(LONG).await.unwrap();
        }
        let key = Key::from("k");
        assert!(limiters[1].hit(&key).await.unwrap().is_admitted(), "{text}");
        for _ in 0..2 {
            for limiter in &limiters {
                assert!(limiter.hit(&key).await.unwrap().is_refused(), "{text}");
            }
        }
    }
}
