//! The periods whose instants are exact in Lua.

use crate::error::ConfigError;
use crate::policy::{Limit, Op, Policy};
use crate::strategy::State;
use crate::time::Timestamp;

/// The limit up to which Lua, whose numbers are doubles, represents integers exactly.
const MAX_EXACT: u64 = 1 << 53;

/// Checks that the instants in the states of the policy are exact in Lua.
///
/// # Errors
///
/// Returns an error that names the first limit whose period is too long.
pub(super) fn check_periods(policy: &Policy) -> Result<(), ConfigError> {
    policy.limits().iter().try_for_each(|limit| {
        if exceeds_lua(limit) {
            return Err(ConfigError::new(format!(
                "\"{limit}\" keeps a state for two periods, which is too long for the exact integers of Redis scripts: \
                 use a period of at most 71 years, or another strategy, for example \"fixed-window {}\"",
                limit.quota()
            )));
        }
        Ok(())
    })
}

/// Returns `true` if the state after a hit ends at an instant that is not exact in Lua.
fn exceeds_lua(limit: &Limit) -> bool {
    if limit.quota().period_micros() <= MAX_EXACT / 4 {
        return false;
    }
    let mut state = [State::Fresh];
    let _ = Policy::from(limit.clone()).decide(&mut state, Timestamp::wall_clock(), Op::Hit, 1);
    state[0].until().as_micros() >= MAX_EXACT
}
