//! A scanner for the text form of quotas and policies, and a writer of JSON strings.

use std::fmt::{self, Write};

use crate::error::ConfigError;

/// Reads tokens from the start of a text. Skips white space before each token.
pub(crate) struct Scanner<'a> {
    text: &'a str,
    rest: &'a str,
}

impl<'a> Scanner<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, rest: text.trim() }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads and returns the next character if it is one of `these`.
    pub(crate) fn symbol(&mut self, these: &[char]) -> Option<char> {
        let found = self.rest.chars().next().filter(|next| these.contains(next))?;
        self.advance(found.len_utf8());
        Some(found)
    }

    /// Reads the next run of letters and hyphens, which may be empty.
    pub(crate) fn word(&mut self) -> &'a str {
        let end = self.rest.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(self.rest.len());
        let word = &self.rest[..end];
        self.advance(end);
        word
    }

    /// Skips `word` if it is the next whole word, ignoring case. Returns `true` if it is.
    pub(crate) fn keyword(&mut self, word: &str) -> bool {
        let mut ahead = Self { ..*self };
        let found = ahead.word().eq_ignore_ascii_case(word);
        if found {
            *self = ahead;
        }
        found
    }

    /// Skips `prefix` if the rest starts with it, ignoring case. Returns `true` if it does. More
    /// letters may follow directly, as in `1perminute`.
    pub(crate) fn prefix(&mut self, prefix: &str) -> bool {
        let found = self.rest.get(..prefix.len()).is_some_and(|front| front.eq_ignore_ascii_case(prefix));
        if found {
            self.advance(prefix.len());
        }
        found
    }

    /// Reads the next number, from 1 to 2^32 - 1. Returns `None` if the next character is not a
    /// digit.
    pub(crate) fn number(&mut self, what: &str) -> Result<Option<u32>, ConfigError> {
        match self.number_or_zero(what)? {
            Some(0) => Err(self.unreadable(what, "0", "it must be at least 1")),
            other => Ok(other),
        }
    }

    /// Reads the next number, from 0 to 2^32 - 1. Returns `None` if the next character is not a
    /// digit.
    pub(crate) fn number_or_zero(&mut self, what: &str) -> Result<Option<u32>, ConfigError> {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let digits = &self.rest[..end];
        if digits.is_empty() {
            return Ok(None);
        }
        let number = digits.parse().map_err(|_| self.unreadable(what, digits, "it must be at most 4294967295"))?;
        self.advance(end);
        Ok(Some(number))
    }

    /// Reads the next double-quoted text, in which `\"` and `\\` are escapes. Returns `None` if the
    /// next character is not a quote.
    pub(crate) fn quoted(&mut self) -> Result<Option<String>, ConfigError> {
        let Some(inside) = self.rest.strip_prefix('"') else { return Ok(None) };
        let mut name = String::new();
        let mut chars = inside.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.advance(at + 2);
                    return Ok(Some(name));
                }
                '\\' => name.extend(chars.next().map(|(_, escaped)| escaped)),
                other => name.push(other),
            }
        }
        Err(self.unreadable("the name", self.rest, "the closing quote is missing"))
    }

    /// Returns the error for a text that ends or continues with something other than `expected`.
    pub(crate) fn expected(&self, expected: &str) -> ConfigError {
        self.unreadable("", self.rest, &format!("expected {expected}"))
    }

    /// Returns the error for an invalid token `found`. `what` names its kind, and `why` is the
    /// reason.
    pub(crate) fn unreadable(&self, what: &str, found: &str, why: &str) -> ConfigError {
        let text = self.text;
        let what = if what.is_empty() { String::new() } else { format!("{what} ") };
        let found = if found.is_empty() { "the end".to_owned() } else { format!("{what}{found:?}") };
        ConfigError::new(format!("cannot read {found} in {text:?}: {why}, for example \"10/minute\""))
    }

    /// Returns the error for a word `found` that is not one of the `known` words. The message
    /// suggests the nearest of them, if one is near, and contains `expected`.
    pub(crate) fn unknown(&self, what: &str, found: &str, known: &[&str], expected: &str) -> ConfigError {
        let why = match nearest(found, known) {
            Some(near) => format!("did you mean {:?}? Expected {expected}", self.text.replacen(found, near, 1)),
            None => format!("expected {expected}"),
        };
        self.unreadable(what, found, &why)
    }

    fn advance(&mut self, bytes: usize) {
        self.rest = self.rest[bytes..].trim_start();
    }
}

/// Returns the known word that `word` most likely means. `word` is a prefix of it with at least
/// three letters, or the two differ by at most two letters. Hyphens and case are ignored.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let letters = |word: &str| word.replace('-', "").to_ascii_lowercase();
    let word = letters(word);
    let distance = |known: &str| {
        let known = letters(known);
        if word.len() >= 3 && known.starts_with(&word) { 1 } else { strsim::osa_distance(&word, &known) }
    };
    let (distance, near) = known.iter().map(|known| (distance(known), *known)).min_by_key(|(distance, _)| *distance)?;
    (distance <= 2 && distance < word.len()).then_some(near)
}

/// Appends `text` to `json` as a JSON string (RFC 8259, section 7).
pub(crate) fn write_json_string(text: &str, json: &mut String) -> fmt::Result {
    json.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            '\0'..' ' => write!(json, "\\u{:04x}", u32::from(c))?,
            _ => json.push(c),
        }
    }
    json.push('"');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn nearest_word_is_suggested_only_when_it_is_near() {
        let known = ["fixed-window", "token-bucket", "minute", "month"];
        for (word, near) in [
            ("TokenBucket", Some("token-bucket")),
            ("token-buckt", Some("token-bucket")),
            ("fixed", Some("fixed-window")),
            ("minuet", Some("minute")),
            ("fortnight", None),
            ("xy", None),
        ] {
            assert_eq!(nearest(word, &known), near, "{word}");
        }
    }
}
