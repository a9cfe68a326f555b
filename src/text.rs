//! Reading configuration from text: the few tokens that quotas and policies are written with.

use crate::ConfigError;

/// Reads tokens from the front of a text. White space before any token is skipped.
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

    /// The next character when it is one of `these`.
    pub(crate) fn symbol(&mut self, these: &[char]) -> Option<char> {
        let found = self.rest.chars().next().filter(|next| these.contains(next))?;
        self.advance(found.len_utf8());
        Some(found)
    }

    /// The next run of letters and hyphens, empty when something else comes next.
    pub(crate) fn word(&mut self) -> &'a str {
        let end = self.rest.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(self.rest.len());
        let word = &self.rest[..end];
        self.advance(end);
        word
    }

    /// Skips `word`, in any case, when it comes next as a word of its own.
    pub(crate) fn keyword(&mut self, word: &str) -> bool {
        let mut ahead = Self { ..*self };
        let found = ahead.word().eq_ignore_ascii_case(word);
        if found {
            *self = ahead;
        }
        found
    }

    /// Skips `prefix`, in any case, also when more letters follow at once (`1perminute`).
    pub(crate) fn prefix(&mut self, prefix: &str) -> bool {
        let found = self.rest.get(..prefix.len()).is_some_and(|front| front.eq_ignore_ascii_case(prefix));
        if found {
            self.advance(prefix.len());
        }
        found
    }

    /// The next number from 1 to 2^32 - 1; nothing when no digit comes next.
    pub(crate) fn number(&mut self, what: &str) -> Result<Option<u32>, ConfigError> {
        match self.number_or_zero(what)? {
            Some(0) => Err(self.unreadable(what, "0", "it must be at least 1")),
            other => Ok(other),
        }
    }

    /// The next number from 0 to 2^32 - 1; nothing when no digit comes next.
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

    /// The next text in double quotes, `\"` and `\\` inside standing for themselves; nothing when no quote comes next.
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

    /// The error for a text that ended or went on with something that is not `expected`.
    pub(crate) fn expected(&self, expected: &str) -> ConfigError {
        self.unreadable("", self.rest, &format!("expected {expected}"))
    }

    /// The error for the token `found`, which is `what` but cannot be, and why.
    pub(crate) fn unreadable(&self, what: &str, found: &str, why: &str) -> ConfigError {
        let text = self.text;
        let what = if what.is_empty() { String::new() } else { format!("{what} ") };
        let found = if found.is_empty() { "the end".to_owned() } else { format!("{what}{found:?}") };
        ConfigError::new(format!("cannot read {found} in {text:?}: {why}, for example \"10/minute\""))
    }

    /// The error for the word `found`, which is none of the `known` ones. It suggests the nearest.
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

/// The known word that `word` is most likely meant to be, if there is one: the two differ by at most
/// two letters, hyphens and case aside, or `word` is the beginning of the known one.
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
