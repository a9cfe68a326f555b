//! Laws of a compare-and-swap store for texts of any length, and for swaps of outdated versions.

use super::cas::{LONG, Store, is_stored};
use crate::storage::{CasStorage, Swapped};

/// The number of attempts at a swap that may lose to swaps of other keys.
const MAX_ATTEMPTS: u32 = 100;

impl<S: CasStorage> Store<S> {
    pub(super) async fn texts_are_stored(&self) {
        let (long_key, long) = (format!("policy|t:{}", "k".repeat(400)), self.text_of(4_200));
        for key in ["a|t:b", "a policy|t:with spaces \"quoted\" @+~/", &long_key] {
            self.check(self.text(key).await.is_empty(), || format!("{key:?} was never stored, but has a text"));
            for text in ["x", "[1.fixed-window/60000000 1728000000000000,1,2] \r\n\t", &long, "", "again"] {
                if self.store.longest().is_none_or(|longest| text.len() <= longest) {
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
        let len = self.store.longest().map_or(len, |longest| len.min(longest));
        let numbers = (0..len / 6 + 2).map(|number| number.to_string());
        let mut text = numbers.collect::<Vec<_>>().join(" 1,1]");
        text.truncate(len);
        text
    }

    /// A store need not return the text of each lost swap, so several swaps are lost.
    pub(super) async fn lost_swaps_return_the_text(&self) {
        let long = self.text_of(70_000);
        for text in ["one", "a text with \"quotes\"\r\n and spaces ", &long, "x", "", "after a removal"] {
            if self.store.longest().is_some_and(|longest| text.len() > longest) {
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

    pub(super) async fn outdated_texts_are_not_recalled(&self, other: &Self) {
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
    pub(super) async fn each_swap_is_compared(&self, key: &str, times: u32) {
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
}
