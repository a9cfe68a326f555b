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
mod forwarded;
mod head;
mod header;
mod ip;
mod networks;
mod peer;
mod route;

use std::fmt;
use std::sync::Arc;

use crate::Key;

pub use self::allow_list::{AddressSource, AllowList};
pub use self::client_ip::ClientIp;
pub use self::closure::IntoKey;
pub use self::combine::{And, Or};
#[cfg(feature = "axum")]
pub use self::decision::NoDecision;
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
/// use tower_ratelimit::extract::{Head, KeyExtractor, Missing};
/// use tower_ratelimit::{Global, Header, Key, PeerIp};
///
/// // The API key; who has none is known by the address.
/// let by_client = Header::new("x-api-key").or(PeerIp::new());
///
/// // Each client on each host for itself; a health check is not limited.
/// let by_client_and_host = by_client.and(|head: &Head<'_>| match head.uri.path() {
///     "/health" => Ok(None),
///     _ => match head.headers.get("host") {
///         Some(host) => Ok(Some(Key::from(host.as_bytes()))),
///         None => Err(Missing::client("the request names no host")),
///     },
/// });
/// # let _ = by_client_and_host;
/// ```
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key; `None` when the request is not limited.
    ///
    /// # Errors
    ///
    /// When there is no key and there should be one: the middleware answers for the request, with 400 when the client
    /// left something out, with 500 when the server is set up wrong.
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing>;

    /// What may be wrong with how it is set up: whatever of it turns out to be so, the middleware warns of once.
    fn caveats(&self) -> Vec<Caveat> {
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
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing> {
        (**self).extract(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
    }
}

impl KeyExtractor for Box<dyn KeyExtractor> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing> {
        (**self).extract(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        (**self).caveats()
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
    /// So many clients that have exhausted the policy fill the storage. No extractor returns this.
    SmallStorage {
        /// The number of clients.
        clients: u64,
    },
}

/// Why there is no key, or no cost, and whose fault it is.
///
/// The reason goes to the log (feature `tracing`) and into the response's extensions, not to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    by_client: bool,
    reason: Arc<str>,
}

impl Missing {
    /// The client left something out, or sent what cannot be read: 400.
    pub fn client(reason: impl Into<String>) -> Self {
        Self { by_client: true, reason: reason.into().into() }
    }

    /// The server is set up wrong: 500.
    pub fn server(reason: impl Into<String>) -> Self {
        Self { by_client: false, reason: reason.into().into() }
    }

    /// Whether the client can do something about it.
    pub fn is_clients_fault(&self) -> bool {
        self.by_client
    }

    /// What is missing.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Missing {}
