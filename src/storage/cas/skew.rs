//! The instant at which a key is decided.
//!
//! The clocks of two nodes differ. Each text begins with the newest instant at which its key was
//! decided, and no later decision is made earlier than that. So a key has one time line, whichever
//! node decides.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::storage::text;
use crate::time::micros;
use crate::{ConfigError, Timestamp};

/// Defaults to 5 seconds: more than machines with NTP differ by, and little to wait for.
pub(in crate::storage) const MAX_SKEW: Duration = Duration::from_secs(5);

const LONGEST: Duration = Duration::from_secs(86_400);

/// A warning is logged at most this often.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Counts decisions at a node's own time, since the stored instant was too far ahead.
#[cfg(feature = "metrics")]
const SKEWED: &str = "ratelimit_clock_skew_total";

/// How far a key's time may be ahead of this node's clock.
#[derive(Debug)]
pub(super) struct Skew {
    max: Duration,
    warned: Mutex<Option<Instant>>,
}

impl Skew {
    pub(super) fn new(max: Duration) -> Self {
        Self { max, warned: Mutex::default() }
    }

    /// Whether a key has a time line, or each node decides in its own time.
    fn is_on(&self) -> bool {
        !self.max.is_zero()
    }

    pub(super) fn max(&self) -> Duration {
        self.max
    }

    /// Returns what a node whose clock shows `own` decides on, when `text` is stored.
    ///
    /// If the newest decision is too far ahead, its states are moved back to the node's own time. They
    /// would refuse the key until that far instant otherwise.
    pub(super) fn view<'a>(&self, text: &'a str, own: Timestamp) -> View<'a> {
        let newest = text::decided_at(text).filter(|_| self.is_on()).unwrap_or(own).max(own);
        let (ahead, states) = (newest.since(own), text::states(text));
        if ahead <= micros(self.max) {
            return View { at: newest, states: states.into(), is_moved: false };
        }
        self.report(Duration::from_micros(ahead));
        View { at: own, states: text::moved_back(states, ahead).into(), is_moved: true }
    }

    #[cold]
    fn report(&self, ahead: Duration) {
        #[cfg(feature = "metrics")]
        metrics::counter!(SKEWED).increment(1);
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            return;
        }
        *warned = Some(Instant::now());
        #[cfg(feature = "tracing")]
        tracing::warn!(?ahead, max_skew = ?self.max, "clocks of nodes differ by more than max_skew, check NTP on all nodes");
        let _ = ahead;
    }
}

/// The states of a key, and the instant to decide at.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) at: Timestamp,
    pub(super) states: Cow<'a, str>,
    /// The states differ from what is stored.
    pub(super) is_moved: bool,
}

pub(in crate::storage) fn checked(max: Duration) -> Result<Duration, ConfigError> {
    if max <= LONGEST {
        return Ok(max);
    }
    Err(ConfigError::new(format!(
        "invalid max_skew {max:?}: it is more than a day; use for example Duration::from_secs(5)"
    )))
}
