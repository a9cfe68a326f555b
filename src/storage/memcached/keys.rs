//! What states are called on a server, which takes at most 250 bytes without white space.

use std::fmt::Write;

use crate::storage::names;

/// More the protocol does not take.
const LONGEST: usize = 250;

/// `PREFIX:NAME`, in which a space is written `\s`.
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
    fn what_fits_is_kept_and_spaces_are_written() {
        assert_eq!(key("rl", "fixed-window 2/day|t:alice"), r"rl:fixed-window\s2/day|t:alice");
        let longest = "a".repeat(247);
        assert_eq!(key("rl", &longest), format!("rl:{longest}"));
        assert_eq!(key("rl", "\r\n\u{e9}"), r"rl:\x0d\x0a\xc3\xa9");
        assert_eq!(key("rl", r"a\s#"), r"rl:a\\s\h");
    }

    #[test]
    fn what_does_not_fit_keeps_its_beginning_and_differs_by_its_end() {
        for prefix in ["rl", &"p".repeat(64)] {
            let keys = ["a", "b"].map(|end| key(prefix, &format!("free|t:{}{end}", "x".repeat(1_000))));
            for key in &keys {
                assert!(key.len() == 250 && key.starts_with(&format!("{prefix}:free|t:xxx")), "{key}");
                assert!(key.bytes().all(|byte| byte.is_ascii_graphic()), "{key}");
            }
            assert_ne!(keys[0], keys[1]);
        }
        // What md5sum says of it.
        assert!(key("rl", &"a".repeat(250)).ends_with("#e4280db832ee8e0f3b1d629af1b83f06"));
    }
}
