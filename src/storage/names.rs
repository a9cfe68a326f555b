//! What states are called where they can be read: by whoever operates a server, and by other builds of a program.

use std::fmt::Write;

use crate::{Key, Policy};

/// `POLICY|KEY`: whose states they are. No two pairs have the same name.
pub(super) fn of(policy: &Policy, key: &Key) -> String {
    let mut name = String::with_capacity(policy.identity().len() + 48);
    escape(policy.identity(), " -._~/@+\"", &mut name);
    write!(name, "|{key}").expect("writing to a string does not fail");
    name
}

/// `2.fixed-window/60000000`: which limit's a state is, by place (from 1), strategy and period in microseconds.
pub(super) fn tag(policy: &Policy, position: usize) -> String {
    let limit = &policy.limits()[position];
    let mut tag = String::with_capacity(40);
    write!(tag, "{}.", position + 1).expect("writing to a string does not fail");
    escape(limit.strategy().name(), "-._~", &mut tag);
    write!(tag, "/{}", limit.quota().period_micros()).expect("writing to a string does not fail");
    tag
}

/// Letters, digits and these signs stand for themselves, the rest as in a URL.
fn escape(text: &str, signs: &str, into: &mut String) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || signs.as_bytes().contains(&byte) {
            into.push(byte.into());
        } else {
            write!(into, "%{byte:02X}").expect("writing to a string does not fail");
        }
    }
}
