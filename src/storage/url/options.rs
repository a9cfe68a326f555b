//! What stands behind the question mark: `prefix=rl&deadline=100ms`.

use std::time::Duration;

use super::{Wrong, decoded};
use crate::ConfigError;
use crate::storage::deadline::{self, DEADLINE};

/// Unless the URL says another.
const PREFIX: &str = "rl";

/// Each option is taken once; what is left was not understood.
pub(in crate::storage) struct Options<'a> {
    left: Vec<(&'a str, String)>,
    understood: Vec<&'static str>,
    wrong: &'a Wrong<'a>,
}

impl<'a> Options<'a> {
    pub(in crate::storage) fn parse(query: &'a str, wrong: &'a Wrong<'a>) -> Result<Self, ConfigError> {
        let mut left: Vec<(&str, String)> = Vec::new();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                wrong(format!("the option {part:?} has no value: write {part}=..., for example deadline=100ms"))
            })?;
            // The value may be a password.
            let value = decoded(value).map_err(|why| wrong(format!("in the option {name:?} {why}")))?;
            if left.iter().any(|(other, _)| *other == name) {
                return Err(wrong(format!("the option {name:?} is there twice: write it once")));
            }
            left.push((name, value));
        }
        Ok(Self { left, understood: Vec::new(), wrong })
    }

    /// What the option says, if it is there.
    pub(in crate::storage) fn take(&mut self, name: &'static str) -> Option<String> {
        self.understood.push(name);
        let at = self.left.iter().position(|(other, _)| *other == name)?;
        Some(self.left.swap_remove(at).1)
    }

    pub(in crate::storage) fn prefix(&mut self) -> Result<Box<str>, ConfigError> {
        let prefix = self.take("prefix").unwrap_or_else(|| PREFIX.to_owned());
        checked_prefix(&prefix).map_err(|error| (self.wrong)(error.to_string()))?;
        Ok(prefix.into())
    }

    pub(in crate::storage) fn deadline(&mut self) -> Result<Duration, ConfigError> {
        let Some(text) = self.take("deadline") else { return Ok(DEADLINE) };
        let deadline = duration(&text).filter(|deadline| deadline::checked(*deadline).is_ok());
        deadline.ok_or_else(|| {
            (self.wrong)(format!(
                "{text:?} is no deadline: write at least 1ms and at most 3600s, for example 100ms or 2s"
            ))
        })
    }

    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn max_skew(&mut self) -> Result<Duration, ConfigError> {
        use crate::storage::cas::skew;
        let Some(text) = self.take("max-skew") else { return Ok(skew::MAX_SKEW) };
        let max_skew = duration(&text).and_then(|max_skew| skew::checked(max_skew).ok());
        max_skew.ok_or_else(|| {
            (self.wrong)(format!("max-skew cannot be {text:?}: write at most 86400s, for example 500ms or 5s"))
        })
    }

    /// Returns `true` for `long-logs=allow`.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn long_logs(&mut self) -> Result<bool, ConfigError> {
        match self.take("long-logs").as_deref() {
            None | Some("refuse") => Ok(false),
            Some("allow") => Ok(true),
            Some(other) => {
                Err((self.wrong)(format!("long-logs cannot be {other:?}: write long-logs=allow or long-logs=refuse")))
            }
        }
    }

    /// All that is there has been understood.
    pub(in crate::storage) fn end(self) -> Result<(), ConfigError> {
        let Some((name, _)) = self.left.first() else { return Ok(()) };
        let known = self.understood.join(", ");
        Err((self.wrong)(format!("it has no option {name:?}: write one of {known}, for example deadline=100ms")))
    }
}

/// Whether keys can begin with it: 1 to 64 characters without braces, which would take part in where a cluster puts a key.
pub(in crate::storage) fn checked_prefix(prefix: &str) -> Result<(), ConfigError> {
    let allowed = |c: char| c.is_ascii_graphic() && c != '{' && c != '}';
    if (1..=64).contains(&prefix.len()) && prefix.chars().all(allowed) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "{prefix:?} cannot begin the keys: write a prefix of 1 to 64 ASCII characters without white space, {{ and }}, \
         for example \"rl\""
    )))
}

fn duration(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let number = u64::from(digits.parse::<u32>().ok()?);
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        _ => None,
    }
}
