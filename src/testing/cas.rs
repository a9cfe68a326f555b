//! The suite of the laws of compare-and-swap stores.

use std::fmt;
use std::time::{Duration, Instant};

use proptest::test_runner::Config;
use tokio::task::{JoinSet, yield_now};

use super::concurrency;
use super::harness::{ROUNDS, failed, runtime, runtime_of_threads};
use crate::storage::{CasStorage, Loaded, Swapped};
use crate::time::{Timestamp, micros};

/// The time to live of texts that must not expire during a test.
const LONG: Duration = Duration::from_secs(60);

/// The number of attempts at a swap that may lose to swaps of other keys.
const MAX_ATTEMPTS: u32 = 100;

/// A test suite that checks that a [`CasStorage`] obeys these laws.
///
/// The constructor takes a function that creates an empty store. The suite calls it often, inside a
/// tokio runtime with time and I/O enabled. Check [`StorageLaws`](super::StorageLaws) on a
/// [`Cas`](crate::storage::Cas) around the store as well.
///
/// | law | meaning |
/// |---|---|
/// | of storing | A load returns the stored text, byte for byte, also for long keys and for texts of up to 1.1 MB or of the [maximum](CasStorage::max_text_len) length. An empty text equals an absent one. |
/// | of comparing | A swap stores its text if its version is the current one, and changes nothing otherwise. |
/// | of versions | A swap of an earlier version is not stored, also after the key was removed, and after another text was stored. |
/// | of lost swaps | If a lost swap returns a text and a version, they are the current ones. After a lost swap, the outdated text is not [recalled](CasStorage::recall). |
/// | of keys | Keys are independent. |
/// | of expiry | A text does not expire before its time to live, which can be seconds or months. This also holds if it replaced a text with a shorter time to live. |
/// | of time | The store's time, if it returns one, is in microseconds since 1970, differs from the local time by less than a year, and advances. |
/// | of concurrency | No stored swap is overwritten by a stale one. A swap is reported as stored exactly if it was. |
///
/// The law of comparing is checked with 4,096 swaps and as many stale ones, because a fault may be
/// rare. The environment variable `PROPTEST_CASES` lowers these numbers for a slow store: it is the
/// number of swaps of each of 16 tasks, at least 16 and at most 256.
///
/// The guide [write a storage](crate::guide::write_a_storage) has an example.
#[must_use = "nothing is checked until `check` is called"]
pub struct CasLaws<S, M> {
    make: M,
    second_handle: Option<Box<MakeHandle<S>>>,
}

type MakeHandle<S> = dyn Fn(&S) -> S;

impl<S: CasStorage, M: Fn() -> S> CasLaws<S, M> {
    /// Creates the suite. `make` returns an empty store.
    pub fn new(make: M) -> Self {
        Self { make, second_handle: None }
    }

    /// Sets the function that returns another handle to the texts of a store, as another process
    /// has. The laws of comparing, of lost swaps and of concurrency use it. Defaults to `clone`.
    ///
    /// Call this method for stores whose clones share more than the texts, such as a connection or
    /// a lock.
    pub fn second_handle(self, second_handle: impl Fn(&S) -> S + 'static) -> Self {
        Self { second_handle: Some(Box::new(second_handle)), ..self }
    }

    /// Checks all laws. It starts its own tokio runtimes, so call it from a plain `#[test]`.
    ///
    /// # Panics
    ///
    /// Panics if a law is broken or the store fails, with a message that starts with the law. Also
    /// panics if it is called inside a tokio runtime.
    pub fn check(&self) {
        let runtime = runtime();
        runtime.block_on(async {
            self.store("of storing").texts_are_stored().await;
            self.store("of comparing").swaps_compare_versions().await;
            self.store("of versions").versions_are_unique().await;
            let store = self.store("of lost swaps");
            store.lost_swaps_return_the_text().await;
            store.outdated_texts_are_not_recalled(&self.another(&store)).await;
            self.store("of keys").keys_are_independent().await;
            self.store("of expiry").texts_do_not_expire_early().await;
            self.store("of time").time_advances().await;
            self.concurrent_swaps().await;
            self.many_swaps().await;
        });
        runtime_of_threads().block_on(self.concurrent_swaps());
    }

    async fn concurrent_swaps(&self) {
        const EACH: u64 = 25;
        const TASKS: u64 = 8;
        let one = self.store("of concurrency");
        let mut all = JoinSet::new();
        for _ in 0..TASKS {
            let store = self.another(&one);
            all.spawn(async move { store.count_up(EACH).await });
        }
        all.join_all().await;
        one.check_count(TASKS * EACH).await;
    }

