use std::fmt;

use http::HeaderName;

use super::forwarded::FORWARDING;
use super::{Head, KeyError, KeyExtractor};
use crate::error::{ConfigError, or_panic};
use crate::key::Key;

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
///     by_header.extract(&Head::of(&request)).unwrap()
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

    fn reads_forwarding(&self) -> bool {
        FORWARDING.contains(&self.0)
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Header").field(&self.0).finish()
    }
}
