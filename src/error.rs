//! What is said when configuration cannot be understood or cannot work.

use std::error::Error;
use std::fmt;

/// Any error, boxed: what a [`Storage`](crate::Storage)'s error turns into.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A quota, a policy or an option that cannot be: says what was wrong and what to write instead.
///
/// It comes from reading strings, and from the `try_` form of each constructor that panics.
///
/// ```
/// use tower_ratelimit::Policy;
///
/// let error = "10/fortnight".parse::<Policy>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "cannot read the unit \"fortnight\" in \"10/fortnight\": \
///      expected s, min, h, d, week, month, year or ms, for example \"10/minute\"",
/// );
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    message: Box<str>,
}

impl ConfigError {
    /// An error with this text, for the author of a strategy, a storage or an extractor: say what was
    /// wrong, quote it, and show what to write instead.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into().into_boxed_str() }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConfigError").field(&self.message).finish()
    }
}

impl Error for ConfigError {}

/// For constructors that panic where their `try_` form returns an error.
#[track_caller]
pub(crate) fn or_panic<T>(made: Result<T, ConfigError>) -> T {
    match made {
        Ok(it) => it,
        Err(error) => panic!("{error}"),
    }
}
