//! Where things stand: which keys an ask touches, and what they look like in `redis-cli`.

use crate::storage::names;
use crate::{Key, Policy};

/// `PREFIX:{POLICY|KEY}`: all keys of one ask share what stands in braces, and with it a slot of a cluster.
pub(super) fn states(prefix: &str, policy: &Policy, key: &Key) -> String {
    format!("{prefix}:{{{}}}", names::of(policy, key))
}

/// The log of a moving window stands beside the states, under its limit's tag.
pub(super) fn log(states: &str, tag: &str) -> String {
    format!("{states}:{tag}")
}

/// What compare-and-swap keeps: all states in one, logs too.
pub(super) fn swapped(states: &str) -> String {
    format!("{states}:all")
}
