use std::any::Any;
use std::time::Duration;

#[cfg(feature = "coarse-clock")]
use crate::storage::CoarseClock;
use crate::storage::{Clock, SystemClock};
use crate::time::Timestamp;

/// The clock of a storage. It is an enum, so that reading one of the library's own clocks needs no
/// dynamic dispatch. `repr(u8)` keeps the tag separate, because a tag inside a clock's fields takes
/// more instructions to read.
#[derive(Debug)]
#[repr(u8)]
pub(super) enum Time {
    System(SystemClock),
    #[cfg(feature = "coarse-clock")]
    Coarse(CoarseClock),
    Other(Box<dyn Clock>),
}

impl Time {
    pub(super) fn of(clock: impl Clock) -> Self {
        let clock = match downcast(clock) {
            Ok(system) => return Self::System(system),
            Err(clock) => clock,
        };
        #[cfg(feature = "coarse-clock")]
        let clock = match downcast(clock) {
            Ok(coarse) => return Self::Coarse(coarse),
            Err(clock) => clock,
        };
        Self::Other(Box::new(clock))
    }

    #[inline(always)]
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::System(clock) => clock.now(),
            #[cfg(feature = "coarse-clock")]
            Self::Coarse(clock) => clock.now(),
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
            #[cfg(feature = "coarse-clock")]
            Self::Coarse(clock) => clock.ahead_of_wall_clock(),
            Self::Other(clock) => clock.ahead_of_wall_clock(),
        }
    }

    pub(super) fn resolution(&self) -> Duration {
        match self {
            Self::System(clock) => clock.resolution(),
            #[cfg(feature = "coarse-clock")]
            Self::Coarse(clock) => clock.resolution(),
            Self::Other(clock) => clock.resolution(),
        }
    }
}

/// Returns the clock as a `T`, or unchanged if it has another type.
fn downcast<T: Clock, C: Clock>(clock: C) -> Result<T, C> {
    let mut clock = Some(clock);
    let any: &mut dyn Any = &mut clock;
    if let Some(found) = any.downcast_mut::<Option<T>>().and_then(Option::take) {
        return Ok(found);
    }
    Err(clock.unwrap_or_else(|| unreachable!("the clock was not taken")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::ManualClock;

    #[test]
    fn own_clocks_need_no_dynamic_dispatch() {
        assert!(matches!(Time::of(SystemClock::new()), Time::System(_)));
        #[cfg(feature = "coarse-clock")]
        assert!(matches!(Time::of(CoarseClock::new()), Time::Coarse(_)));
        assert!(matches!(Time::of(ManualClock::default()), Time::Other(_)));
    }
}
