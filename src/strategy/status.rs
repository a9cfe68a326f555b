use std::time::Duration;

use crate::Timestamp;

/// A `retry_after` that never comes.
const NEVER: u64 = u64::MAX;

/// The answer of one limit: whether it admits, and its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    admitted: bool,
    capacity: u32,
    remaining: u32,
    reset_after: u64,
    /// Admitted: the delay. Refused: when to come back.
    wait: u64,
    until: Timestamp,
    anchor: u32,
}

impl Status {
    /// The limit admits. `reset_after` is the least number of microseconds after which more units remain than
    /// `remaining`, 0 when all of `capacity` does.
    #[inline]
    pub const fn admitted(capacity: u32, remaining: u32, reset_after: u64) -> Self {
        let (until, anchor) = (Timestamp::EPOCH, 0);
        Self { admitted: true, capacity, remaining, reset_after, wait: 0, until, anchor }
    }

    /// The limit refuses. `retry_after` is the least number of microseconds after which the same hit would be
    /// admitted if nothing else happened; `None` when it can never be.
    #[inline]
    pub const fn refused(capacity: u32, remaining: u32, reset_after: u64, retry_after: Option<u64>) -> Self {
        let wait = match retry_after {
            Some(wait) => wait,
            None => NEVER,
        };
        let (until, anchor) = (Timestamp::EPOCH, 0);
        Self { admitted: false, capacity, remaining, reset_after, wait, until, anchor }
    }

    /// An admitted hit whose turn comes after `delay` microseconds.
    #[must_use]
    #[inline]
    pub const fn delayed(self, delay: u64) -> Self {
        Self { wait: delay, ..self }
    }

    /// An admitted hit that is forgotten from `until` on: the last instant at which a refund could give it back.
    /// `anchor` is whatever tells its window from a later one; 0 when `until` is enough.
    #[must_use]
    #[inline]
    pub const fn forgotten_at(self, until: Timestamp, anchor: u32) -> Self {
        Self { until, anchor, ..self }
    }

    /// The same answer with another `reset_after`, in microseconds: a refusal that changed the state.
    #[must_use]
    pub const fn with_reset_after(self, reset_after: u64) -> Self {
        Self { reset_after, ..self }
    }

    /// Whether this limit admits, whatever the others of its policy say.
    #[inline]
    pub const fn is_admitted(&self) -> bool {
        self.admitted
    }

    /// The most units that can ever be spent at one instant.
    #[inline]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Units that can still be spent now, after this decision.
    #[inline]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    /// How long until more units remain; zero when all of the capacity does.
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_after)
    }

    /// How long until the refused hit would be admitted if nothing else happened; `None` when it was admitted, or
    /// when its cost can never fit.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self.wait {
            NEVER => None,
            _ if self.admitted => None,
            wait => Some(Duration::from_micros(wait)),
        }
    }

    /// How long the admitted hit has to wait for its turn; zero except for a leaky bucket.
    pub const fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_micros())
    }

    /// [`reset_after`](Self::reset_after) in microseconds.
    #[inline]
    pub const fn reset_after_micros(&self) -> u64 {
        self.reset_after
    }

    pub(crate) const fn delay_micros(&self) -> u64 {
        if self.admitted { self.wait } else { 0 }
    }

    /// Microseconds until the refused hit would be admitted, the largest number for never; 0 when it was admitted.
    pub(crate) const fn retry_micros(&self) -> u64 {
        if self.admitted { 0 } else { self.wait }
    }

    /// What a refund needs to know of the hit this status answered.
    pub(crate) const fn hit(&self, at: Timestamp, cost: u32) -> Hit {
        Hit { at, cost, until: self.until, anchor: self.anchor }
    }
}

/// An admitted hit that is to be given back, as one limit remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hit {
    /// When it was admitted.
    pub at: Timestamp,
    /// How many units it took.
    pub cost: u32,
    /// From when on it is forgotten, as [`Status::forgotten_at`] said.
    pub until: Timestamp,
    /// What tells its window from a later one, as [`Status::forgotten_at`] said.
    pub anchor: u32,
}
