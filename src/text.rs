//! A scanner for the text form of quotas and policies, and a writer of JSON strings.

use std::fmt::{self, Write};

use strsim::damerau_levenshtein;

use crate::error::ConfigError;

/// The most corrections in one suggestion.
const MAX_CORRECTIONS: u32 = 8;

/// Reads the whole text with `read`. The error suggests the text that was probably meant, if `read`
/// accepts it. If its values are not valid, the error says so, too. Otherwise it shows the first of
/// `examples` whose word is in the text.
pub(crate) fn parse<T>(
    text: &str,
    examples: &[(&str, &str)],
    read: impl Fn(&mut Scanner<'_>) -> Result<T, Unreadable>,
) -> Result<T, ConfigError> {
    let (message, mut meant) = match read(&mut Scanner::new(text)) {
        Ok(value) => return Ok(value),
        Err(Unreadable::Value(error)) => return Err(error),
        Err(Unreadable::Token { message, meant }) => (message, meant),
    };
    for _ in 0..MAX_CORRECTIONS {
        let Some(text) = meant else { break };
        match read(&mut Scanner::new(&text)) {
            Ok(_) => return Err(ConfigError::new(format!("{message}; did you mean {}?", Suggested(&text)))),
            Err(Unreadable::Value(error)) => return Err(ConfigError::new(format!("{message}; {error}"))),
            Err(Unreadable::Token { meant: next, .. }) => meant = next,
        }
    }
    let written = text.to_ascii_lowercase();
    let example = examples.iter().find(|(word, _)| written.contains(word)).map_or("10/minute", |(_, example)| example);
    Err(ConfigError::new(format!("{message}, for example {}", Suggested(example))))
}

/// The error of a [`Scanner`].
pub(crate) enum Unreadable {
    /// A token is invalid.
    Token {
        message: String,
        /// The whole text as it was probably meant. It may contain further mistakes.
        meant: Option<String>,
    },
    /// The tokens are valid, but their values are not.
    Value(ConfigError),
}

impl From<ConfigError> for Unreadable {
    fn from(error: ConfigError) -> Self {
        Self::Value(error)
    }
}

impl Unreadable {
    /// Sets the whole text as it was probably meant.
    pub(crate) fn meant(self, text: impl Into<Option<String>>) -> Self {
        match self {
            Self::Token { message, .. } => Self::Token { message, meant: text.into() },
            Self::Value(error) => Self::Value(error),
        }
    }
}

/// Writes a text between quotes that it does not contain, so that it can be copied.
pub(crate) struct Suggested<'a>(pub(crate) &'a str);

impl fmt::Display for Suggested<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        if text.contains('"') { write!(f, "'{text}'") } else { write!(f, "{text:?}") }
    }
}

/// Reads tokens from the start of a text. Skips white space before each token.
#[derive(Clone, Copy)]
pub(crate) struct Scanner<'a> {
    text: &'a str,
    rest: &'a str,
}

impl<'a> Scanner<'a> {
    fn new(text: &'a str) -> Self {
        let text = text.trim();
        Self { text, rest: text }
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// Returns `true` if nothing has been read.
    pub(crate) fn is_at_start(&self) -> bool {
        self.rest.len() == self.text.len()
    }

    /// Returns the text that has not been read.
    pub(crate) fn rest(&self) -> &'a str {
        self.rest
    }

