//! What states are called on a server, which takes at most 250 bytes without white space.

use std::fmt::Write;

/// More the protocol does not take.
const LONGEST: usize = 250;

/// `PREFIX:NAME`, in which a space is written `\s`.
///
/// Of a name that is too long so much as fits is kept to be read, and `#` and its MD5 follow. No other name has a `#`. Two of n
/// such names meet with a probability of n^2 / 2^129; and though two can be made to meet, none can be made to meet a given one.
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
    if key.len() > LONGEST {
        let digest = format!("#{:x}", md5::compute(name));
        key.truncate(LONGEST - digest.len());
        key.push_str(&digest);
    }
    key
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
        // The second half of md5sum's answer to 250 times a.
        assert!(key("rl", &"a".repeat(250)).ends_with("#1bdbdf1c9087c796394bcda5789f7206"));
    }
}
