//! The keys of items on a server: at most 250 bytes without white space.

use std::fmt::Write;

use crate::storage::names;

/// The largest length of a key in the protocol, in bytes.
const LONGEST: usize = 250;

/// Returns the key of a state: `PREFIX:NAME`, with a space as `\s`, `#` as `\h`, `\` as `\\`, and
/// any other byte that is not printable ASCII as `\x0d`. A key of more than 250 bytes is shortened.
pub(super) fn key(prefix: &str, name: &str) -> String {
    let mut key = format!("{prefix}:");
    for byte in name.bytes() {
        match byte {
            b' ' => key.push_str("\\s"),
            b'#' => key.push_str("\\h"),
            b'\\' => key.push_str("\\\\"),
            _ if byte.is_ascii_graphic() => key.push(byte.into()),
            _ => write!(key, "\\x{byte:02x}").expect("writing to a string does not fail"),
        }
    }
    names::short(key, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_keys_are_escaped_and_not_shortened() {
        assert_eq!(key("rl", "fixed-window 2/day|t:alice"), r"rl:fixed-window\s2/day|t:alice");
        let longest = "a".repeat(247);
        assert_eq!(key("rl", &longest), format!("rl:{longest}"));
        assert_eq!(key("rl", "\r\n\u{e9}"), r"rl:\x0d\x0a\xc3\xa9");
        assert_eq!(key("rl", r"a\s#"), r"rl:a\\s\h");
    }

    #[test]
    fn long_keys_keep_their_beginning_and_end_with_a_hash() {
        for prefix in ["rl", &"p".repeat(64)] {
            let keys = ["a", "b"].map(|end| key(prefix, &format!("free|t:{}{end}", "x".repeat(1_000))));
            for key in &keys {
                assert!(key.len() == 250 && key.starts_with(&format!("{prefix}:free|t:xxx")), "{key}");
                assert!(key.bytes().all(|byte| byte.is_ascii_graphic()), "{key}");
            }
            assert_ne!(keys[0], keys[1]);
        }
        // Computed by md5sum.
        assert!(key("rl", &"a".repeat(250)).ends_with("#e4280db832ee8e0f3b1d629af1b83f06"));
    }
}
