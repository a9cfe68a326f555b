use crate::Timestamp;
use crate::storage::{Clock, SystemClock};

/// The clock. The usual one is read without a call through a table.
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
}
