//! The timeout of a call to a storage.

use std::time::Duration;

use crate::error::ConfigError;

/// The default timeout of a call.
pub(super) const DEADLINE: Duration = Duration::from_millis(100);

/// Returns an error if `timeout` is less than a millisecond or more than an hour.
pub(super) fn checked(timeout: Duration) -> Result<(), ConfigError> {
    if (Duration::from_millis(1)..=Duration::from_secs(3_600)).contains(&timeout) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "invalid timeout {timeout:?}: use at least a millisecond and at most an hour, \
         for example Duration::from_millis(100)"
    )))
}
