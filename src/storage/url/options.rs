//! The options of a URL: `prefix=rl&timeout=100ms`.

use std::borrow::Cow;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use super::Wrong;
use crate::error::ConfigError;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
use crate::storage::bounds::{MAX_SKEW, checked_skew};
use crate::storage::bounds::{TIMEOUT, checked_timeout};
#[cfg(feature = "postgres")]
use crate::storage::names::encoded;
use crate::text::edits;

/// The default prefix.
pub(in crate::storage) const PREFIX: &str = "rl";

/// The options of a URL. The parser of a storage takes each option that it knows.
/// [`end`](Self::end) returns an error if an option remains, because that option is unknown.
pub(in crate::storage) struct Options<'a> {
    left: Vec<(&'a str, String)>,
    known: Vec<&'static str>,
    wrong: &'a Wrong<'a>,
}

/// The options that all compare-and-swap storages have.
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
#[derive(Clone, Debug)]
pub(in crate::storage) struct CasOptions {
    pub(in crate::storage) prefix: Arc<str>,
    pub(in crate::storage) timeout: Duration,
    pub(in crate::storage) max_skew: Duration,
    /// `true` if policies may keep more than 1,000 log entries per key.
    pub(in crate::storage) long_logs: bool,
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
            // Most likely an option that was appended to a URL with options. Its text would become a
            // part of the value before it.
            if part.contains('?') {
                let text = "the options contain a second ?; write & between options, and ? in a value as %3F";
                return Err(wrong(text.to_owned()));
            }
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

    /// Returns the option `prefix`, or its default. Braces are not allowed, because they would change
    /// the hash slot of a key in a Redis cluster.
    pub(in crate::storage) fn prefix(&mut self) -> Result<Box<str>, ConfigError> {
        let prefix = self.take("prefix").unwrap_or_else(|| PREFIX.to_owned());
        let allowed = |c: char| c.is_ascii_graphic() && c != '{' && c != '}';
        if (1..=64).contains(&prefix.len()) && prefix.chars().all(allowed) {
            return Ok(prefix.into());
        }
        Err((self.wrong)(format!(
            "invalid prefix {prefix:?}; write 1 to 64 ASCII characters without white space, {{ and }}, \
             for example \"rl\""
        )))
    }

    /// Returns the option `timeout`, or its default.
    pub(in crate::storage) fn timeout(&mut self) -> Result<Duration, ConfigError> {
        let Some(text) = self.take("timeout") else { return Ok(TIMEOUT) };
        let timeout = duration(&text).filter(|timeout| checked_timeout(*timeout).is_ok());
        timeout.ok_or_else(|| {
            (self.wrong)(format!(
                "invalid timeout {text:?}; write at least 1ms and at most 3600s, for example 100ms or 2s"
            ))
        })
    }

    /// Returns the options of a compare-and-swap storage, or their defaults.
    #[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
    pub(in crate::storage) fn cas(&mut self) -> Result<CasOptions, ConfigError> {
        Ok(CasOptions {
            prefix: self.prefix()?.into(),
            timeout: self.timeout()?,
            long_logs: self.choice("long-logs", false, &[("allow", true), ("refuse", false)])?,
            max_skew: self.max_skew()?,
        })
    }

    #[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
    fn max_skew(&mut self) -> Result<Duration, ConfigError> {
        let Some(text) = self.take("max-skew") else { return Ok(MAX_SKEW) };
        let max_skew = duration(&text).and_then(|max_skew| checked_skew(max_skew).ok());
        max_skew.ok_or_else(|| {
            (self.wrong)(format!("invalid max-skew {text:?}; write at most 86400s, for example 500ms or 5s"))
        })
    }

    /// Returns the value of an option that has a word for each value, or its `default`.
    pub(in crate::storage) fn choice<T: Copy>(
        &mut self,
        name: &'static str,
        default: T,
        values: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        let Some(text) = self.take(name) else { return Ok(default) };
        let value = values.iter().find(|(word, _)| *word == text);
        value.map(|(_, value)| *value).ok_or_else(|| {
            let all: Vec<String> = values.iter().map(|(word, _)| format!("{name}={word}")).collect();
            (self.wrong)(format!("invalid {name} {text:?}; write {}", all.join(" or ")))
        })
    }

    /// Returns the query of the options that were not taken, for the client of a server to parse. The
    /// values are percent-encoded again.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn into_rest(self) -> String {
        let rest: Vec<String> = self.left.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        rest.join("&")
    }

    /// Returns an error if an option has not been taken.
    pub(in crate::storage) fn end(self) -> Result<(), ConfigError> {
        let Some((name, _)) = self.left.first() else { return Ok(()) };
        Err((self.wrong)(match self.meant() {
            Some((_, help)) => help,
            None => {
                format!("unknown option {name:?}; write one of {}, for example timeout=100ms", self.known.join(", "))
            }
        }))
    }

    /// Returns an option that has not been taken and that is probably a misspelled one, with a
    /// message.
    pub(in crate::storage) fn meant(&self) -> Option<(&'a str, String)> {
        self.left.iter().find_map(|(name, _)| {
            let near = self.known.iter().filter_map(|known| Some((edits(name, known)?, known)));
            let (edits, known) = near.min()?;
            let help = || format!("unknown option {name:?}; did you mean {known:?}?");
            (2 * edits < name.len()).then(|| (*name, help()))
        })
    }
}

/// Parses a duration such as `100ms` or `1.5s`, and every other one that `Duration` prints.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.')?);
    let nanos: u64 = match unit {
        "s" => 1_000_000_000,
        "ms" => 1_000_000,
        "µs" | "us" => 1_000,
        "ns" => 1,
        _ => return None,
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if (1..=9).contains(&fraction.len()) => (whole, fraction),
        Some(_) => return None,
        None => (number, ""),
    };
    let parts = 10_u64.pow(u32::try_from(fraction.len()).ok()?);
    let fraction = if fraction.is_empty() { 0 } else { fraction.parse::<u64>().ok()? * nanos / parts };
    Some(Duration::from_nanos(whole.parse::<u64>().ok()?.checked_mul(nanos)?.checked_add(fraction)?))
}

/// Percent-decodes a text.
pub(in crate::storage) fn decoded(text: &str) -> Result<String, &'static str> {
    let is_code = |after: &str| after.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    // The crate keeps an incomplete code as it is.
    if !text.split('%').skip(1).all(is_code) {
        return Err("% must be followed by two digits from 0 to F; write % itself as %25");
    }
    let decoded = percent_decode_str(text).decode_utf8().map(Cow::into_owned);
    decoded.map_err(|_| "the percent-encoded text is not UTF-8; write %XX for each byte of UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_duration_is_read_back() {
        for nanos in [1, 999, 1_500, 60_000_000, 1_234_567, 100_000_001, 2_000_000_000, 3_599_999_999_999] {
            let expected = Duration::from_nanos(nanos);
            assert_eq!(duration(&format!("{expected:?}")), Some(expected));
        }
        for text in ["", "1", "s", ".s", "1.s", ".5s", "1.2.3s", "-1s", "1 s", "1h", "1.0000000001s", "18446744073710s"]
        {
            assert_eq!(duration(text), None, "{text:?}");
        }
    }
}
