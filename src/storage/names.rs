//! Readable names of states, for operators and for other builds of the program.

use std::fmt::Write;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite"))]
use std::sync::Arc;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::key::Key;
use crate::policy::Policy;

/// The bytes that are encoded in tags and URLs.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The bytes that are encoded in the name of a policy.
const NOT_IN_NAMES: &AsciiSet = &RESERVED.remove(b' ').remove(b'/').remove(b'@').remove(b'+').remove(b'"');

/// The longest name in bytes. Clients choose keys, so names must not fill a server's memory.
const LONGEST: usize = 200;

/// Returns the name of a policy and a key, `POLICY|KEY`: ASCII, at most 200 bytes. Different pairs
/// have different names. Names that had to be shortened differ by their MD5: see [`short`].
pub(super) fn of(policy: &Policy, key: &Key) -> String {
    let mut name = String::with_capacity(policy.identity().len() + 48);
    name.extend(utf8_percent_encode(policy.identity(), NOT_IN_NAMES));
    write!(name, "|{key}").expect("writing to a string does not fail");
    short(name, LONGEST)
}

/// Returns the beginning of the names of a policy's keys, `POLICY|`.
pub(super) fn of_policy(policy: &Policy) -> String {
    format!("{}|", utf8_percent_encode(policy.identity(), NOT_IN_NAMES))
}

/// Returns `true` if the name was not shortened.
pub(super) fn is_whole(name: &str) -> bool {
    !name.contains('#')
}

/// Returns the key with this text, which follows the name of its policy. Returns `None` if the name was
/// shortened, because a hash cannot be reversed.
pub(super) fn key(text: &str) -> Option<Key> {
    Key::from_text(text)
}

/// Returns the name of a key without a policy: ASCII, at most 200 bytes.
#[cfg(feature = "redis")]
pub(super) fn of_key(key: &Key) -> String {
    short(key.to_string(), LONGEST)
}

/// Encodes a prefix, which a `:` follows in each key. The result contains no `:`, so the keys that
/// begin with `shop:` include no keys of the prefix `shop:staging`.
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite"))]
pub(super) fn prefix(prefix: &str) -> Arc<str> {
    prefix.replace('%', "%25").replace(':', "%3A").into()
}

/// Returns the first text after all keys that begin with `prefix`, which ends with `:`. The next
/// character in ASCII is `;`.
#[cfg(any(feature = "etcd", feature = "postgres"))]
pub(super) fn after(prefix: &str) -> String {
    format!("{};", prefix.strip_suffix(':').unwrap_or(prefix))
}

/// Shortens an ASCII name of more than `max_len` bytes to its beginning, `#` and the MD5 of the
/// whole name. Names that are not shortened contain no `#`.
///
/// Two of n shortened names collide with a probability of n^2 / 2^129. An attacker can construct
/// two names that collide, but not a name that collides with a given one.
pub(super) fn short(mut name: String, max_len: usize) -> String {
    if name.len() > max_len {
        let digest = format!("#{:x}", md5::compute(&name));
        name.truncate(max_len - digest.len());
        name.push_str(&digest);
    }
    name
}

/// Returns the tag of the limit at the index `position`, for example `2.fixed-window/60000000` for
/// index 1: the number of the limit (from 1), its strategy, and its period in microseconds.
pub(super) fn tag(policy: &Policy, position: usize) -> String {
    let limit = &policy.limits()[position];
    let strategy = utf8_percent_encode(limit.strategy().name(), RESERVED);
    format!("{}.{strategy}/{}", position + 1, limit.quota().period_micros())
}

/// Percent-encodes a value for a URL.
pub(super) fn encoded(value: &str) -> String {
    utf8_percent_encode(value, RESERVED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    #[test]
    fn long_names_keep_their_beginning_and_end_with_a_hash() {
        let policy = Policy::from(Quota::per_day(3)).with_name("free");
        let [one, two] = ["a", "b"].map(|end| of(&policy, &Key::from("\"#".repeat(1_000) + end)));
        assert!(one.len() == 200 && one.starts_with("free|t:%22%23%22%23"), "{one}");
        assert_eq!(one.matches('#').count(), 1);
        assert_ne!(one, two);
        assert_eq!(of(&policy, &Key::from("#")), "free|t:%23");
        // Computed by md5sum, of 201 times "a".
        assert!(short("a".repeat(201), 200).ends_with("#15936442c22dab9b685de350bfe75971"));
    }
}
