//! What the server cannot keep.

use crate::strategy::State;
use crate::{ConfigError, Limit, Op, Policy, Timestamp};

/// A string of Redis is no longer, in bytes.
pub(super) const LONGEST_STRING: usize = 512 << 20;

/// Numbers of Lua are exact up to here.
const EXACT: u64 = 1 << 53;

/// Whether a script can keep all that the policy's limits may remember, exactly.
pub(super) fn check(policy: &Policy) -> Result<(), ConfigError> {
    policy.limits().iter().try_for_each(|limit| {
        if is_beyond(limit) {
            return Err(ConfigError::new(format!(
                "\"{limit}\" remembers for two periods, which is longer than a script of Redis can count exactly: use a \
                 period of at most 71 years, or another strategy, for example \"fixed-window {}\"",
                limit.quota()
            )));
        }
        Ok(())
    })
}

/// Whether a hit may be remembered until an instant that Lua cannot count to: asked of nothing but the longest periods.
fn is_beyond(limit: &Limit) -> bool {
    if limit.quota().period_micros() <= EXACT / 4 {
        return false;
    }
    let mut state = [State::Fresh];
    let _ = Policy::from(limit.clone()).decide(&mut state, Timestamp::wall_clock(), Op::Hit, 1);
    state[0].until().as_micros() >= EXACT
}
