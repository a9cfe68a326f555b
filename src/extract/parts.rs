//! Extractors of keys from one part of a request, and closures.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use super::forwarded::FORWARDING;
use super::{Head, KeyError, KeyExtractor};
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::lint::Lint;

/// A type that a closure can return to extract a key. The closure is a [`KeyExtractor`], or the
/// argument of [`Extension::new`].
///
/// | type | meaning |
/// |---|---|
/// | [`Key`] | the key |
/// | `Option<Key>` | the key, or `None` if the request is not limited |
/// | `Result` of one of these, with [`KeyError`] | an error if the request needs a key and has none |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key",
    label = "a closure that extracts a key returns `Key`, `Option<Key>`, or a `Result` of them with `KeyError`",
    note = "write `Key::from(..)` around an address, a number, a text or bytes",
    note = "a key is not awaited: authenticate in an outer layer and read an `Extension`, or use `PolicyLookup`"
)]
pub trait IntoKey {
    /// Converts into the result of [`KeyExtractor::extract`].
    ///
    /// # Errors
    ///
    /// Returns the error of the closure.
    fn into_key(self) -> Result<Option<Key>, KeyError>;
}

#[diagnostic::do_not_recommend]
impl IntoKey for Key {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        Ok(Some(self))
    }
}

#[diagnostic::do_not_recommend]
impl IntoKey for Option<Key> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        Ok(self)
    }
}

#[diagnostic::do_not_recommend]
impl<T: IntoKey> IntoKey for Result<T, KeyError> {
    fn into_key(self) -> Result<Option<Key>, KeyError> {
        self.and_then(T::into_key)
    }
}

#[diagnostic::do_not_recommend]
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

/// Uses the value of a header field as the key. The field must be one that a trusted component in
/// front of this server sets or checks, such as the tenant from a gateway.
///
/// The key is the whole value, byte by byte. If the field occurs several times, the first value is
/// the key. If the field is missing, the key is missing, and the response is 400.
///
/// # Unchecked fields
///
/// Use a header as the key only if a component in front of this server authenticates it. A client
/// that can send any value gets a new quota with each value, so the limit has no effect:
///
/// ```
/// use std::collections::HashSet;
/// use tower_ratelimit::extract::Head;
/// use tower_ratelimit::{Header, KeyExtractor};
///
/// let by_header = Header::new("x-api-key");
/// let key_of = |value: u32| {
///     let request = http::Request::get("/").header("x-api-key", value).body(()).unwrap();
///     by_header.extract(&Head::from_request(&request)).unwrap()
/// };
/// // One client with made-up API keys gets 100,000 quotas.
/// let clients: HashSet<_> = (0..100_000).map(key_of).collect();
/// assert_eq!(clients.len(), 100_000);
/// ```
///
/// For API keys, let an authentication layer look up the user of the API key, and insert the user
/// into the extensions. Then use the user as the key. Here, requests without a valid API key are
/// limited by their address:
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
/// let by_user = Extension::new(|user: &User| Key::from(user.id)).or(PeerIp::new());
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_user);
/// ```
#[derive(Clone)]
pub struct Header(HeaderName);

impl Header {
    /// Creates an extractor for the field with this name. Upper and lower case are equivalent.
    ///
    /// `Header::from` creates an extractor from a [`HeaderName`], and cannot fail.
    ///
    /// # Panics
    ///
    /// Panics if `name` is not a valid field name. [`try_new`](Self::try_new) returns an error
    /// instead.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        or_panic(Self::try_new(name))
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if `name` is not a valid field name.
    pub fn try_new(name: &str) -> Result<Self, ConfigError> {
        field_name(name, "x-api-key").map(Self)
    }
}

impl From<HeaderName> for Header {
    fn from(name: HeaderName) -> Self {
        Self(name)
    }
}

/// Parses a field name. The error suggests `example`, which is a valid name.
pub(super) fn field_name(name: &str, example: &str) -> Result<HeaderName, ConfigError> {
    name.parse().map_err(|_| {
        ConfigError::new(format!("{name:?} is not a valid header field name: use a name such as {example:?}"))
    })
}

impl KeyExtractor for Header {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        match head.headers.get(&self.0) {
            Some(value) => Ok(Some(Key::from(value.as_bytes()))),
            None => Err(KeyError::client(format!("the header field {:?} is missing", self.0.as_str()))),
        }
    }

    /// Returns [`Lint::LockoutByHeader`], which layers without a [`Lockout`](crate::Lockout)
    /// ignore. Forwarding fields are written by proxies.
    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let is_chosen = head.is_none() && !self.reads_forwarding();
        is_chosen.then_some(Lint::LockoutByHeader).into_iter().collect()
    }

    fn reads_forwarding(&self) -> bool {
        FORWARDING.contains(&self.0)
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Header").field(&self.0).finish()
    }
}

/// Uses one key for all requests, [`Key::global`], to limit the whole service.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Global;

impl Global {
    /// Creates the extractor.
    pub const fn new() -> Self {
        Self
    }
}

impl KeyExtractor for Global {
    fn extract(&self, _: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::global()))
    }

    fn is_global(&self) -> bool {
        true
    }
}

/// Uses the path of the request as the key. `/users/7` and `/users/8` are different keys. The query
/// is not part of the key. The path is not decoded or normalized.
///
/// This is the path of [`Head::uri`]. With the feature `axum`, it is the path that the client sent,
/// also in nested routers. To use the route as the key instead, such as `/users/{id}`, use
/// `MatchedPath` (feature `axum`).
///
/// Each path has a quota of its own, which all clients share. A client can request many paths, and
/// so spend many quotas. Add the layer only to routes without parameters, or limit the clients by
/// another layer as well.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Path;

impl Path {
    /// Creates the extractor.
    pub const fn new() -> Self {
        Self
    }
}

impl KeyExtractor for Path {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.uri().path())))
    }
}

/// Uses the HTTP method of the request as the key. GET and POST are different keys.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Method;

impl Method {
    /// Creates the extractor.
    pub const fn new() -> Self {
        Self
    }
}

impl KeyExtractor for Method {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.method.as_str())))
    }
}

/// Uses the matched axum route as the key, as it is written in the router (feature `axum`).
/// `/users/{id}` is one key for all users.
///
/// Add the layer to the router after the routes, with `Router::layer` or `Router::route_layer`. A
/// layer around the whole router does not see the route, because axum has not matched it yet.
/// Requests without a matched route share one key, [`Key::global`].
#[cfg(feature = "axum")]
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct MatchedPath;

#[cfg(feature = "axum")]
impl MatchedPath {
    /// Creates the extractor.
    pub const fn new() -> Self {
        Self
    }
}

#[cfg(feature = "axum")]
impl KeyExtractor for MatchedPath {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let route = head.extensions.get::<axum::extract::MatchedPath>();
        Ok(Some(route.map_or_else(Key::global, |route| Key::from(route.as_str()))))
    }
}
