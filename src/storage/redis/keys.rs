//! The names of the keys on the server.

use crate::key::Key;
use crate::policy::Policy;
use crate::storage::names;

/// The version of the [format](super::record) of the states and their logs. Every change of the
/// format changes it, so that programs with different formats use different keys.
const VERSION: &str = "v1";

/// Returns the key of the states: `PREFIX:{POLICY|KEY}v1`.
///
/// All keys of one request have the same text in braces, so they are in one slot of a cluster.
pub(super) fn states(prefix: &str, policy: &Policy, key: &Key) -> String {
    format!("{prefix}:{{{}}}{VERSION}", names::of(policy, key))
}

/// Returns the key of a moving window's log: the key of the states and the limit's tag.
pub(super) fn log(states: &str, tag: &str) -> String {
    format!("{states}:{tag}")
}

/// Returns the key for compare-and-swap. The value of this key contains all states, including logs.
pub(super) fn cas(states: &str) -> String {
    format!("{states}:all")
}
