//! The last known texts of keys, with which a hit needs one round trip.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::storage::recent_map::RecentMap;
use crate::sync::unpoisoned;
use crate::time::{Timestamp, micros};

/// The maximum length of a text in bytes. A longer one is not kept.
const LONGEST_TEXT: usize = 512;

/// The age from which the recorded server's time is not used, because the clocks of two machines
/// drift. The next hit then loads its key, and gets the server's time with the reply.
const TIME_LASTS: Duration = Duration::from_secs(10);

/// The last known texts of keys, and the server's time. With both, a hit needs one round trip. One
/// storage and its clones share it.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<RecentTexts>);

#[derive(Debug, Default)]
struct RecentTexts {
    texts: RecentMap<Box<str>, Box<str>>,
    /// The server's time in the last reply, and the instant at which this machine received it.
    time: Option<(Timestamp, Instant)>,
}

impl Recent {
    /// Returns the last known text of a key, and the server's time. The text is empty for an
    /// unknown key, because most unknown keys do not exist on the server. Returns `None` if the
    /// time is unknown or too old.
    ///
    /// The returned time is behind the server's clock by the delay of the last reply.
    pub(super) fn recall(&self, key: &str) -> Option<(String, Timestamp)> {
        let inner = self.lock();
        let (server, at) = inner.time?;
        let elapsed = at.elapsed();
        if elapsed > TIME_LASTS {
            return None;
        }
        let text = inner.texts.get(key).map(|text| String::from(&**text));
        Some((text.unwrap_or_default(), server.plus(micros(elapsed))))
    }

    /// Records the text of a key. A text that is too long is recorded as an unknown one.
    pub(super) fn record(&self, key: &str, text: &str) {
        let text = if text.len() > LONGEST_TEXT { "" } else { text };
        self.lock().texts.insert(key.into(), text.into());
    }

    /// Records the server's time, as a reply that has just arrived contains it.
    pub(super) fn record_time(&self, now: Timestamp) {
        self.lock().time = Some((now, Instant::now()));
    }

    fn lock(&self) -> MutexGuard<'_, RecentTexts> {
        unpoisoned(self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_known_until_they_are_long() {
        let recent = Recent::default();
        assert!(recent.recall("k").is_none(), "the time is unknown");
        recent.record_time(Timestamp::from_micros(1_000_000));
        recent.record("k", "text");
        let (text, now) = recent.recall("k").unwrap();
        assert!(text == "text" && now >= Timestamp::from_micros(1_000_000));
        recent.record("k", &"x".repeat(LONGEST_TEXT + 1));
        assert_eq!(recent.recall("k").unwrap().0, "", "a long text is not kept");
    }
}
