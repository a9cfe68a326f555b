//! Extraction of keys from requests.
//!
//! A [`KeyExtractor`] returns a key, `None` if the request is not limited, or an error if the key
//! is missing. A closure that takes the [`Head`] of a request is an extractor too.
//! [`or`](KeyExtractor::or) and [`and`](KeyExtractor::and) combine extractors.

mod allow_list;
mod client_ip;
mod forwarded;
#[cfg(feature = "axum")]
mod handler;
mod parts;
mod peer_ip;

use std::fmt;
use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderValue, Request, StatusCode, Uri, Version};

pub use self::allow_list::{AddressSource, AllowList};
pub use self::client_ip::ClientIp;
#[cfg(feature = "axum")]
pub(crate) use self::handler::extract_inserted;
#[cfg(feature = "axum")]
pub use self::handler::{NoDecision, NoMeter, NoPermit, NoReservation};
#[cfg(feature = "axum")]
pub use self::parts::MatchedPath;
pub use self::parts::{Extension, Global, Header, IntoKey, Method, Path, key_by};
pub use self::peer_ip::PeerIp;
use crate::key::Key;
use crate::lint::Lint;

/// The head of a request, borrowed. The closures and traits of a layer receive it, such as a
/// [`KeyExtractor`], [`policy_by`](crate::policy_by) and a
/// [`Rejection`](crate::Rejection).
///
/// ```
/// use tower_ratelimit::extract::Head;
///
/// let request = http::Request::get("/login").body("..").unwrap();
/// assert_eq!(Head::from_request(&request).uri().path(), "/login");
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The HTTP method.
    pub method: &'a http::Method,
    /// The HTTP version.
    pub version: Version,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// The extensions that the server and outer layers have inserted.
    pub extensions: &'a Extensions,
    uri: &'a Uri,
}

impl<'a> Head<'a> {
    /// Borrows the head of `request`.
    pub fn from_request<B>(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            version: request.version(),
            headers: request.headers(),
            extensions: request.extensions(),
            uri: request.uri(),
        }
    }

    /// Returns the request target as the client sent it.
    ///
    /// axum's [`nest`](https://docs.rs/axum/0.8/axum/struct.Router.html#method.nest) removes the
    /// prefix of a nested router from the request. With the feature `axum`, this method returns the
    /// whole target nevertheless, from the `OriginalUri` that axum's router inserts.
    ///
    /// Without the feature, or without an `OriginalUri`, this method returns the same target as
    /// [`routed_uri`](Self::routed_uri).
    pub fn uri(&self) -> &'a Uri {
        #[cfg(feature = "axum")]
        if let Some(axum::extract::OriginalUri(uri)) = self.extensions.get() {
            return uri;
        }
        self.uri
    }

    /// Returns the request target as the inner service gets it. A nested axum router has removed
    /// its prefix, and outer layers may have changed the target.
    pub fn routed_uri(&self) -> &'a Uri {
        self.uri
    }

    /// Copies the head into a request without a body.
    pub(crate) fn to_request(self) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = self.method.clone();
        *request.version_mut() = self.version;
        *request.headers_mut() = self.headers.clone();
        *request.extensions_mut() = self.extensions.clone();
        *request.uri_mut() = self.uri.clone();
        request
    }
}

