use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use super::{Head, IntoKey, KeyError, KeyExtractor};
use crate::Key;

type KeyFn<T> = dyn Fn(&T) -> Result<Option<Key>, KeyError> + Send + Sync;

/// The key of what an outer layer has put into the request's extensions, for example the user that
/// an authentication layer has found.
///
/// Without the extension the key is missing, and the answer is 500: the layer that inserts it stands
/// in the wrong order, or did not run. A closure that returned `None` there would leave the request
/// unlimited. For requests that may come without the extension, add another extractor by
/// [`or`](KeyExtractor::or).
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
/// let by_user = Extension::by(|user: &User| Key::from(user.id));
/// // Requests of guests have no user, and are known by their address.
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_user.or(PeerIp::new()));
/// ```
///
/// With axum, put the authentication layer outside of this one, which is below it in a chain of
/// `Router::layer` and above it in a `ServiceBuilder`.
pub struct Extension<T> {
    key: Arc<KeyFn<T>>,
}

impl<T: Send + Sync + 'static> Extension<T> {
    /// Takes the key from the extension of type `T`.
    ///
    /// The closure returns a [`Key`], an `Option<Key>` (`None`: the request is not limited), or a
    /// `Result` of one of them with [`KeyError`].
    pub fn by<F, K>(key: F) -> Self
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
                "the request has no extension of type {}: put the layer that inserts it outside of the rate limit",
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
