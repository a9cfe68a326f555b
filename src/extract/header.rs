use std::fmt;

use http::HeaderName;

use super::forwarded::FORWARDING;
use super::{Caveat, Head, KeyError, KeyExtractor};
use crate::error::or_panic;
use crate::{ConfigError, Key};

/// The value of a header field, as it is: a field that something in front of this server has set or
/// checked, for example a tenant that a gateway writes.
///
/// Without the field the key is missing (400). Of several fields of that name the first counts.
///
/// # Unchecked fields
///
/// Use a header as the key only if something in front of you authenticates it. A client that may send
/// any value gets a new quota with each value, so such a limit stops nobody:
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
/// // One attacker with made-up API keys is 100,000 clients.
/// let clients: HashSet<_> = (0..100_000).map(key_of).collect();
/// assert_eq!(clients.len(), 100_000);
/// ```
///
/// For API keys, let an authentication layer look up the key and insert the user into the request's
/// extensions, and key by the user. Requests without a valid key are known by their address:
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
/// let by_user = Extension::by(|user: &User| Key::from(user.id)).or(PeerIp::new());
/// let layer = RateLimitLayer::new(Quota::per_minute(60), by_user);
/// ```
#[derive(Clone)]
pub struct Header(HeaderName);

impl Header {
    /// The field of this name, in any case.
    ///
    /// # Panics
    ///
    /// When the text cannot be the name of a field; [`try_new`](Self::try_new) returns an error instead, and a
    /// [`HeaderName`] can be turned into an extractor by `from`.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        or_panic(Self::try_new(name))
    }

    /// As [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// When the text cannot be the name of a field.
    pub fn try_new(name: &str) -> Result<Self, ConfigError> {
        field_name(name, "x-api-key").map(Self)
    }
}

impl From<HeaderName> for Header {
    fn from(name: HeaderName) -> Self {
        Self(name)
    }
}

/// The name of a field; `like` is one, for the error.
pub(super) fn field_name(name: &str, like: &str) -> Result<HeaderName, ConfigError> {
    name.parse().map_err(|_| {
        ConfigError::new(format!("{name:?} cannot be the name of a header field: write one like {like:?}"))
    })
}

impl KeyExtractor for Header {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        match head.headers.get(&self.0) {
            Some(value) => Ok(Some(Key::from(value.as_bytes()))),
            None => Err(KeyError::client(format!("the header field {:?} is missing", self.0.as_str()))),
        }
    }

    fn caveats(&self) -> Vec<Caveat> {
        FORWARDING.contains(&self.0).then_some(Caveat::ReadsForwarding).into_iter().collect()
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Header").field(&self.0).finish()
    }
}