    /// Checks each of many swaps, because a fault may be rare.
    async fn many_swaps(&self) {
        const TASKS: u64 = 16;
        let one = self.store("of comparing");
        // By default, a fault of one swap in a thousand is detected with a probability of 98 %.
        let each = Config::default().cases.clamp(16, 256);
        let mut all = JoinSet::new();
        for task in 0..TASKS {
            let store = self.another(&one);
            all.spawn(async move { store.each_swap_is_compared(&format!("k{task}"), each).await });
        }
        all.join_all().await;
    }

    /// Returns another handle to the same texts.
    fn another(&self, one: &Store<S>) -> Store<S> {
        let second_handle = self.second_handle.as_ref().map(|second_handle| second_handle(&one.store));
        Store { law: one.law, store: second_handle.unwrap_or_else(|| one.store.clone()) }
    }

    fn store(&self, law: &'static str) -> Store<S> {
        Store { law, store: (self.make)() }
    }
}

struct Store<S> {
    law: &'static str,
    store: S,
}

impl<S: CasStorage> Store<S> {
    fn check(&self, holds: bool, message: impl FnOnce() -> String) {
        assert!(holds, "law {}: {}", self.law, message());
    }

    async fn load(&self, key: &str) -> Loaded<S::Version> {
        let loaded = self.store.load(key, Instant::now() + LONG).await.map_err(failed);
        loaded.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }

    async fn text(&self, key: &str) -> String {
        self.load(key).await.text
    }

    async fn swap(&self, key: &str, version: &S::Version, text: &str, keep: Duration) -> Swapped<S::Version> {
        let swapped = self.store.swap(key, version, text, keep, Instant::now() + LONG).await.map_err(failed);
        swapped.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }

    /// Stores a text. No other swap may run at the same time.
    async fn put(&self, key: &str, text: &str) {
        let loaded = self.load(key).await;
        // So long that a store which mistakes seconds for milliseconds breaks the law of expiry first.
        let swapped = self.swap(key, &loaded.version, text, 60 * LONG).await;
        self.check(is_stored(&swapped), || format!("a swap without contention did not store {text:?} under {key:?}"));
    }

    /// Replaces the text `old`. Returns `false` if the key had another text, or the swap was lost.
    async fn replace(&self, key: &str, old: &str, new: &str, keep: Duration) -> bool {
        let loaded = self.load(key).await;
        loaded.text == old && is_stored(&self.swap(key, &loaded.version, new, keep).await)
    }

    async fn texts_are_stored(&self) {
        let (long_key, long) = (format!("policy|t:{}", "k".repeat(400)), self.text_of(4_200));
        for key in ["a|t:b", "a policy|t:with spaces \"quoted\" @+~/", &long_key] {
            self.check(self.text(key).await.is_empty(), || format!("{key:?} was never stored, but has a text"));
            for text in ["x", "[1.fixed-window/60000000 1728000000000000,1,2] \r\n\t", &long, "", "again"] {
                if self.store.max_text_len().is_none_or(|longest| text.len() <= longest) {
                    self.put(key, text).await;
                    let loaded = self.text(key).await;
                    self.check(loaded == *text, || format!("{text:?} was stored, but {loaded:?} was loaded"));
                }
            }
        }
        // Stores may cut texts at 65,535 bytes or at a megabyte.
        for len in [70_000, 1_100_000] {
            let text = self.text_of(len);
            self.put("long", &text).await;
            let loaded = self.text("long").await;
            self.check(loaded == text, || {
                let same = loaded.bytes().zip(text.bytes()).take_while(|(loaded, stored)| loaded == stored).count();
                format!(
                    "a text of {} bytes was stored, but {} bytes were loaded, of which the first {same} are equal",
                    text.len(),
                    loaded.len()
                )
            });
        }
    }

    /// Returns a text of this many bytes, or of the store's longest text if that is shorter.
    fn text_of(&self, len: usize) -> String {
        let len = self.store.max_text_len().map_or(len, |longest| len.min(longest));
        let numbers = (0..len / 6 + 2).map(|number| number.to_string());
        let mut text = numbers.collect::<Vec<_>>().join(" 1,1]");
        text.truncate(len);
        text
    }

