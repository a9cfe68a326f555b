use std::any::Any;
use std::time::Duration;

use crate::storage::{Clock, SystemClock};
use crate::time::Timestamp;

/// The clock of a storage. It is an enum, so that reading the default clock needs no dynamic
/// dispatch. `repr(u8)` keeps the tag separate, because a tag inside a clock's fields takes
/// more instructions to read.
#[derive(Debug)]
#[repr(u8)]
pub(super) enum StorageClock {
    System(SystemClock),
    Other(Box<dyn Clock>),
}

impl StorageClock {
    pub(super) fn of(clock: impl Clock) -> Self {
        let mut clock = Some(clock);
        let any: &mut dyn Any = &mut clock;
        if let Some(system) = any.downcast_mut::<Option<SystemClock>>().and_then(Option::take) {
            return Self::System(system);
        }
        Self::Other(Box::new(clock.unwrap_or_else(|| unreachable!("the clock was not taken"))))
    }

    #[inline(always)]
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now(),
            Self::Other(clock) => clock.now(),
        }
    }

    /// Reads the clock again, because another thread has decided at a time after the first reading.
    /// This is rare, so the call is kept out of the hot path.
    #[cold]
    pub(super) fn now_again(&self) -> Timestamp {
        self.now()
    }

    /// Returns the number of seconds by which the clock is ahead of the wall clock.
    #[inline]
    pub(super) fn ahead(&self) -> u32 {
        match self {
            Self::System(clock) => clock.ahead_of_wall_clock(),
            Self::Other(clock) => clock.ahead_of_wall_clock(),
        }
    }

    pub(super) fn resolution(&self) -> Duration {
        match self {
            Self::System(clock) => clock.resolution(),
            Self::Other(clock) => clock.resolution(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::ManualClock;

    #[test]
    fn default_clock_needs_no_dynamic_dispatch() {
        assert!(matches!(StorageClock::of(SystemClock::new()), StorageClock::System(_)));
        assert!(matches!(StorageClock::of(ManualClock::default()), StorageClock::Other(_)));
    }
}
