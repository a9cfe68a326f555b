use std::fmt;
use std::time::{Duration, Instant};

use tokio::task::{JoinSet, yield_now};

use super::desk::{failed, runtime, runtime_of_threads};
use crate::Timestamp;
use crate::storage::{CasStorage, Loaded, Swapped};
use crate::time::micros;

/// For what is to stay while it is looked at.
const LONG: Duration = Duration::from_secs(60);

/// The laws of a store that compares and swaps, each tried by a script of its own.
///
/// They ask for one thing: a function that makes a store with nothing in it. It is called often, inside of a runtime of tokio's with
/// time and I/O. Then try [`StorageLaws`](super::StorageLaws) on a [`Cas`](crate::storage::Cas) over it.
///
/// | law | says |
/// |---|---|
/// | of keeping | what was stored is loaded, byte for byte, also of long texts and long keys; an empty text is nothing |
/// | of comparing | a swap stores if the version is that of what stands there, and changes nothing otherwise |
/// | of versions | when a key is removed and another text stored, its version is none that was there before |
/// | of telling | what a swap that has lost tells of what stands there is that, and can be swapped |
/// | of keys | keys do not mix |
/// | of staying | what is to be kept for seconds, or for months, is not gone before, also where something stood that was to be kept for less |
/// | of time | the store's time, if it says one, is in microseconds since 1970, and goes on |
/// | 9 | of many swaps at once none is lost, nor told to be stored when it was not |
///
/// Its example is that of [`CasStorage`].
#[must_use = "nothing is tried until `check` is called"]
pub struct CasLaws<S, M> {
    make: M,
    second_handle: Option<Box<Elsewhere<S>>>,
}

type Elsewhere<S> = dyn Fn(&S) -> S;

impl<S: CasStorage, M: Fn() -> S> CasLaws<S, M> {
    /// The laws of what `make` makes: an empty store.
    pub fn new(make: M) -> Self {
        Self { make, second_handle: None }
    }

    /// Law 9 with handles on the same texts as other processes have them: `second_handle` makes one of the store it is given. For stores
    /// whose clones share more than the texts: a connection, a lock.
    pub fn second_handle(self, second_handle: impl Fn(&S) -> S + 'static) -> Self {
        Self { second_handle: Some(Box::new(second_handle)), ..self }
    }

    /// Tries them all.
    ///
    /// # Panics
    ///
    /// When a law is broken; the message begins with it.
    pub fn check(&self) {
        let runtime = runtime();
        runtime.block_on(async {
            self.store("of keeping").keeps().await;
            self.store("of comparing").compares().await;
            self.store("of versions").tells_versions_apart().await;
            self.store("of telling").tells_what_stands_there().await;
            self.store("of keys").tells_keys_apart().await;
            self.store("of staying").lets_things_stay().await;
            self.store("of time").has_a_clock().await;
            self.counts_in_tasks().await;
        });
        runtime_of_threads().block_on(self.counts_in_tasks());
    }

    async fn counts_in_tasks(&self) {
        const EACH: u64 = 25;
        const TASKS: u64 = 8;
        let one = self.store("9");
        let mut all = JoinSet::new();
        for _ in 0..TASKS {
            let second_handle = self.second_handle.as_ref().map(|second_handle| second_handle(&one.store));
            let tried = Tried { law: one.law, store: second_handle.unwrap_or_else(|| one.store.clone()) };
            all.spawn(async move { tried.count_up(EACH).await });
        }
        while let Some(ended) = all.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
        one.must_have_counted(TASKS * EACH).await;
    }

    fn store(&self, law: &'static str) -> Tried<S> {
        Tried { law, store: (self.make)() }
    }
}

struct Tried<S> {
    law: &'static str,
    store: S,
}

impl<S: CasStorage> Tried<S> {
    fn must(&self, holds: bool, else_told: impl FnOnce() -> String) {
        assert!(holds, "law {}: {}", self.law, else_told());
    }

    async fn load(&self, key: &str) -> Loaded<S::Version> {
        let loaded = self.store.load(key).await.map_err(failed);
        loaded.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }

    async fn text(&self, key: &str) -> String {
        self.load(key).await.text
    }

    async fn swap(&self, key: &str, version: &S::Version, text: &str, keep: Duration) -> Swapped<S::Version> {
        let swapped = self.store.swap(key, version, text, keep).await.map_err(failed);
        swapped.unwrap_or_else(|error| panic!("law {}: {error}", self.law))
    }

    /// Puts a text where nobody else does.
    async fn put(&self, key: &str, text: &str) {
        let loaded = self.load(key).await;
        let swapped = self.swap(key, &loaded.version, text, LONG).await;
        self.must(is_stored(&swapped), || format!("nobody else is there, and {text:?} is not stored under {key:?}"));
    }

    async fn keeps(&self) {
        let (long_key, long) = (format!("policy|t:{}", "k".repeat(400)), "[1.x/1 1,1,1]".repeat(300));
        for key in ["a|t:b", "a policy|t:with spaces \"quoted\" @+~/", &long_key] {
            self.must(self.text(key).await.is_empty(), || format!("{key:?} was never stored, and is there"));
            for text in ["x", "[1.fixed-window/60000000 1728000000000000,1,2] \r\n\t", &long, "", "again"] {
                self.put(key, text).await;
                let loaded = self.text(key).await;
                self.must(loaded == *text, || format!("{text:?} was stored, and {loaded:?} loaded"));
            }
        }
    }