    /// A store need not return the text of each lost swap, so several swaps are lost.
    async fn lost_swaps_return_the_text(&self) {
        let long = self.text_of(70_000);
        for text in ["one", "a text with \"quotes\"\r\n and spaces ", &long, "x", "", "after a removal"] {
            if self.store.max_text_len().is_some_and(|longest| text.len() > longest) {
                continue;
            }
            let stale = self.load("k").await.version;
            self.put("k", text).await;
            let mut returned = None;
            for _ in 0..4 {
                let Swapped::Lost(current) = self.swap("k", &stale, "late", LONG).await else {
                    self.check(false, || "a stale swap was stored".to_owned());
                    return;
                };
                let Some(current) = current else { continue };
                self.check(current.text == *text, || {
                    format!("the text is {text:.99?}, but the lost swap returned {:.99?}", current.text)
                });
                returned = Some(current.version);
            }
            if let Some(version) = returned {
                let again = self.swap("k", &version, "two", LONG).await;
                self.check(is_stored(&again), || "a swap of the returned version was lost".to_owned());
            }
        }
    }

    async fn outdated_texts_are_not_recalled(&self, other: &Self) {
        for number in 0..3 {
            let loaded = self.load("recalled").await;
            let Some(recalled) = self.store.recall("recalled") else { continue };
            self.check(recalled.text == loaded.text, || {
                format!("{:?} was loaded, but {:?} is recalled", loaded.text, recalled.text)
            });
            other.put("recalled", &number.to_string()).await;
            let swapped = self.swap("recalled", &recalled.version, "late", LONG).await;
            self.check(!is_stored(&swapped), || "a swap of an outdated recalled version was stored".to_owned());
            let again = self.store.recall("recalled").map(|again| again.text);
            self.check(again.as_ref() != Some(&recalled.text), || {
                format!("{again:?} is still recalled after a swap of its version was lost")
            });
        }
    }

    /// Swaps the current version and then the same, now outdated, version. Checks both results.
    async fn each_swap_is_compared(&self, key: &str, times: u32) {
        let mut stored = String::new();
        for number in 0..times {
            let text = format!("{number} of {key}");
            let mut attempts = 0;
            let outdated = loop {
                let loaded = self.load(key).await;
                self.check(loaded.text == stored, || {
                    format!("{stored:?} was stored in swap {number}, but {:?} was loaded", loaded.text)
                });
                if is_stored(&self.swap(key, &loaded.version, &text, LONG).await) {
                    break loaded.version;
                }
                attempts += 1;
                self.check(attempts < MAX_ATTEMPTS, || {
                    format!("a swap without contention was lost {MAX_ATTEMPTS} times")
                });
            };
            stored = text;
            let Swapped::Lost(current) = self.swap(key, &outdated, "late", LONG).await else {
                self.check(false, || format!("a stale swap was stored, after {number} that were not"));
                return;
            };
            self.check(current.as_ref().is_none_or(|current| current.text == stored), || {
                format!("the text is {stored:?}, but a lost swap returned {:?}", current.map(|current| current.text))
            });
        }
    }

    async fn swaps_compare_versions(&self) {
        let absent = self.load("k").await.version;
        // As long as in `put`.
        self.check(is_stored(&self.swap("k", &absent, "one", 60 * LONG).await), || {
            "the first swap was not stored".to_owned()
        });
        let first = self.load("k").await.version;
        for (stale, what) in [(&absent, "nothing"), (&first, "one")] {
            if what == "one" {
                self.put("k", "two").await;
            }
            let current = self.text("k").await;
            let swapped = self.swap("k", stale, "stale", LONG).await;
            self.check(!is_stored(&swapped), || format!("a swap of the old version of {what:?} was stored"));
            let after = self.text("k").await;
            self.check(after == current, || format!("a lost swap changed {current:?} to {after:?}"));
        }
        let second = self.load("k").await.version;
        self.check(!is_stored(&self.swap("k", &first, "", LONG).await), || "a stale removal was stored".to_owned());
        self.check(is_stored(&self.swap("k", &second, "", LONG).await), || {
            "the current text cannot be removed".to_owned()
        });
    }

    async fn versions_are_unique(&self) {
        let absent = self.load("k").await.version;
        self.put("k", "same").await;
        let first = self.load("k").await.version;
        self.put("k", "").await;
        let removed = self.swap("k", &first, "late", LONG).await;
        self.check(!is_stored(&removed), || "a swap of a removed version was stored".to_owned());
        self.put("k", "other").await;
        for (version, what) in [(&first, "the removed text"), (&absent, "the absent text")] {
            let swapped = self.swap("k", version, "late", LONG).await;
            self.check(!is_stored(&swapped), || format!("the version of {what} equals that of a later text"));
        }
    }

