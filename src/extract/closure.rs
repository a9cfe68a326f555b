use super::{Head, KeyError, KeyExtractor};
use crate::key::Key;

/// The return value of a closure that extracts a key: one that is a [`KeyExtractor`], or that of
/// [`Extension::new`](super::Extension::new).
///
/// | type | meaning |
/// |---|---|
/// | [`Key`] | the key |
/// | `Option<Key>` | the key, or `None` if the request is not limited |
/// | `Result` of one of these, with [`KeyError`] | an error if the request needs a key and has none |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key",
    label = "a closure that extracts a key returns `Key`, `Option<Key>`, or a `Result` of them with `KeyError`",
    note = "write `Key::from(..)` around an address, a text or bytes"
)]
pub trait IntoKey {
    /// Converts into the result of [`KeyExtractor::extract`].
    ///
    /// # Errors
    ///
    /// Returns the error of the closure.
    fn into_key(self) -> Result<Option<Key>, KeyError>;
}

impl IntoKey for Key {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        Ok(Some(self))
    }
}

impl IntoKey for Option<Key> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        Ok(self)
    }
}

impl<T: IntoKey> IntoKey for Result<T, KeyError> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        self.and_then(T::into_key)
    }
}

impl<F, T> KeyExtractor for F
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: IntoKey,
{
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        self(head).into_key()
    }
}

/// Returns the closure unchanged. Helps the compiler to infer the argument type of a closure that
/// is used as a [`KeyExtractor`].
///
/// A closure with an explicit argument type, `|head: &Head<'_>| ..`, does not need this function.
///
/// ```
/// use tower_ratelimit::extract::key_by;
/// use tower_ratelimit::{Key, Quota, RateLimitLayer};
///
/// let by_host = key_by(|head| Key::from(head.uri().host().unwrap_or("none")));
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_host);
/// ```
pub fn key_by<F, T>(extract: F) -> F
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: IntoKey,
{
    extract
}
