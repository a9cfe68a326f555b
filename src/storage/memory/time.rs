use crate::Timestamp;
use crate::storage::{Clock, SystemClock};

/// The clock. An enum, so that reading the system's clock needs no dynamic dispatch.
#[derive(Debug)]
pub(super) enum Time {
    System(SystemClock),
    Other(Box<dyn Clock>),
}

impl Time {
    #[inline]
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now(),
            Self::Other(clock) => clock.now(),
        }
    }

    /// Returns the number of seconds by which the clock is ahead of the wall clock.
    #[inline]
    pub(super) fn ahead(&self) -> u32 {
        match self {
            Self::System(clock) => clock.ahead_of_wall_clock(),
            Self::Other(clock) => clock.ahead_of_wall_clock(),
        }
    }
}
