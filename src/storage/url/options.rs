//! The options of a URL: `prefix=rl&timeout=100ms`.

use std::time::Duration;

use super::{Wrong, decoded};
use crate::error::ConfigError;
use crate::storage::deadline::{self, DEADLINE};

/// The default prefix.
pub(in crate::storage) const PREFIX: &str = "rl";

/// The options of a URL. The parser of a storage takes each option that it knows.
/// [`end`](Self::end) returns an error if an option remains, because that option is unknown.
pub(in crate::storage) struct Options<'a> {
    left: Vec<(&'a str, String)>,
    known: Vec<&'static str>,
    wrong: &'a Wrong<'a>,
}

impl<'a> Options<'a> {
    /// Splits and percent-decodes the options in `query`. An option must have a value, and must not
    /// occur twice.
    pub(in crate::storage) fn parse(query: &'a str, wrong: &'a Wrong<'a>) -> Result<Self, ConfigError> {
        let mut left: Vec<(&str, String)> = Vec::new();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                // After another option, it may be the rest of a password that contains `&`.
                let (name, write) = if left.is_empty() {
                    (format!("the option {part:?}"), format!("{part}=..."))
                } else {
                    ("an option".to_owned(), "& in a value as %26, and options with a value".to_owned())
                };
                wrong(format!("{name} has no value; write {write}, for example timeout=100ms"))
            })?;
            if name.contains('%') {
                return Err(wrong(format!("invalid option name {name:?}; write it without %")));
            }
            // The error does not quote the value, because it may be a password.
            let value = decoded(value).map_err(|why| wrong(format!("invalid value of the option {name:?}: {why}")))?;
            if left.iter().any(|(other, _)| *other == name) {
                return Err(wrong(format!("the option {name:?} occurs twice; write it once")));
            }
            left.push((name, value));
        }
        Ok(Self { left, known: Vec::new(), wrong })
    }

    /// Returns the value of an option, if the URL contains it.
    pub(in crate::storage) fn take(&mut self, name: &'static str) -> Option<String> {
        self.known.push(name);
        let at = self.left.iter().position(|(other, _)| *other == name)?;
        Some(self.left.swap_remove(at).1)
    }

    /// Returns the option `prefix`, or its default.
    pub(in crate::storage) fn prefix(&mut self) -> Result<Box<str>, ConfigError> {
        let prefix = self.take("prefix").unwrap_or_else(|| PREFIX.to_owned());
        checked_prefix(&prefix).map_err(|error| (self.wrong)(error.to_string()))?;
        Ok(prefix.into())
    }

    /// Returns the option `timeout`, or its default.
    pub(in crate::storage) fn deadline(&mut self) -> Result<Duration, ConfigError> {
        let Some(text) = self.take("timeout") else { return Ok(DEADLINE) };
        let deadline = duration(&text).filter(|deadline| deadline::checked(*deadline).is_ok());
        deadline.ok_or_else(|| {
            (self.wrong)(format!(
                "invalid timeout {text:?}; write at least 1ms and at most 3600s, for example 100ms or 2s"
            ))
        })
    }

    #[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
    /// Returns the option `max-skew`, or its default.
    pub(in crate::storage) fn max_skew(&mut self) -> Result<Duration, ConfigError> {
        use crate::storage::cas::skew;
        let Some(text) = self.take("max-skew") else { return Ok(skew::MAX_SKEW) };
        let max_skew = duration(&text).and_then(|max_skew| skew::checked(max_skew).ok());
        max_skew.ok_or_else(|| {
            (self.wrong)(format!("invalid max-skew {text:?}; write at most 86400s, for example 500ms or 5s"))
        })
    }

    /// Returns `true` for `long-logs=allow`, and `false` for `long-logs=refuse`, the default.
    #[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
    pub(in crate::storage) fn long_logs(&mut self) -> Result<bool, ConfigError> {
        match self.take("long-logs").as_deref() {
            None | Some("refuse") => Ok(false),
            Some("allow") => Ok(true),
            Some(other) => {
                Err((self.wrong)(format!("invalid long-logs {other:?}; write long-logs=allow or long-logs=refuse")))
            }
        }
    }

    /// Returns the options that were not taken, for the client of a server to parse. The values are
    /// percent-encoded again.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn into_rest(self) -> Vec<(String, String)> {
        let encode = |value: &str| value.bytes().fold(String::new(), |text, byte| text + &format!("%{byte:02X}"));
        self.left.iter().map(|(name, value)| ((*name).to_owned(), encode(value))).collect()
    }

    /// Returns an error if an option has not been taken.
    pub(in crate::storage) fn end(self) -> Result<(), ConfigError> {
        let Some((name, _)) = self.left.first() else { return Ok(()) };
        let known = self.known.join(", ");
        Err((self.wrong)(format!("unknown option {name:?}; write one of {known}, for example timeout=100ms")))
    }
}

/// Returns an error unless `prefix` is 1 to 64 printable ASCII characters without braces. Braces
/// would change the hash slot of a key in a Redis cluster.
pub(in crate::storage) fn checked_prefix(prefix: &str) -> Result<(), ConfigError> {
    let allowed = |c: char| c.is_ascii_graphic() && c != '{' && c != '}';
    if (1..=64).contains(&prefix.len()) && prefix.chars().all(allowed) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "invalid prefix {prefix:?}; write 1 to 64 ASCII characters without white space, {{ and }}, \
         for example \"rl\""
    )))
}

/// Parses a whole number of milliseconds or seconds, such as `100ms` or `2s`.
fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let number = u64::from(digits.parse::<u32>().ok()?);
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}
