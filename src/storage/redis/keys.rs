//! Where things stand: which keys an ask touches, and what they look like in `redis-cli`.

use std::fmt::Write;

use crate::storage::names;
use crate::{Key, Policy};

/// `PREFIX:{POLICY|KEY}`: all keys of one ask share what stands in braces, and with it a slot of a cluster.
pub(super) fn states(prefix: &str, policy: &Policy, key: &Key) -> String {
    format!("{prefix}:{{{}}}", names::of(policy, key))
}

/// The log of a moving window stands beside the states, with the number of its limit, counted from 1.
pub(super) fn log(states: &str, position: usize) -> String {
    format!("{states}:{}", position + 1)
}

/// What compare-and-swap keeps: all states in one, logs too.
pub(super) fn swapped(states: &str) -> String {
    format!("{states}:all")
}

/// All keys that an ask may have touched.
pub(super) fn all(prefix: &str, policy: &Policy, key: &Key) -> Vec<String> {
    let states = states(prefix, policy, key);
    let logs =
        (0..policy.limits().len()).filter(|&position| is_log(policy, position)).map(|position| log(&states, position));
    let mut all: Vec<String> = logs.collect();
    all.push(swapped(&states));
    all.push(states);
    all
}

pub(super) fn is_log(policy: &Policy, position: usize) -> bool {
    policy.limits()[position].strategy().name() == "moving-window"
}

/// What tells a limit's states from those of another strategy or period at its place.
pub(super) fn tag(policy: &Policy, position: usize) -> String {
    let limit = &policy.limits()[position];
    let mut tag = String::with_capacity(40);
    escape(limit.strategy().name(), &mut tag);
    write!(tag, "/{}", limit.quota().period_micros()).expect("writing to a string does not fail");
    tag
}

/// What is no part of any name's structure: letters, digits, spaces and some punctuation; the rest as in a URL.
fn escape(text: &str, into: &mut String) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b" -._~/@+\"".contains(&byte) {
            into.push(byte.into());
        } else {
            write!(into, "%{byte:02X}").expect("writing to a string does not fail");
        }
    }
}
