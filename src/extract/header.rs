use std::fmt;

use http::HeaderName;

use super::forwarded::FORWARDING;
use super::{Caveat, Head, KeyExtractor, Missing};
use crate::error::or_panic;
use crate::{ConfigError, Key};

/// The value of a header field: an API key, a tenant.
///
/// Without the field the key is missing (400). Of several fields of that name the first counts.
///
/// Limit by a header only what somebody has checked: a client that may send any value gets a new quota with each.
///
/// ```
/// use tower_ratelimit::extract::{Head, KeyExtractor};
/// use tower_ratelimit::{Header, Key};
///
/// let request = http::Request::get("/").header("X-Api-Key", "k-42").body(()).unwrap();
/// assert_eq!(Header::new("x-api-key").extract(&Head::of(&request)), Ok(Some(Key::from("k-42"))));
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
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing> {
        match head.headers.get(&self.0) {
            Some(value) => Ok(Some(Key::from(value.as_bytes()))),
            None => Err(Missing::client(format!("the header field {:?} is missing", self.0.as_str()))),
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
