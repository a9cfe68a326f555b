//! The items that memcached stores: their expiry and their size.

use std::time::{Duration, Instant};

use common::harness::AGAIN;
use common::policy;
use common::servers::{Memcached, with_option};
use common::time::Stopwatch;
use tokio::time::sleep;
use tower_ratelimit::{Key, RateLimiter};

use super::connected;

/// Guards against this defect: an item with a time to live above 30 days expires at once.
#[tokio::test]
async fn items_live_at_least_as_long_as_their_window() {
    let server = Memcached::start(&[]);
    let storage = connected(&server.url()).await;
    // Expiries are in whole seconds, and the first second may end immediately. Items live for
    // `max_skew` (5 s) longer, and some seconds more if the expiry is an instant of the server's
    // clock.
    for (days, least, most) in
        [(1, 86_404, 86_407), (29, 2_505_604, 2_505_607), (31, 2_678_404, 2_678_412), (36_500, -1, -1)]
    {
        let policy = policy(&format!("fixed-window 1 per {days} days")).with_name(format!("d{days}"));
        let limiter = RateLimiter::with_storage(policy, storage.clone());
        let begun = Instant::now();
        assert!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted());
        let reply = server.ask(&format!("mg rl:d{days}|t:k t"));
        let left: i64 = reply[0].strip_prefix("HD t").unwrap().parse().unwrap();
        let took = i64::try_from(begun.elapsed().as_secs()).unwrap();
        assert!((least.min(least - took)..=most).contains(&left), "{days} days: {left} seconds after {took}");
    }
    let lives = async |millis| {
        let policy = policy(&format!("fixed-window 1 per {millis}ms")).with_name(format!("m{millis}"));
        let limiter = RateLimiter::with_storage(policy, storage.clone());
        assert!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted());
        let stored = Stopwatch::start();
        while server.ask(&format!("mg rl:m{millis}|t:k")) == ["HD"] {
            stored.assert_below(Duration::from_secs(12), "the item expires");
            sleep(AGAIN).await;
        }
        assert!(stored.wall() >= Duration::from_millis(millis), "{millis} ms: {:?}", stored.wall());
    };
    tokio::join!(lives(1), lives(1_500));
}

#[tokio::test]
async fn cleared_item_is_removed() {
    let server = Memcached::start(&[]);
    let limiter =
        RateLimiter::with_storage(policy("fixed-window 9/day").with_name("p"), connected(&server.url()).await);
    assert!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted());
    assert_eq!(server.ask("mg rl:p|t:k"), ["HD"]);
    limiter.clear(&Key::from("k")).await.unwrap();
    assert_eq!(server.ask("mg rl:p|t:k"), ["EN"]);
}

/// Returns a state of another limit under the same policy name, with this number of bytes. The
/// storage keeps such states.
fn other_state(bytes: usize) -> String {
    // It expires in decades.
    let start = "[9.other/1 9000000000000000,";
    format!("{start}{}]", "1".repeat(bytes - start.len() - 1))
}

/// Guards against this defect: a server deletes the old item when it receives one that is too
/// large.
#[tokio::test]
async fn longest_state_is_stored_under_the_longest_key() {
    /// One megabyte, minus the key and the overhead of memcached.
    const LONGEST: usize = (1 << 20) - 1_024;
    let server = Memcached::start(&[]);
    let prefix = "p".repeat(64);
    let storage = connected(&with_option(&server.url(), "prefix", &prefix)).await;
    let limiter = RateLimiter::with_storage(policy("fixed-window 9/day").with_name("p"), storage);
    // The protocol takes at most 250 bytes.
    let longest_key = "k".repeat(250 - prefix.len() - ":p|t:".len());
    let (key, name) = (Key::from(&longest_key), format!("{prefix}:p|t:{longest_key}"));
    assert!(limiter.hit(&key).await.unwrap().is_admitted());
    let own = server.ask(&format!("mg {name} v")).swap_remove(1);
    let set = |other: usize| {
        let state = format!("{own}{}", other_state(other));
        assert_eq!(server.ask(&format!("ms {name} {}\r\n{state}", state.len())), ["HD"]);
    };
    set(LONGEST - own.len());
    for remaining in [7, 6] {
        assert_eq!(limiter.hit(&key).await.unwrap().remaining(), remaining);
        assert_eq!(server.ask(&format!("mg {name} s")), [format!("HD s{LONGEST}")]);
    }
    set(LONGEST - own.len() + 1);
    let error = limiter.hit(&key).await.unwrap_err();
    assert!(!error.may_have_counted(), "{error}");
    assert_eq!(server.ask(&format!("mg {name} s")), [format!("HD s{}", LONGEST + 1)], "the text was not sent");
}

#[tokio::test]
async fn state_that_the_server_rejects_as_too_large_is_an_error() {
    let server = Memcached::start(&["-I", "512k"]);
    let limiter =
        RateLimiter::with_storage(policy("fixed-window 9/day").with_name("p"), connected(&server.url()).await);
    // The longest state that the server accepts.
    let set = |bytes: usize| {
        let state = format!("v1{}", other_state(bytes - 2));
        server.ask(&format!("ms rl:p|t:k {bytes}\r\n{state}")) == ["HD"]
    };
    let (mut least, mut most) = (400_000, 600_000);
    while most - least > 1 {
        let middle = usize::midpoint(least, most);
        if set(middle) {
            least = middle;
        } else {
            most = middle;
        }
    }
    assert!(set(least));
    let error = limiter.hit(&Key::from("k")).await.unwrap_err();
    assert!(format!("{error:#}").contains("object too large for cache (start it with a larger -I"), "{error}");
    assert!(!error.may_have_counted());
    assert_eq!(limiter.hit(&Key::from("k")).await.unwrap().remaining(), 8, "the connection is kept");
}
