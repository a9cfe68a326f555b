//! Pages of the keys of a memory storage.

use std::time::Duration;

use common::{memory_with_manual_clock, message, policy};
use futures_util::FutureExt;
use tower_ratelimit::storage::{KeyPage, ManualClock, StorageError, StorageErrorKind};
use tower_ratelimit::{Key, MemoryStorage, RateLimiter, Storage};

fn keeping(max_keys: usize) -> (MemoryStorage, ManualClock) {
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().max_keys(max_keys).clock(clock.clone()).keep_keys(true);
    (storage.build().unwrap(), clock)
}

fn page(limiter: &RateLimiter, prefix: &str, after: Option<&str>, limit: usize) -> Result<KeyPage, StorageError> {
    limiter.keys(prefix, after, limit).now_or_never().expect("a memory storage never waits")
}

/// Returns the sorted texts of the keys of all pages, and the number of pages.
fn all(limiter: &RateLimiter, prefix: &str, limit: usize) -> (Vec<String>, usize) {
    let (mut texts, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = page(limiter, prefix, after.as_deref(), limit).unwrap();
        assert!(page.keys.len() <= limit);
        texts.extend(page.keys.iter().map(|(key, _)| key.to_string()));
        (after, pages) = (page.next, pages + 1);
        if after.is_none() {
            texts.sort();
            return (texts, pages);
        }
    }
}

fn hit(limiter: &RateLimiter, key: &Key) {
    assert!(limiter.hit(key).now_or_never().unwrap().unwrap().is_admitted());
}

#[test]
fn pages_have_every_key_of_the_policy_once() {
    let (storage, clock) = keeping(100_000);
    // Seven limits take another path, and logs take a third one.
    let many = ["fixed-window 9/day"; 7].join("; ");
    for text in ["9/day", "moving-window 9/day", &many] {
        let limiter = |name: &str| RateLimiter::with_storage(policy(text).with_name(name), storage.clone());
        let (ours, others) = (limiter("ours"), limiter("others"));
        let keys: Vec<Key> = (0..5_000_u64).map(Key::from).collect();
        for key in &keys {
            hit(&ours, key);
            hit(&others, key);
        }
        let mut texts: Vec<_> = keys.iter().map(ToString::to_string).collect();
        texts.sort();
        let (found, pages) = all(&ours, "", 100);
        assert_eq!(found, texts, "{text}");
        assert!(pages >= 50, "{pages}");
        texts.retain(|text| text.starts_with("n:49"));
        assert_eq!(all(&ours, "n:49", 7).0, texts, "{text}");
        clock.advance(Duration::from_secs(3 * 86_400));
        assert!(all(&ours, "", 100).0.is_empty(), "{text}: expired keys are not listed");
    }
}

#[test]
fn listed_keys_have_the_numbers_of_a_peek() {
    let (storage, _) = keeping(1_000);
    let limiter = RateLimiter::with_storage(policy("fixed-window 3/day; lockout 9/day for 1h"), storage);
    for (name, hits) in [("alice", 3), ("bob", 1)] {
        (0..hits).for_each(|_| hit(&limiter, &Key::from(name)));
    }
    let mut keys = page(&limiter, "t:", None, 10).unwrap().keys;
    keys.sort_by_key(|(key, _)| key.to_string());
    let seen: Vec<_> = keys.iter().map(|(key, peek)| (key.to_string(), peek.is_refused(), peek.remaining())).collect();
    assert_eq!(seen, [("t:alice".to_owned(), true, 0), ("t:bob".to_owned(), false, 2)]);
}

#[test]
fn keys_of_several_members_and_charges_are_listed() {
    let (storage, _) = keeping(1_000);
    let limiter = |name: &str| RateLimiter::with_storage(policy("9/day").with_name(name), storage.clone());
    let (user, tenant, key) = (limiter("user"), limiter("tenant"), Key::from("k"));
    let _ = RateLimiter::reserve_all(&[(&user, &key), (&tenant, &key)], 1).now_or_never().unwrap().unwrap();
    let _ = user.charge(&Key::from("charged"), 5).now_or_never().unwrap().unwrap();
    let _ = user.peek(&Key::from("peeked")).now_or_never().unwrap().unwrap();
    assert_eq!(all(&user, "", 10).0, ["t:charged", "t:k"]);
    assert_eq!(all(&tenant, "", 10).0, ["t:k"]);
    assert_eq!(storage.clear_all().now_or_never().unwrap().unwrap(), 3);
    assert!(all(&user, "", 10).0.is_empty());
    hit(&user, &key);
    assert_eq!(all(&user, "", 10).0, ["t:k"]);
}

/// A flood of new keys evicts earlier ones, whose names are removed later.
#[test]
fn keys_are_listed_after_others_were_evicted() {
    let (storage, _) = keeping(1_000);
    let limiter = RateLimiter::with_storage(policy("9/day"), storage.clone());
    for client in 0..200_000_u64 {
        hit(&limiter, &Key::from(client));
    }
    assert_eq!(all(&limiter, "", 100).0.len(), storage.stats().keys);
}

#[test]
fn long_keys_are_left_out() {
    let (storage, _) = keeping(1_000);
    let limiter = RateLimiter::with_storage(policy("9/day").with_name("p"), storage);
    let [short, long] = [196, 197].map(|len| Key::from("x".repeat(len)));
    hit(&limiter, &short);
    hit(&limiter, &long);
    assert_eq!(all(&limiter, "", 10).0, [short.to_string()]);
}

#[test]
fn storage_that_cannot_list_its_keys_says_so() {
    let limiter = RateLimiter::with_storage(policy("9/day"), memory_with_manual_clock().0);
    let error = page(&limiter, "", None, 10).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unsupported);
    let advice = "this storage cannot list its keys: the memory storage keeps hashes of keys: build it by \
                  MemoryStorage::builder().keep_keys(true)";
    assert_eq!(message(error), advice);
    let limiter = RateLimiter::with_storage(policy("9/day"), keeping(1_000).0);
    for after in ["x", "", "1-2", "1-2-3-4", "1-2-fffffffff", "\u{e9}"] {
        assert!(
            message(page(&limiter, "", Some(after), 10).unwrap_err()).starts_with("unknown page of keys"),
            "{after}"
        );
    }
    let error = message(page(&limiter, "t:\u{e9}", None, 10).unwrap_err());
    assert!(error.starts_with("the prefix of the keys is not printable ASCII"), "{error}");
    assert!(page(&limiter, "", Some("ffff-0-0"), 0).unwrap().keys.is_empty());
}
