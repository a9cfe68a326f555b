use std::fmt;
use std::str::FromStr;

use super::OnError;
use crate::error::ConfigError;

/// Parses `admit` or `refuse`. Upper and lower case are equivalent, and white space around the word
/// is ignored.
impl FromStr for OnError {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        [Self::Admit, Self::Refuse]
            .into_iter()
            .find(|on_error| on_error.word().eq_ignore_ascii_case(text.trim()))
            .ok_or_else(|| ConfigError::new(format!("cannot read the action {text:?}: write \"admit\" or \"refuse\"")))
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl OnError {
    const fn word(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Refuse => "refuse",
        }
    }
}
