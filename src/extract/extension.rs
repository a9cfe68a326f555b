use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use super::{Head, IntoKey, KeyError, KeyExtractor};
use crate::key::Key;

type KeyFn<T> = dyn Fn(&T) -> Result<Option<Key>, KeyError> + Send + Sync;

/// Creates the key from an extension of the request, for example from the user that an
/// authentication layer has inserted.
///
/// If the extension is missing, the key is missing, and the response is 500. The usual cause is a
/// wrong order of the layers.
///
/// If some requests have no such extension, add another extractor with [`or`](KeyExtractor::or), as
/// in the example below. A closure over the [`Head`] that returns `None` for these requests would
/// exempt them from the limit.
///
/// ```
/// use tower_ratelimit::extract::Extension;
/// use tower_ratelimit::{Key, KeyExtractor, PeerIp, Quota, RateLimitLayer};
///
/// #[derive(Clone)]
/// struct User {
///     id: u64,
/// }
///
/// let by_user = Extension::new(|user: &User| Key::from(user.id));
/// // Requests without a user are limited by their address.
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_user.or(PeerIp::new()));
/// ```
///
/// The authentication layer has to be outside of the rate limit layer. Add it after the rate limit
/// layer with axum's `Router::layer`, or before it in a `ServiceBuilder`.
pub struct Extension<T> {
    key: Arc<KeyFn<T>>,
}

impl<T: Send + Sync + 'static> Extension<T> {
    /// Creates an extractor that passes the extension of type `T` to the closure `key`.
    ///
    /// The closure returns a [`Key`], an `Option<Key>` (`None` means that the request is not
    /// limited), or a `Result` of one of them with [`KeyError`]. It is not called if the extension
    /// is missing.
    pub fn new<F, K>(key: F) -> Self
    where
        F: Fn(&T) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        Self { key: Arc::new(move |value: &T| key(value).into_key()) }
    }
}

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let Some(value) = head.extensions.get() else {
            return Err(KeyError::server(format!(
                "the request has no extension of type {}: add the layer that inserts it outside of the rate limit layer",
                type_name::<T>()
            )));
        };
        (self.key)(value)
    }
}

impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self { key: Arc::clone(&self.key) }
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>", type_name::<T>())
    }
}
