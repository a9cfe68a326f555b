//! Configuration errors.

use std::error::Error;
use std::fmt;
use std::iter::successors;

/// A boxed error of any type. Functions that accept any error take an `impl Into<BoxError>`, for
/// example [`StorageError::with_source`](crate::storage::StorageError::with_source).
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The error for an invalid quota, policy, option or URL. In most cases, the message contains the
/// invalid value and a valid one.
///
/// Parsers, the constructors whose names start with `try_`, and methods that check a policy, such
/// as [`Storage::validate`](crate::Storage::validate), return it.
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
    /// Creates an error with this message, for custom strategies, storages and extractors. Quote
    /// the invalid value in the message, and show a valid one.
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

/// Returns the value that a `try_` constructor has made, for the constructor that panics.
///
/// # Panics
///
/// Panics with the message of the error.
#[track_caller]
pub(crate) fn or_panic<T>(made: Result<T, ConfigError>) -> T {
    match made {
        Ok(it) => it,
        Err(error) => panic!("{error}"),
    }
}

/// Joins the messages of an error and its sources: `a: b: c`. Skips a message that the text already
/// contains, because the errors of other crates may include their source.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for source in successors(error.source(), |&source| source.source()) {
        let source = source.to_string();
        if !text.contains(&source) {
            text = [&text, ": ", &source].concat();
        }
    }
    text
}
