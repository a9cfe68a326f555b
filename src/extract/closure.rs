use super::{Head, KeyExtractor, Missing};
use crate::Key;

/// What a closure may answer: a [`Key`], an `Option<Key>` (`None`: not limited), or a `Result` of one of them with
/// [`Missing`].
pub trait IntoKey {
    /// The answer as [`KeyExtractor::extract`] gives it.
    ///
    /// # Errors
    ///
    /// The closure's own.
    fn into_key(self) -> Result<Option<Key>, Missing>;
}

impl IntoKey for Key {
    fn into_key(self) -> Result<Option<Key>, Missing> {
        Ok(Some(self))
    }
}

impl IntoKey for Option<Key> {
    fn into_key(self) -> Result<Option<Key>, Missing> {
        Ok(self)
    }
}

impl<T: IntoKey> IntoKey for Result<T, Missing> {
    fn into_key(self) -> Result<Option<Key>, Missing> {
        self.and_then(T::into_key)
    }
}

impl<F, T> KeyExtractor for F
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: IntoKey,
{
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing> {
        self(head).into_key()
    }
}
