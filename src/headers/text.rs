//! The header fields of a layer as text.

use std::fmt;
use std::str::FromStr;

use super::Headers;
use super::suffix::{NOT_A_SUFFIX, Suffix};
use crate::error::ConfigError;

const WORDS: &str = "x, reset-in-seconds, suffix=tokens, draft11, draft6, retry-jitter=20 or none";

/// Parses a list of words, separated by commas, or the single word `none`. Upper and lower case are
/// equivalent, and white space around the words is ignored.
///
/// | word | effect |
/// |---|---|
/// | `x` | [`x_rate_limit`](Headers::x_rate_limit) |
/// | `reset-in-seconds` | [`reset_in_seconds`](Headers::reset_in_seconds), for `x` |
/// | `draft11` | [`draft11`](Headers::draft11) |
/// | `draft6` | [`draft6`](Headers::draft6) |
/// | `suffix=tokens` | [`suffix`](Headers::suffix), for `x` |
/// | `retry-jitter=20` | [`retry_jitter`](Headers::retry_jitter), in percent |
/// | `none` | [`none`](Headers::none) |
///
/// ```
/// use tower_ratelimit::Headers;
///
/// let headers: Headers = "x, reset-in-seconds, draft11".parse()?;
/// assert_eq!(headers, Headers::x_rate_limit().reset_in_seconds().and(Headers::draft11()));
/// assert_eq!(headers.to_string(), "x, reset-in-seconds, draft11");
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
impl FromStr for Headers {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim().eq_ignore_ascii_case("none") {
            return Ok(Self::none());
        }
        text.split(',').try_fold(Self::none(), |headers, word| {
            let lower = word.trim().to_ascii_lowercase();
            let (name, value) = lower.split_once('=').map_or((&*lower, None), |(name, value)| (name, Some(value)));
            Ok(match (name, value) {
                ("x", None) => headers.and(Self::x_rate_limit()),
                ("reset-in-seconds", None) => headers.reset_in_seconds(),
                ("draft11", None) => headers.and(Self::draft11()),
                ("draft6", None) => headers.and(Self::draft6()),
                ("suffix", Some(suffix)) => match Suffix::parse(suffix) {
                    Some(suffix) => Self { suffix: Some(suffix), ..headers },
                    None => return Err(unreadable(word, text, NOT_A_SUFFIX)),
                },
                ("retry-jitter", Some(percent)) => match percent.parse() {
                    Ok(percent @ 0..=100) => headers.retry_jitter(percent),
                    _ => return Err(unreadable(word, text, "the jitter is a percentage from 0 to 100")),
                },
                ("none", None) => return Err(unreadable(word, text, "\"none\" cannot be combined with other fields")),
                _ => return Err(unreadable(word, text, &format!("expected {WORDS}"))),
            })
        })
    }
}

fn unreadable(word: &str, text: &str, why: &str) -> ConfigError {
    ConfigError::new(format!(
        "cannot read the header fields {:?} in {text:?}: {why}, for example \"x, draft11\"",
        word.trim()
    ))
}

/// Writes a text that parses to the same fields, except for the secret of a partition key, which is
/// omitted.
impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let families =
            [(self.x, "x"), (self.from_now, "reset-in-seconds"), (self.draft_11, "draft11"), (self.draft_6, "draft6")];
        let mut words: Vec<_> =
            families.into_iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word.to_owned()).collect();
        words.extend(self.suffix.map(|suffix| format!("suffix={}", suffix.as_str())));
        words.extend((self.jitter > 0).then(|| format!("retry-jitter={}", self.jitter)));
        f.write_str(&if words.is_empty() { "none".to_owned() } else { words.join(", ") })
    }
}

/// Omits the secret.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut families = f.debug_list();
        families.entries(self.x.then_some("x")).entries(self.from_now.then_some("reset in seconds"));
        families.entries(self.draft_11.then_some("draft11")).entries(self.partition.map(|_| "partition key"));
        families.entries(self.draft_6.then_some("draft6")).entries(self.suffix.as_ref().map(Suffix::as_str));
        families.entries((self.jitter > 0).then(|| format!("retry jitter {} %", self.jitter))).finish()
    }
}
