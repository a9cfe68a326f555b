//! What states are called where they can be read: by whoever operates a server, and by other builds of a program.

use std::fmt::Write;

use crate::{Key, Policy};

/// What a client sends is not to fill a server's memory with names.
const LONGEST: usize = 200;

/// `POLICY|KEY`: whose states they are, in ASCII, at most 200 bytes. No two pairs have the same name, as far as MD5 can tell those
/// that are longer: see [`short`].
pub(super) fn of(policy: &Policy, key: &Key) -> String {
    let mut name = String::with_capacity(policy.identity().len() + 48);
    escape(policy.identity(), " -._~/@+\"", &mut name);
    write!(name, "|{key}").expect("writing to a string does not fail");
    short(name, LONGEST)
}

/// Of a name in ASCII that is too long so much as fits is kept to be read, and `#` and its MD5 follow; no other name has a `#`. Two of
/// n such names meet with a probability of n^2 / 2^129; and though two can be made to meet, none can be made to meet a given
/// one.
pub(super) fn short(mut name: String, most: usize) -> String {
    if name.len() > most {
        let digest = format!("#{:x}", md5::compute(&name));
        name.truncate(most - digest.len());
        name.push_str(&digest);
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quota;

    #[test]
    fn long_names_keep_their_beginning_and_differ_by_their_end() {
        let policy = Policy::from(Quota::per_day(3)).with_name("free");
        let [one, two] = ["a", "b"].map(|end| of(&policy, &Key::from("\"#".repeat(1_000) + end)));
        assert!(one.len() == 200 && one.starts_with("free|t:%22%23%22%23"), "{one}");
        assert_eq!(one.matches('#').count(), 1);
        assert_ne!(one, two);
        assert_eq!(of(&policy, &Key::from("#")), "free|t:%23");
        // What md5sum says of 201 times a.
        assert!(short("a".repeat(201), 200).ends_with("#15936442c22dab9b685de350bfe75971"));
    }
}
