//! The text form of header families.

use std::fmt;
use std::str::FromStr;

use super::Headers;
use crate::error::ConfigError;

const WORDS: &str = "x, reset-in-seconds, ietf, draft6 or none";

/// Parses a list of words, separated by commas, or the single word `none`. Upper and lower case are
/// equivalent, and white space around the words is ignored.
///
/// | word | effect |
/// |---|---|
/// | `x` | [`x_rate_limit`](Headers::x_rate_limit) |
/// | `reset-in-seconds` | [`reset_in_seconds`](Headers::reset_in_seconds), for `x` |
/// | `ietf` | [`ietf`](Headers::ietf) |
/// | `draft6` | [`draft6`](Headers::draft6) |
/// | `none` | [`none`](Headers::none) |
///
/// ```
/// use tower_ratelimit::Headers;
///
/// let headers: Headers = "x, reset-in-seconds, ietf".parse()?;
/// assert_eq!(headers, Headers::x_rate_limit().reset_in_seconds().and(Headers::ietf()));
/// assert_eq!(headers.to_string(), "x, reset-in-seconds, ietf");
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
impl FromStr for Headers {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim().eq_ignore_ascii_case("none") {
            return Ok(Self::none());
        }
        text.split(',').try_fold(Self::none(), |headers, word| {
            Ok(match word.trim().to_ascii_lowercase().as_str() {
                "x" => headers.and(Self::x_rate_limit()),
                "reset-in-seconds" => headers.reset_in_seconds(),
                "ietf" => headers.and(Self::ietf()),
                "draft6" => headers.and(Self::draft6()),
                "none" => return Err(unreadable(word, text, "\"none\" cannot be combined with other fields")),
                _ => return Err(unreadable(word, text, &format!("expected {WORDS}"))),
            })
        })
    }
}

fn unreadable(word: &str, text: &str, why: &str) -> ConfigError {
    ConfigError::new(format!(
        "cannot read the header fields {:?} in {text:?}: {why}, for example \"x, ietf\"",
        word.trim()
    ))
}

/// Writes a text that parses to the same fields, except for the secret of a partition key, which is
/// omitted.
impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [(self.x, "x"), (self.from_now, "reset-in-seconds"), (self.ietf, "ietf"), (self.draft_6, "draft6")];
        let words: Vec<_> = words.into_iter().filter_map(|(is_set, word)| is_set.then_some(word)).collect();
        f.write_str(&if words.is_empty() { "none".to_owned() } else { words.join(", ") })
    }
}
