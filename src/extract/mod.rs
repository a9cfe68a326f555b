//! Who is asking: from a request's head to a key.
//!
//! A [`KeyExtractor`] answers a key, that the request is not limited, or that the key is missing. Closures over the
//! [`Head`] are extractors too, and extractors combine with [`or`](KeyExtractor::or) and [`and`](KeyExtractor::and).

mod allow_list;
mod client_ip;
mod closure;
mod combine;
#[cfg(feature = "axum")]
mod decision;
mod extension;
mod forwarded;
mod head;
mod header;
mod ip;
mod networks;
mod peer;
mod route;

use std::fmt;
use std::sync::Arc;

use http::{HeaderValue, StatusCode};

use crate::Key;

pub use self::allow_list::{AddressSource, AllowList};
pub use self::client_ip::ClientIp;
pub use self::closure::{IntoKey, key_by};
pub use self::combine::{And, Or};
#[cfg(feature = "axum")]
pub use self::decision::NoDecision;
pub use self::extension::Extension;
pub(crate) use self::forwarded::FORWARDING;
pub use self::head::Head;
pub use self::header::Header;
pub use self::ip::PeerIp;
#[cfg(feature = "axum")]
pub use self::route::MatchedPath;
pub use self::route::{Global, Method, Path};

/// Takes the key out of a request.
///
/// ```
/// use tower_ratelimit::extract::{Extension, Head, KeyExtractor, KeyError};
/// use tower_ratelimit::{Global, Key, PeerIp};
///
/// /// What the authentication layer has inserted into the extensions.
/// #[derive(Clone)]
/// struct User {
///     id: u64,
/// }
///
/// // The user. A request without one is known by its address.
/// let by_client = Extension::by(|user: &User| Key::from(user.id)).or(PeerIp::new());
///
/// // Each client on each host for itself; a health check is not limited.
/// let by_client_and_host = by_client.and(|head: &Head<'_>| match head.uri().path() {
///     "/health" => Ok(None),
///     _ => match head.headers.get("host") {
///         Some(host) => Ok(Some(Key::from(host.as_bytes()))),
///         None => Err(KeyError::client("the request names no host")),
///     },
/// });
/// # let _ = by_client_and_host;
/// ```
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key; `None` when the request is not limited.
    ///
    /// # Errors
    ///
    /// The key is missing from a request that needs one. The middleware answers the request with
    /// [`KeyError::status`].
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError>;

    /// Returns possible mistakes in the extractor's configuration. The middleware reports each as a
    /// [`Lint`](crate::Lint), some of them only when a request shows that it matters.
    fn caveats(&self) -> Vec<Caveat> {
        Vec::new()
    }

    /// Returns mistakes in the extractor's configuration that this request shows. The middleware
    /// calls it for its first 1,024 requests.
    fn caveats_of(&self, head: &Head<'_>) -> Vec<Caveat> {
        let _ = head;
        Vec::new()
    }

    /// This key; `other`'s when this one is missing.
    ///
    /// Only the first thing that is there counts. Whoever can leave the first one out chooses by which key to be known,
    /// and gets two quotas.
    fn or<K: KeyExtractor>(self, other: K) -> Or<Self, K>
    where
        Self: Sized,
    {
        Or::new(self, other)
    }

    /// This key and `other`'s together, as one. Missing when any is, else not limited when any is.
    fn and<K: KeyExtractor>(self, other: K) -> And<Self, K>
    where
        Self: Sized,
    {
        And::new(self, other)
    }
}

impl<K: KeyExtractor + ?Sized> KeyExtractor for Arc<K> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        (**self).extract(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
    }

    fn caveats_of(&self, head: &Head<'_>) -> Vec<Caveat> {
        (**self).caveats_of(head)
    }
}

impl KeyExtractor for Box<dyn KeyExtractor> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        (**self).extract(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
    }

    fn caveats_of(&self, head: &Head<'_>) -> Vec<Caveat> {
        (**self).caveats_of(head)
    }
}

/// What may be wrong with how an extractor is set up: see [`Lint`](crate::Lint).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Caveat {
    /// It tells IPv6 clients apart by more than 64 bits.
    Ipv6PerAddress,
    /// It believes what a header says about the client, whoever sent it.
    TrustsEveryAddress,
    /// It goes by the peer's address: behind a proxy all are one.
    OnlyPeer,
    /// It reads what a proxy says about the client.
    ReadsForwarding,
    /// A trusted proxy did not send the field that is read.
    ForwardingFieldMissing {
        /// Another forwarding field that the request has.
        found: Option<&'static str>,
    },
}

/// Why a request has no key or no cost, and the status to answer with.
///
/// The reason is in the log (feature `tracing`) and in the response's extensions. The body of a 400 or
/// 401 contains it, so do not put secrets into it. The body of a 500 contains it only in builds with
/// debug assertions.
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
    /// The client left something out, or sent what cannot be read: status 400.
    pub fn client(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::BAD_REQUEST, reason)
    }

    /// The client has not said who it is: status 401.
    ///
    /// A response with this status needs the field `WWW-Authenticate` (RFC 9110, section 15.5.2).
    /// It is `Bearer` unless [`challenge`](Self::challenge) sets another.
    pub fn unauthorized(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::UNAUTHORIZED, reason).challenge(HeaderValue::from_static("Bearer"))
    }

    /// The server is set up wrong: status 500.
    pub fn server(reason: impl Into<String>) -> Self {
        Self::with_status(StatusCode::INTERNAL_SERVER_ERROR, reason)
    }

    fn with_status(status: StatusCode, reason: impl Into<String>) -> Self {
        Self { status, reason: reason.into().into(), challenge: None }
    }

    /// Sets the response's field `WWW-Authenticate`, for example `Basic realm="api"`.
    #[must_use]
    pub fn challenge(self, challenge: HeaderValue) -> Self {
        Self { challenge: Some(challenge), ..self }
    }

    /// The status to answer with: 400, 401 or 500.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Whether the client can do something about it.
    pub fn is_clients_fault(&self) -> bool {
        self.status.is_client_error()
    }

    /// What is missing.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The value of `WWW-Authenticate`.
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