/// Extracts a key from a request. Implemented by the types in this [module](self), and by closures
/// that take the [`Head`] and return a type of [`IntoKey`].
///
/// ```
/// use tower_ratelimit::extract::{Extension, Head, KeyExtractor, KeyError};
/// use tower_ratelimit::{Global, Key, PeerIp};
///
/// /// Inserted into the extensions by the authentication layer.
/// #[derive(Clone)]
/// struct User {
///     id: u64,
/// }
///
/// // The user, or the address if the request has no user.
/// let by_client = Extension::new(|user: &User| Key::from(user.id)).or(PeerIp::new());
///
/// // A quota for each client on each host. Health checks are not limited.
/// let by_client_and_host = by_client.and(|head: &Head<'_>| match head.uri().path() {
///     "/health" => Ok(None),
///     _ => match head.headers.get("host") {
///         Some(host) => Ok(Some(Key::from(host.as_bytes()))),
///         None => Err(KeyError::client("the request has no host")),
///     },
/// });
/// # let _ = by_client_and_host;
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key extractor",
    label = "expected an extractor such as `PeerIp::new()`, or `key_by(|head| Key::from(..))`",
    note = "write `?` after `ClientIp::behind(..)`, and `Key::from(..)` around an address or a text that a closure returns",
    note = "join two extractors by `a.and(b)`, or try one after the other by `a.or(b)`",
    note = "a key is not awaited: authenticate in an outer layer and read an `Extension`, or use `PolicyLookup`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the key, or `None` if the request is not limited.
    ///
    /// # Errors
    ///
    /// Returns an error if the request has no key but needs one. The middleware responds with
    /// [`KeyError::status`].
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError>;

    /// Returns probable mistakes in the extractor's configuration. Defaults to none.
    ///
    /// The middleware calls this method in two ways, and reports each lint once:
    ///
    /// - With `None`, when the layer is first applied to a service. The method returns the mistakes
    ///   that are visible without a request.
    /// - With the head of each of the first 1,024 requests that have a policy, a key and a cost.
    ///   The method returns the mistakes that this request reveals.
    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let _ = head;
        Vec::new()
    }

    /// Returns `true` if the extractor reads a forwarding field, such as `X-Forwarded-For`.
    /// Defaults to `false`.
    ///
    /// If it returns `true`, the middleware does not report [`Lint::ForwardedPeer`].
    fn reads_forwarding(&self) -> bool {
        false
    }

    /// Returns `true` if the key is always that of all clients, as for [`Global`]. Defaults to
    /// `false`.
    ///
    /// [`RateLimitLayer::within`](crate::RateLimitLayer::within) does not change such a key. It
    /// changes the key of a closure, even if the closure returns [`Key::global`].
    fn is_global(&self) -> bool {
        false
    }

    /// Falls back to `other` if this extractor returns an error.
    ///
    /// | result of this extractor | combined result |
    /// |---|---|
    /// | a key | this key |
    /// | `None` | `None`: the request is not limited |
    /// | an error | the result of `other`, which can be a key, `None` or an error |
    ///
    /// A client that can omit the first key from its requests can use both keys, and so has two
    /// quotas.
    fn or<K: KeyExtractor>(self, other: K) -> Or<Self, K>
    where
        Self: Sized,
    {
        Or { first: self, second: other }
    }

    /// Joins this key and the key of `other` with [`Key::join`].
    ///
    /// - If either extractor returns an error, the combined extractor returns this error. If both
    ///   do, it returns the error of the first one.
    /// - Otherwise, if either extractor returns `None`, the request is not limited.
    fn and<K: KeyExtractor>(self, other: K) -> And<Self, K>
    where
        Self: Sized,
    {
        And { first: self, second: other }
    }
}

/// An extractor that falls back to a second one if the first returns an error. Created by
/// [`KeyExtractor::or`].
///
/// If the first returns `None`, the request is not limited.
#[derive(Clone, Copy, Debug)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        self.first.extract(head).or_else(|_| self.second.extract(head))
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        [self.first.lints(head), self.second.lints(head)].concat()
    }

    fn reads_forwarding(&self) -> bool {
        self.first.reads_forwarding() || self.second.reads_forwarding()
    }
}