    /// Returns the text between `start` and this position.
    pub(crate) fn read_since(&self, start: &Self) -> &'a str {
        start.rest[..start.rest.len() - self.rest.len()].trim_end()
    }

    /// Returns the whole text, with the part between `start` and this position replaced by `token`.
    pub(crate) fn replaced(&self, start: &Self, token: &str) -> String {
        let (before, _) = self.text.split_at(self.text.len() - start.rest.len());
        let after = &start.rest[self.read_since(start).len()..];
        [before, token, after].concat()
    }

    /// Reads and returns the next character if it is one of `these`.
    pub(crate) fn symbol(&mut self, these: &[char]) -> Option<char> {
        let found = self.rest.chars().next().filter(|next| these.contains(next))?;
        self.advance(found.len_utf8());
        Some(found)
    }

    /// Reads the next run of characters that are part of a token, which may be empty.
    pub(crate) fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let token = &self.rest[..end];
        self.advance(end);
        token
    }

    /// Reads the next run of letters, hyphens and underscores, which begins with a letter. It may
    /// be empty.
    pub(crate) fn word(&mut self) -> &'a str {
        let begins = self.rest.starts_with(|c: char| c.is_ascii_alphabetic());
        self.take_while(|c| begins && (c.is_ascii_alphabetic() || matches!(c, '-' | '_')))
    }

    /// Skips `word` if it is the next whole word, ignoring case. Returns `true` if it is.
    pub(crate) fn keyword(&mut self, word: &str) -> bool {
        let mut ahead = *self;
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

    /// Reads the next run of digits, which may be empty.
    pub(crate) fn digits(&mut self) -> &'a str {
        self.take_while(|c| c.is_ascii_digit())
    }

    /// Reads the next number, from 1 to 2^32 - 1. Returns `None` if the next character is not a
    /// digit.
    pub(crate) fn number(&mut self, what: &str) -> Result<Option<u32>, Unreadable> {
        match self.number_or_zero(what)? {
            Some(0) => Err(self.unreadable(what, "0", "it must be at least 1")),
            other => Ok(other),
        }
    }

    /// Reads the next number, from 0 to 2^32 - 1. Returns `None` if the next character is not a
    /// digit.
    pub(crate) fn number_or_zero(&mut self, what: &str) -> Result<Option<u32>, Unreadable> {
        let start = *self;
        if let Some(sign) = self.symbol(&['-', '+']) {
            let digits = self.digits();
            let error = self.unreadable(what, &format!("{sign}{digits}"), "a number has no sign");
            return Err(error.meant(self.replaced(&start, digits)));
        }
        match self.digits() {
            "" => Ok(None),
            digits => match digits.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.unreadable(what, digits, "it must be at most 4294967295")),
            },
        }
    }

    /// Reads the number of an option such as `burst 20`, after its word. `start` is the position before
    /// the word.
    pub(crate) fn option(&mut self, start: &Self, what: &str) -> Result<u32, Unreadable> {
        let word = self.read_since(start);
        if let Some(number) = self.number_or_zero(what)? {
            return Ok(number);
        }
        let expected = self.expected(&format!("a number after {word:?}"));
        // burst=20
        let mut ahead = *self;
        let is_assigned = ahead.symbol(&['=', ':']).is_some();
        let digits = ahead.digits();
        Err(expected.meant(is_assigned.then(|| ahead.replaced(start, &format!("{word} {digits}")))))
    }

    /// Reads the next double-quoted text, in which `\"` and `\\` are escapes. Returns `None` if the
    /// next character is not a quote.
    pub(crate) fn quoted(&mut self) -> Result<Option<String>, Unreadable> {
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
    pub(crate) fn expected(&self, expected: &str) -> Unreadable {
        self.unreadable("", self.rest, &format!("expected {expected}"))
    }

    /// Returns the error for an invalid token `found`. `what` names its kind, and `why` is the
    /// reason.
    pub(crate) fn unreadable(&self, what: &str, found: &str, why: &str) -> Unreadable {
        let text = self.text;
        let what = if what.is_empty() { String::new() } else { format!("{what} ") };
        let found = if found.is_empty() { "the end".to_owned() } else { format!("{what}{found:?}") };
        Unreadable::Token { message: format!("cannot read {found} in {text:?}: {why}"), meant: None }
    }

    fn advance(&mut self, bytes: usize) {
        self.rest = self.rest[bytes..].trim_start();
    }
}

/// Returns the number of edits between two words, if there are at most two. An edit inserts,
/// deletes or replaces a letter, or swaps two.
pub(crate) fn edits(word: &str, known: &str) -> Option<usize> {
    // Most words are too far apart to be compared.
    let is_near = word.len().abs_diff(known.len()) <= 2;
    is_near.then(|| damerau_levenshtein(word, known)).filter(|edits| *edits <= 2)
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
