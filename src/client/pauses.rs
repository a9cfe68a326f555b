//! The hosts that have asked the client to wait.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use foldhash::quality::RandomState;
// tokio's instant, because tests pause tokio's clock.
use tokio::time::Instant;

use crate::key::Key;
use crate::sync::unpoisoned;

/// The longest pause. A server that asks for more is asked again after it, because the number may be
/// a mistake.
const MAX_PAUSE: Duration = Duration::from_secs(86_400);
/// The most pauses that are remembered.
const MAX_PAUSES: usize = 10_000;

/// The end of the pause of each key.
#[derive(Debug, Default)]
pub(super) struct Pauses(Mutex<HashMap<Key, Instant, RandomState>>);

impl Pauses {
    /// Pauses a key, unless it is paused for longer already. Returns the end of its pause. If too many
    /// keys are paused, forgets the pause that ends first.
    pub(super) fn begin(&self, key: &Key, pause: Duration) -> Instant {
        let now = Instant::now();
        let end = now + pause.min(MAX_PAUSE);
        let mut ends = unpoisoned(self.0.lock());
        if let Some(latest) = ends.get_mut(key) {
            *latest = end.max(*latest);
            return *latest;
        }
        if ends.len() >= MAX_PAUSES {
            ends.retain(|_, end| *end > now);
        }
        if ends.len() >= MAX_PAUSES {
            let first = ends.iter().min_by_key(|(_, end)| **end).filter(|(_, first)| **first < end);
            let Some(first) = first.map(|(key, _)| key.clone()) else { return end };
            ends.remove(&first);
        }
        ends.insert(key.clone(), end);
        end
    }

    /// Returns the end of the pause of a key, if it is paused.
    pub(super) fn end(&self, key: &Key) -> Option<Instant> {
        let mut ends = unpoisoned(self.0.lock());
        let end = *ends.get(key)?;
        if end <= Instant::now() {
            ends.remove(key);
            return None;
        }
        Some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn pause_is_only_lengthened_and_lasts_at_most_a_day() {
        let (pauses, key, start) = (Pauses::default(), Key::from("host"), Instant::now());
        pauses.begin(&key, 5 * SECOND);
        pauses.begin(&key, SECOND);
        assert_eq!(pauses.end(&key), Some(start + 5 * SECOND));
        assert_eq!(pauses.end(&Key::from("other")), None);
        tokio::time::advance(5 * SECOND).await;
        assert_eq!(pauses.end(&key), None);
        assert_eq!(pauses.begin(&key, Duration::MAX), Instant::now() + MAX_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_pauses_is_bounded() {
        let pauses = Pauses::default();
        let key = |number: usize| Key::from(format!("host {number}"));
        for number in 0..=MAX_PAUSES {
            pauses.begin(&key(number), SECOND * u32::try_from(number + 1).unwrap());
        }
        assert_eq!(pauses.0.lock().unwrap().len(), MAX_PAUSES);
        assert_eq!(pauses.end(&key(0)), None);
        assert!(pauses.end(&key(1)).is_some());
        pauses.begin(&Key::from("short"), SECOND);
        assert_eq!(pauses.end(&Key::from("short")), None, "it would end first");
        assert!(pauses.end(&key(1)).is_some());
    }
}
