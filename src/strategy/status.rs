use std::time::Duration;

use super::State;
use crate::Timestamp;

/// A `retry_after` that never comes.
const NEVER: u64 = u64::MAX;

/// The answer of one limit: whether it admits, and its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    verdict: Verdict,
    capacity: u32,
    remaining: u32,
    anchor: u32,
    reset_after: u64,
    /// Admitted: the delay. Refused: when to come back.
    wait: u64,
    until: Timestamp,
}

/// As wide as its neighbours, so that a status has no holes: copies with holes in them are made in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Verdict {
    Admitted,
    Refused,
}

impl Status {
    /// To be written over.
    pub(crate) const BLANK: Self = Self::admitted(0, 0, 0);

    /// The limit admits. `reset_after` is the least number of microseconds after which more units remain than
    /// `remaining`, 0 when all of `capacity` does.
    #[inline]
    pub const fn admitted(capacity: u32, remaining: u32, reset_after: u64) -> Self {
        let (until, anchor) = (Timestamp::EPOCH, 0);
        Self { verdict: Verdict::Admitted, capacity, remaining, anchor, reset_after, wait: 0, until }
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
        Self { verdict: Verdict::Refused, capacity, remaining, anchor, reset_after, wait, until }
    }

    /// An admitted hit whose turn comes after `delay` microseconds.
    #[must_use]
    #[inline]
    pub const fn delayed(self, delay: u64) -> Self {
        Self { wait: delay, ..self }
    }

    /// An admitted hit that is forgotten at `until`, and left a state of which a refund will need `anchor`: what a storage says
    /// that is told numbers instead of states. See [`Hit`].
    #[must_use]
    pub const fn spent(self, until: Timestamp, anchor: u32) -> Self {
        Self { anchor, until, ..self }
    }

    /// Adds what is known of a hit that has been spent: its delay, and what a refund will need to know of the state it left.
    #[inline]
    pub(crate) fn set_spent(&mut self, delay: u64, state: &State) {
        self.wait = delay;
        self.until = state.until();
        self.anchor = match *state {
            State::Counts { amounts: [_, anchor], .. } => anchor,
            State::Fresh | State::Log(_) => 0,
        };
    }

    /// Whether this limit admits, whatever the others of its policy say.
    #[inline]
    pub const fn is_admitted(&self) -> bool {
        matches!(self.verdict, Verdict::Admitted)
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
            _ if self.is_admitted() => None,
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
        if self.is_admitted() { self.wait } else { 0 }
    }

    /// Microseconds until the refused hit would be admitted, the largest number for never; 0 when it was admitted.
    pub(crate) const fn retry_micros(&self) -> u64 {
        if self.is_admitted() { 0 } else { self.wait }
    }

    /// What a refund needs to know of the hit of `cost` units that this status answered at `at`.
    pub const fn hit(&self, at: Timestamp, cost: u32) -> Hit {
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
    /// From when on it is forgotten: that of the state it left.
    pub until: Timestamp,
    /// The second amount of the state it left; 0 if that was a log. Room for what tells its window from a later one.
    pub anchor: u32,
}
