//! The last known texts of keys, with which a hit needs one round trip.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::storage::recent_map::RecentMap;
use crate::sync::unpoisoned;

/// The maximum length of a text in bytes. A longer one is not kept.
const LONGEST_TEXT: usize = 512;

/// The age from which a text is not recalled, if its version is a number that the server assigns.
#[cfg(any(feature = "memcached", feature = "etcd"))]
pub(in crate::storage) const VERSION_LASTS: Duration = Duration::from_secs(10);

/// The number of swaps of a key after which its text is kept again, if another process has changed it.
#[cfg(any(feature = "memcached", feature = "etcd"))]
const SWAPS_AFTER_LOST: u8 = 8;

/// The last known texts of keys and their versions, in bounded memory. One storage and its clones
/// share them.
#[derive(Debug)]
pub(in crate::storage) struct RecentTexts<V>(Mutex<RecentMap<Box<str>, Recent<V>>>);

#[derive(Debug)]
enum Recent<V> {
    Text {
        text: Box<str>,
        version: V,
        recorded: Instant,
    },
    /// Another process uses the key, too. The number of swaps for which its text is not kept.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    Shared(u8),
}

impl<V> Default for RecentTexts<V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<V: Clone> RecentTexts<V> {
    /// Returns the last known text of a key and its version, unless it is older than `lasts`.
    ///
    /// A server that was restarted or restored from a backup can assign a version again. If the text of
    /// a version is old, another process may have used the key often enough for that.
    pub(in crate::storage) fn recall(&self, key: &str, lasts: Duration) -> Option<(String, V)> {
        match self.lock().get(key)? {
            Recent::Text { text, version, recorded } => {
                (recorded.elapsed() <= lasts).then(|| (String::from(&**text), version.clone()))
            }
            #[cfg(any(feature = "memcached", feature = "etcd"))]
            Recent::Shared(_) => None,
        }
    }

    /// Records the text of a key. A text that is empty or too long is forgotten.
    pub(in crate::storage) fn record(&self, key: &str, text: &str, version: V) {
        let mut texts = self.lock();
        #[cfg(any(feature = "memcached", feature = "etcd"))]
        if let Some(&Recent::Shared(swaps @ 1..)) = texts.get(key) {
            return texts.insert(key.into(), Recent::Shared(swaps - 1));
        }
        if text.is_empty() || text.len() > LONGEST_TEXT {
            texts.remove(key);
        } else {
            let recorded = Instant::now();
            texts.insert(key.into(), Recent::Text { text: text.into(), version, recorded });
        }
    }

    /// Forgets the text of a key. Call this before a swap: if it fails, the stored text is unknown.
    pub(in crate::storage) fn forget(&self, key: &str) {
        let mut texts = self.lock();
        if let Some(Recent::Text { .. }) = texts.get(key) {
            texts.remove(key);
        }
    }

    /// Does not keep the text of a key for some swaps, because a swap was lost to another process. Each
    /// later swap on an outdated text costs as much as a load, and a write on etcd.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn set_shared(&self, key: &str) {
        self.lock().insert(key.into(), Recent::Shared(SWAPS_AFTER_LOST));
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
        assert_eq!(recent.recall("k", Duration::MAX), None);
        recent.record("k", "text", 1);
        assert_eq!(recent.recall("k", Duration::MAX), Some(("text".to_owned(), 1)));
        recent.record("k", &"x".repeat(LONGEST_TEXT + 1), 2);
        assert_eq!(recent.recall("k", Duration::MAX), None, "a long text is not kept, and the older one is outdated");
        recent.record("k", "text", 3);
        while recent.recall("k", Duration::from_millis(1)).is_some() {}
        assert!(recent.recall("k", Duration::MAX).is_some(), "the text is older than a millisecond");
        recent.forget("k");
        assert_eq!(recent.recall("k", Duration::MAX), None);
    }

    #[test]
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    fn text_that_others_change_is_not_kept_for_some_swaps() {
        let recent = RecentTexts::default();
        recent.set_shared("k");
        for _ in 0..SWAPS_AFTER_LOST {
            recent.forget("k");
            recent.record("k", "text", 1);
            assert_eq!(recent.recall("k", Duration::MAX), None);
        }
        recent.record("k", "text", 1);
        assert_eq!(recent.recall("k", Duration::MAX), Some(("text".to_owned(), 1)));
    }
}