/// An extractor that joins the keys of two others. Created by [`KeyExtractor::and`].
///
/// If either of them returns an error, it returns this error, or the first one if both do.
/// Otherwise, if either of them returns `None`, the request is not limited.
#[derive(Clone, Copy, Debug)]
pub struct And<A, B> {
    first: A,
    second: B,
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for And<A, B> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let keys = (self.first.extract(head)?, self.second.extract(head)?);
        Ok(match keys {
            (Some(first), Some(second)) => Some(Key::join([&first, &second])),
            _ => None,
        })
    }

    /// Omits [`Lint::LockoutByHeader`] unless the client chooses both keys.
    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let parts = [self.first.lints(head), self.second.lints(head)];
        let is_chosen = parts.iter().all(|lints| lints.contains(&Lint::LockoutByHeader));
        let mut lints = parts.concat();
        lints.retain(|lint| is_chosen || *lint != Lint::LockoutByHeader);
        lints
    }

    fn reads_forwarding(&self) -> bool {
        self.first.reads_forwarding() || self.second.reads_forwarding()
    }
}

impl<K: KeyExtractor + ?Sized> KeyExtractor for Arc<K> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        (**self).extract(head)
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        (**self).lints(head)
    }

    fn reads_forwarding(&self) -> bool {
        (**self).reads_forwarding()
    }

    fn is_global(&self) -> bool {
        (**self).is_global()
    }
}

impl KeyExtractor for Box<dyn KeyExtractor> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        (**self).extract(head)
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        (**self).lints(head)
    }

    fn reads_forwarding(&self) -> bool {
        (**self).reads_forwarding()
    }

    fn is_global(&self) -> bool {
        (**self).is_global()
    }
}

/// The error for a request without a key or a cost. It contains the reason, and the status of the
/// response.
///
/// The middleware inserts the error into the extensions of the response, and logs the reason
/// (feature `tracing`). The built-in [`Rejection`](crate::Rejection)s that have a message write the
/// reason into it, so the reason must not contain secrets. For the status 500, they do so only in
/// builds with debug assertions.
///
/// ```
/// use tower_ratelimit::extract::{Head, KeyError};
/// use tower_ratelimit::{Key, Quota, RateLimitLayer};
///
/// let by_token = |head: &Head<'_>| match head.headers.get("authorization") {
///     Some(token) => Ok(Key::from(token.as_bytes())),
///     None => Err(KeyError::unauthorized("send a bearer token")),
/// };
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_token);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyError {
    status: StatusCode,
    reason: Arc<str>,
    challenge: Option<HeaderValue>,
}

impl KeyError {
    /// Creates an error for a missing or invalid part of the request. The status is 400.
    pub fn client(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::BAD_REQUEST, reason)
    }

    /// Creates an error for a client that did not authenticate. The status is 401.
    ///
    /// A response with this status requires the header field `WWW-Authenticate` (RFC 9110, section
    /// 15.5.2). The value of the field defaults to `Bearer`. [`challenge`](Self::challenge) sets
    /// another value.
    pub fn unauthorized(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::UNAUTHORIZED, reason).challenge(HeaderValue::from_static("Bearer"))
    }

    /// Creates an error for a mistake in the setup of the server, such as a missing layer. The
    /// status is 500.
    pub fn server(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::INTERNAL_SERVER_ERROR, reason)
    }

    fn with_status(status: StatusCode, reason: impl Into<String>) -> Self {
        Self { status, reason: reason.into().into(), challenge: None }
    }

    /// Sets the header field `WWW-Authenticate` of the response, for example to
    /// `Basic realm="api"`. If the [`Rejection`](crate::Rejection) writes this field itself, its
    /// value stays.
    ///
    /// Defaults to `Bearer` for [`unauthorized`](Self::unauthorized), and to no field otherwise.
    #[must_use]
    pub fn challenge(self, challenge: HeaderValue) -> Self {
        Self { challenge: Some(challenge), ..self }
    }

    /// Returns the status of the response: 400 for [`client`](Self::client), 401 for
    /// [`unauthorized`](Self::unauthorized), and 500 for [`server`](Self::server).
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns `true` if the client caused the error, which means that the status is 400 or 401.
    pub fn is_clients_fault(&self) -> bool {
        self.status.is_client_error()
    }

    /// Returns the reason that was passed to the constructor.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns the value of `WWW-Authenticate`.
    pub(crate) fn www_authenticate(&self) -> Option<&HeaderValue> {
        self.challenge.as_ref()
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for KeyError {}
