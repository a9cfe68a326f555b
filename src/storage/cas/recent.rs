//! The last known texts of keys, with which a hit needs one round trip.

use std::sync::{Mutex, MutexGuard};

use crate::storage::recent_map::RecentMap;
use crate::sync::unpoisoned;

/// The maximum length of a text in bytes. A longer one is not kept.
const LONGEST_TEXT: usize = 512;

/// The number of swaps of a key after which its text is kept again, if another process has changed it.
#[cfg(feature = "memcached")]
const LOADS_AFTER_LOST: u8 = 8;

/// The last known texts of keys and their versions, in bounded memory. One storage and its clones
/// share them.
#[derive(Debug)]
pub(in crate::storage) struct RecentTexts<V>(Mutex<RecentMap<Box<str>, Recent<V>>>);

#[derive(Debug)]
enum Recent<V> {
    Text(Box<str>, V),
    /// Another process uses the key, too. The number of swaps for which its text is not kept.
    #[cfg(feature = "memcached")]
    Shared(u8),
}

impl<V> Default for RecentTexts<V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<V: Clone> RecentTexts<V> {
    /// Returns the last known text of a key and its version.
    pub(in crate::storage) fn recall(&self, key: &str) -> Option<(String, V)> {
        match self.lock().get(key)? {
            Recent::Text(text, version) => Some((String::from(&**text), version.clone())),
            #[cfg(feature = "memcached")]
            Recent::Shared(_) => None,
        }
    }

    /// Records the text of a key. A text that is empty or too long is forgotten.
    pub(in crate::storage) fn record(&self, key: &str, text: &str, version: V) {
        let mut texts = self.lock();
        #[cfg(feature = "memcached")]
        if let Some(&Recent::Shared(swaps @ 1..)) = texts.get(key) {
            return texts.insert(key.into(), Recent::Shared(swaps - 1));
        }
        if text.is_empty() || text.len() > LONGEST_TEXT {
            texts.remove(key);
        } else {
            texts.insert(key.into(), Recent::Text(text.into(), version));
        }
    }

    /// Forgets the text of a key. Call this before a swap: if it fails, the stored text is unknown.
    pub(in crate::storage) fn forget(&self, key: &str) {
        let mut texts = self.lock();
        if let Some(Recent::Text(..)) = texts.get(key) {
            texts.remove(key);
        }
    }

    /// Does not keep the text of a key for some time, because a swap was lost. A store whose lost swaps
    /// return the newer text records that instead.
    #[cfg(feature = "memcached")]
    pub(in crate::storage) fn set_shared(&self, key: &str) {
        self.lock().insert(key.into(), Recent::Shared(LOADS_AFTER_LOST));
    }

    fn lock(&self) -> MutexGuard<'_, RecentMap<Box<str>, Recent<V>>> {
        unpoisoned(self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_known_until_they_are_long_or_forgotten() {
        let recent = RecentTexts::default();
        assert_eq!(recent.recall("k"), None);
        recent.record("k", "text", 1);
        assert_eq!(recent.recall("k"), Some(("text".to_owned(), 1)));
        recent.record("k", &"x".repeat(LONGEST_TEXT + 1), 2);
        assert_eq!(recent.recall("k"), None, "a long text is not kept, and the older one is outdated");
        recent.record("k", "text", 3);
        recent.forget("k");
        assert_eq!(recent.recall("k"), None);
    }

    #[test]
    #[cfg(feature = "memcached")]
    fn text_that_others_change_is_not_kept_for_some_swaps() {
        let recent = RecentTexts::default();
        recent.set_shared("k");
        for _ in 0..LOADS_AFTER_LOST {
            recent.forget("k");
            recent.record("k", "text", 1);
            assert_eq!(recent.recall("k"), None);
        }
        recent.record("k", "text", 1);
        assert_eq!(recent.recall("k"), Some(("text".to_owned(), 1)));
    }
}
