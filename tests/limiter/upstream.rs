//! A client that keeps to the limit of another server, as the guide describes.

use std::time::Duration;

use common::random::Numbers;
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{Key, LocalLimiter, MemoryStorage, Policy};

const REQUESTS: usize = 20_000;
/// The latency of a request is between 5 and 55 ms, so its spread is 50 ms.
const FASTEST: u64 = 5_000;
const SPREAD: u64 = 50_000;

/// Sends requests as soon as the client's limit admits them, and returns how many of them the server
/// refuses.
fn refused(client: &str, server: &str, numbers: &mut Numbers) -> usize {
    let (clock, limiter) = limiter(client);
    let key = Key::global();
    let mut arrivals: Vec<u64> = Vec::new();
    let mut now = 0;
    while arrivals.len() < REQUESTS {
        let decision = limiter.hit(&key);
        let wait = decision.retry_after().unwrap_or_default() + decision.delay();
        let wait = u64::try_from(wait.as_micros()).unwrap();
        if decision.is_admitted() {
            arrivals.push(now + wait + FASTEST + numbers.below(SPREAD + 1));
        }
        if decision.is_refused() {
            // Now and then, the client is idle.
            let pause = if numbers.below(20) == 0 { numbers.below(3_000_000) } else { 0 };
            now += wait + pause;
            clock.advance(Duration::from_micros(wait + pause));
        }
    }
    arrivals.sort_unstable();
    let (clock, limiter) = self::limiter(server);
    // The windows of the server have any phase.
    let mut now = 0;
    let phase = numbers.below(1_000_000);
    arrivals
        .into_iter()
        .filter(|arrival| {
            let at = arrival + phase;
            clock.advance(Duration::from_micros(at - now));
            now = at;
            limiter.hit(&key).is_refused()
        })
        .count()
}

fn limiter(policy: &str) -> (ManualClock, LocalLimiter) {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
    (clock, LocalLimiter::with_storage(policy.parse::<Policy>().unwrap(), storage))
}

/// The servers of the columns of the guide's table. The first two share a column.
const SERVERS: [&str; 6] = [
    "fixed-window 10/s",
    "fixed-window-aligned 10/s",
    "moving-window 10/s",
    "10/s",
    "token-bucket 10/s",
    "token-bucket 10/s burst 2",
];

/// Returns the row of the guide's table.
fn row(client: &str) -> String {
    let mut numbers = Numbers(7);
    let [first, aligned, rest @ ..] = SERVERS.map(|server| refused(client, server, &mut numbers));
    let cells = [first.max(aligned)].into_iter().chain(rest).map(|refused| match (refused, refused * 100 / REQUESTS) {
        (0, _) => " 0 |".to_owned(),
        (_, 0) => " < 1 % |".to_owned(),
        (_, percent) => format!(" {percent} % |"),
    });
    format!("| `{client}` |{}", cells.collect::<String>())
}

#[test]
fn longer_periods_are_refused_as_rarely_as_the_guide_says() {
    let guide = include_str!("../../src/guide/headers_and_refusals.md");
    for client in [
        "token-bucket 10/s",
        "moving-window 10/s",
        "token-bucket 10/s burst 1",
        "moving-window 10/1050ms",
        "token-bucket 10/1050ms burst 1",
    ] {
        let row = row(client);
        assert!(guide.contains(&row), "the guide needs the row {row}");
    }
}

#[test]
fn server_without_bursts_needs_the_spread_for_each_request() {
    let refused = |client| refused(client, "token-bucket 10/s burst 1", &mut Numbers(7));
    assert!(refused("token-bucket 10/1050ms burst 1") > REQUESTS / 10);
    assert_eq!(refused("token-bucket 10/1500ms burst 1"), 0);
}
