//! The defaults and bounds of timeouts and clock skew.

use std::time::Duration;

use crate::error::ConfigError;

/// The default timeout of a call.
pub(super) const TIMEOUT: Duration = Duration::from_millis(100);

/// The default of `max_skew`. The clocks of machines with NTP differ by less. In the worst case, a
/// client waits this much too long.
pub(super) const MAX_SKEW: Duration = Duration::from_secs(5);

/// The largest `max_skew`.
const LONGEST_SKEW: Duration = Duration::from_secs(86_400);

/// Returns an error if `timeout` is less than a millisecond or more than an hour.
pub(super) fn checked_timeout(timeout: Duration) -> Result<(), ConfigError> {
    if (Duration::from_millis(1)..=Duration::from_secs(3_600)).contains(&timeout) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "invalid timeout {timeout:?}: use at least a millisecond and at most an hour, \
         for example Duration::from_millis(100)"
    )))
}

/// Returns `max`, or an error if it is more than a day.
pub(super) fn checked_skew(max: Duration) -> Result<Duration, ConfigError> {
    if max <= LONGEST_SKEW {
        return Ok(max);
    }
    Err(ConfigError::new(format!("invalid max_skew {max:?}: use at most a day, for example Duration::from_secs(5)")))
}
