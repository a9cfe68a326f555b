//! The end of the names of `X-RateLimit-*`, such as `tokens` in `x-ratelimit-remaining-tokens`.

use http::header::HeaderName;

use super::numbers::FieldNames;

/// The most characters of a suffix.
const MAX: usize = 32;

/// The message about a text that is not a suffix.
pub(super) const NOT_A_SUFFIX: &str = "a suffix is 1 to 32 of the characters a to z, 0 to 9, - and _";

/// A suffix of field names: 1 to 32 lowercase letters, digits, `-` and `_`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Suffix {
    text: [u8; MAX],
    len: usize,
}

impl Suffix {
    /// Returns `None` if the text is not a suffix.
    pub(super) const fn parse(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.is_empty() || text.len() > MAX {
            return None;
        }
        let mut suffix = Self { text: [0; MAX], len: text.len() };
        let mut at = 0;
        while at < text.len() {
            if !matches!(text[at], b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_') {
                return None;
            }
            suffix.text[at] = text[at];
            at += 1;
        }
        Some(suffix)
    }

    pub(super) fn as_str(&self) -> &str {
        str::from_utf8(&self.text[..self.len]).expect("a suffix is ASCII")
    }

    /// Returns the names of the fields.
    pub(super) fn names(&self) -> FieldNames {
        let name = |field: &str| {
            let name = [field, "-", self.as_str()].concat();
            HeaderName::try_from(name).expect("a suffix consists of characters of field names")
        };
        FieldNames {
            limit: name("x-ratelimit-limit"),
            remaining: name("x-ratelimit-remaining"),
            reset: name("x-ratelimit-reset"),
        }
    }
}
