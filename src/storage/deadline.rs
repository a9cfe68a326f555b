//! How long an answer of a store may take.

use std::time::Duration;

use crate::ConfigError;

/// Unless told otherwise.
pub(super) const DEADLINE: Duration = Duration::from_millis(100);

/// Whether it is from a millisecond to an hour.
pub(super) fn checked(deadline: Duration) -> Result<(), ConfigError> {
    if (Duration::from_millis(1)..=Duration::from_secs(3_600)).contains(&deadline) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "a deadline of {deadline:?} cannot be: use at least a millisecond and at most an hour, \
         for example Duration::from_millis(100)"
    )))
}
