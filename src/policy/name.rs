use std::fmt::{self, Write};

use super::Policy;
use crate::error::ConfigError;

/// Validates a name: not empty, and valid as a Structured Field string (RFC 9651, section 3.3.3).
pub(super) fn checked(name: String) -> Result<Box<str>, ConfigError> {
    if !name.is_empty() && name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return Ok(name.into_boxed_str());
    }
    Err(ConfigError::new(format!(
        "the name {name:?} is not a valid header value: \
         use one or more letters, digits, spaces and ASCII punctuation, for example \"free\""
    )))
}

/// Returns the policy if its limits have different [names](Policy::limit_name).
pub(super) fn distinct(policy: Policy) -> Result<Policy, ConfigError> {
    let limits = policy.limits().len();
    let name_of = |position: usize| policy.limit_name(position);
    let twice = (1..limits).find(|&second| (0..second).any(|first| name_of(first) == name_of(second)));
    match twice {
        None => Ok(policy),
        Some(second) => Err(ConfigError::new(format!(
            "two limits of the policy \"{policy}\" have the name {:?}: \
             give one of them another name, for example \"daily\"",
            name_of(second)
        ))),
    }
}

/// Writes a name in double quotes, as in header fields and in the text of a policy.
pub(super) struct Quoted<'a>(pub(super) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            if matches!(c, '"' | '\\') {
                f.write_char('\\')?;
            }
            f.write_char(c)?;
        }
        f.write_char('"')
    }
}