    async fn keys_are_independent(&self) {
        let (long, longer) = (format!("p|t:{}", "k".repeat(300)), format!("p|t:{}", "k".repeat(301)));
        let keys =
            ["p|t:a", "p|t:A", "p|t:b", "q|t:a", "p|t:a b", "p|t:a%20b", "p|t:ab", "p|n:1", "p|t:1", &long, &longer];
        let keys = keys.into_iter().chain(["p|t:a_b", "p|t:a%b", "p|t:a*b"]).collect::<Vec<_>>();
        for (number, key) in keys.iter().enumerate() {
            self.put(key, &format!("of key {number}")).await;
        }
        for (number, key) in keys.iter().enumerate() {
            let text = self.text(key).await;
            self.check(text == format!("of key {number}"), || {
                format!("the text of {key:?}, number {number}, is {text:?}")
            });
        }
    }

    async fn texts_do_not_expire_early(&self) {
        // A pause of the machine can hide a fault. Then the check starts again with other keys.
        for round in 0..ROUNDS {
            if self.texts_of_round_do_not_expire_early(round).await {
                return;
            }
        }
        self.check(false, || {
            format!(
                "in {ROUNDS} rounds, the store was too slow to replace a text within a second, \
                 or to load one in its last 0.3 s of 1.9 s"
            )
        });
    }

    /// Returns `false` if the text that expires in this round was not loaded shortly before, or if
    /// the text that is replaced had expired.
    async fn texts_of_round_do_not_expire_early(&self, round: u32) -> bool {
        const SECOND: Duration = Duration::from_secs(1);
        // A store that rounds 1.9 seconds down, or expires a fifth too early, is detected.
        const SHORT: Duration = Duration::from_millis(1_900);
        const LONGER: &str = "a second, and then longer";
        let kept = [("months", 86_400 * 400 * SECOND), (LONGER, LONG), ("seconds", SHORT)];
        let key = |text| format!("{text}, round {round}");
        let started = Instant::now();
        let replaced = self.replace(&key(LONGER), "", "before", SECOND).await
            && self.replace(&key(LONGER), "before", "x", LONG).await;
        for (text, keep) in kept {
            // If the text of a second has expired before it was replaced, its key is absent, too.
            if text != LONGER || !replaced {
                self.replace(&key(text), "", "x", keep).await;
            }
        }
        let (stored, mut was_seen) = (started.elapsed(), false);
        loop {
            let asked = started.elapsed();
            for (text, keep) in kept.into_iter().rev() {
                let begun = started.elapsed();
                let stays = self.text(&key(text)).await == "x";
                let passed = started.elapsed();
                self.check(stays || passed > keep, || format!("a text for {text} expired after {passed:?}"));
                was_seen |= keep == SHORT && stays && begun > stored + SHORT * 17 / 20;
            }
            // A store that counts whole seconds may keep a text for one second longer.
            if asked >= 2 * SECOND + SECOND / 4 {
                return was_seen && replaced;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn time_advances(&self) {
        const YEAR: u64 = 366 * 86_400_000_000;
        let started = Instant::now();
        let Some(first) = self.load("k").await.now else { return };
        let here = Timestamp::wall_clock();
        self.check(first.since(here) < YEAR && here.since(first) < YEAR, || {
            format!("the store's time is {first:?}, but the local time is {here:?}")
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let (second, passed) = (self.load("k").await.now.unwrap_or_default(), micros(started.elapsed()));
        let went = second.since(first);
        self.check(went > 0 && went < 100 * passed, || {
            format!("the store's time advanced by {went} us in {passed} us")
        });
    }

    /// Increments the counter `times` times, each time with one swap.
    async fn count_up(&self, times: u64) {
        for _ in 0..times {
            let mut attempts = 0;
            while !self.count_one().await {
                attempts += 1;
                self.check(attempts < concurrency::MAX_ATTEMPTS, || {
                    format!("a task has lost {attempts} swaps, one after the other")
                });
            }
        }
    }

    /// Returns `false` if another task has counted meanwhile.
    async fn count_one(&self) -> bool {
        let loaded = self.load("count").await;
        yield_now().await;
        let next = loaded.text.parse::<u64>().unwrap_or(0) + 1;
        is_stored(&self.swap("count", &loaded.version, &next.to_string(), LONG).await)
    }

    async fn check_count(&self, expected: u64) {
        let counted = self.text("count").await;
        self.check(counted == expected.to_string(), || {
            format!("{expected} swaps were reported as stored, but {counted} were stored")
        });
    }
}

fn is_stored<V>(swapped: &Swapped<V>) -> bool {
    matches!(swapped, Swapped::Stored)
}

impl<S, M> fmt::Debug for CasLaws<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CasLaws").finish_non_exhaustive()
    }
}