    async fn compares(&self) {
        let absent = self.load("k").await.version;
        self.must(is_stored(&self.swap("k", &absent, "one", LONG).await), || "the first swap is not stored".to_owned());
        let first = self.load("k").await.version;
        for (stale, what) in [(&absent, "nothing"), (&first, "one")] {
            if what == "one" {
                self.put("k", "two").await;
            }
            let stands = self.text("k").await;
            let swapped = self.swap("k", stale, "stale", LONG).await;
            self.must(!is_stored(&swapped), || format!("{what:?} is there no longer, and is swapped"));
            let after = self.text("k").await;
            self.must(after == stands, || format!("a swap has lost, and {stands:?} has become {after:?}"));
        }
        let second = self.load("k").await.version;
        self.must(!is_stored(&self.swap("k", &first, "", LONG).await), || "a stale removal is done".to_owned());
        self.must(is_stored(&self.swap("k", &second, "", LONG).await), || {
            "what stands there cannot be removed".to_owned()
        });
    }

    async fn tells_versions_apart(&self) {
        let absent = self.load("k").await.version;
        self.put("k", "same").await;
        let first = self.load("k").await.version;
        self.put("k", "").await;
        let removed = self.swap("k", &first, "late", LONG).await;
        self.must(!is_stored(&removed), || "what was removed is swapped".to_owned());
        self.put("k", "other").await;
        for (version, what) in [(&first, "what was removed"), (&absent, "nothing")] {
            let swapped = self.swap("k", version, "late", LONG).await;
            self.must(!is_stored(&swapped), || {
                format!("the version of {what} is taken for that of what was stored since")
            });
        }
    }

    async fn tells_what_stands_there(&self) {
        let stale = self.load("k").await.version;
        self.put("k", "one").await;
        let Swapped::Lost(told) = self.swap("k", &stale, "late", LONG).await else {
            panic!("law {}: a stale swap is stored", self.law)
        };
        let Some(told) = told else { return };
        self.must(told.text == "one", || format!("\"one\" stands there, and {:?} is told", told.text));
        let again = self.swap("k", &told.version, "two", LONG).await;
        self.must(is_stored(&again), || "the version that was told cannot be swapped".to_owned());
    }

    async fn tells_keys_apart(&self) {
        let (long, longer) = (format!("p|t:{}", "k".repeat(300)), format!("p|t:{}", "k".repeat(301)));
        let keys =
            ["p|t:a", "p|t:A", "p|t:b", "q|t:a", "p|t:a b", "p|t:a%20b", "p|t:ab", "p|n:1", "p|t:1", &long, &longer];
        for key in keys {
            self.put(key, &format!("of {key}")).await;
        }
        for key in keys {
            let text = self.text(key).await;
            self.must(text == format!("of {key}"), || format!("{text:?} stands under {key:?}"));
        }
    }

    async fn lets_things_stay(&self) {
        const SECOND: Duration = Duration::from_secs(1);
        let kept = [("seconds", 3 * SECOND), ("months", 86_400 * 400 * SECOND), ("a second, and then longer", LONG)];
        let started = Instant::now();
        for (key, keep) in kept {
            if keep == LONG {
                let version = self.load(key).await.version;
                let _ = self.swap(key, &version, "before", SECOND).await;
            }
            let version = self.load(key).await.version;
            let _ = self.swap(key, &version, "x", keep).await;
        }
        // A second may be two where whole seconds are counted.
        while started.elapsed() < 2 * SECOND + SECOND / 4 {
            for (key, keep) in kept {
                let stays = self.text(key).await == "x";
                let passed = started.elapsed();
                self.must(stays || passed > keep, || format!("what is to stay for {key} is gone after {passed:?}"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn has_a_clock(&self) {
        const YEAR: u64 = 366 * 86_400_000_000;
        let Some(first) = self.load("k").await.now else { return };
        let here = Timestamp::wall_clock();
        self.must(first.since(here) < YEAR && here.since(first) < YEAR, || {
            format!("the store's time is {first:?}, and here it is {here:?}")
        });
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(20) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (second, passed) = (self.load("k").await.now.unwrap_or_default(), micros(started.elapsed()));
        let went = second.since(first);
        self.must(went > 0 && went < 100 * passed, || format!("{went} us of the store's time are {passed} us"));
    }

    /// Adds one as often as this, each by a swap of its own.
    async fn count_up(&self, times: u64) {
        for _ in 0..times {
            loop {
                let loaded = self.load("count").await;
                yield_now().await;
                let next = loaded.text.parse::<u64>().unwrap_or(0) + 1;
                if is_stored(&self.swap("count", &loaded.version, &next.to_string(), LONG).await) {
                    break;
                }
            }
        }
    }

    async fn must_have_counted(&self, expected: u64) {
        let counted = self.text("count").await;
        self.must(counted == expected.to_string(), || {
            format!("{expected} swaps are told to be stored, and {counted} were")
        });
    }
}

fn is_stored<V>(swapped: &Swapped<V>) -> bool {
    matches!(swapped, Swapped::Stored)
}

impl<S, M> fmt::Debug for CasLaws<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapLaws").finish_non_exhaustive()
    }
}
