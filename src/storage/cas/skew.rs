//! Corrects the differences between the clocks of nodes.
//!
//! Each text begins with the newest instant at which its key was decided. No later decision is made
//! at an earlier instant. So the time of a key never goes back, although the clocks of its nodes
//! differ.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::storage::text;
use crate::time::micros;
use crate::{ConfigError, Timestamp};

/// The default of `max_skew`. The clocks of machines with NTP differ by less. In the worst case, a
/// client waits this much too long.
pub(in crate::storage) const MAX_SKEW: Duration = Duration::from_secs(5);

/// The largest `max_skew`.
const LONGEST: Duration = Duration::from_secs(86_400);

/// The shortest time between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// The metric that counts decisions at a node's own time, because the stored instant was too far
/// ahead.
#[cfg(feature = "metrics")]
const SKEWED: &str = "ratelimit_clock_skew_total";

/// The limit for the difference between a key's time and this node's clock.
#[derive(Debug)]
pub(in crate::storage) struct Skew {
    max: Duration,
    warned: Mutex<Option<Instant>>,
}

impl Skew {
    pub(in crate::storage) fn new(max: Duration) -> Self {
        Self { max, warned: Mutex::default() }
    }

    /// Returns `false` if `max_skew` is zero, so that each node decides at its own time.
    fn is_on(&self) -> bool {
        !self.max.is_zero()
    }

    pub(in crate::storage) fn max(&self) -> Duration {
        self.max
    }

    /// Returns the states in `text`, and the instant to decide at. `own` is the time of this node.
    ///
    /// If the newest decision is too far ahead of `own`, the states are moved back to `own`.
    /// Otherwise the key could be refused until the instant of that decision.
    pub(in crate::storage) fn view<'a>(&self, text: &'a str, own: Timestamp) -> View<'a> {
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
pub(in crate::storage) struct View<'a> {
    pub(in crate::storage) at: Timestamp,
    pub(in crate::storage) states: Cow<'a, str>,
    /// `true` if the states were moved back in time, so that they differ from the stored ones.
    pub(in crate::storage) is_moved: bool,
}

/// Returns `max`, or an error if it is more than a day.
pub(in crate::storage) fn checked(max: Duration) -> Result<Duration, ConfigError> {
    if max <= LONGEST {
        return Ok(max);
    }
    Err(ConfigError::new(format!("invalid max_skew {max:?}: use at most a day, for example Duration::from_secs(5)")))
}
