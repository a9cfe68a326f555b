use super::{Head, KeyError, KeyExtractor};
use crate::Key;

/// One key for everybody, [`Key::everybody`]: bounds the whole service.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::everybody()))
    }
}

/// The path as the client wrote it: `/users/7` and `/users/8` are two keys.
///
/// Nested routers do not change it, see [`Head::uri`]. `MatchedPath` (feature `axum`) is the route instead.
///
/// A client that may ask for any path gets a new quota with each. Combine this extractor with another by
/// [`and`](KeyExtractor::and), or put the layer on routes without parameters.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Path;

impl KeyExtractor for Path {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.uri().path())))
    }
}

/// The method: GET and POST are two keys.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Method;

impl KeyExtractor for Method {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.method.as_str())))
    }
}

/// The route that axum matched, as it was written in the router: `/users/{id}` is one key (feature `axum`).
///
/// Requests without a match share one key, [`Key::everybody`]. The layer must be inside the router (`route_layer`, or `layer` after the
/// routes): around it nothing has been matched yet.
#[cfg(feature = "axum")]
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct MatchedPath;

#[cfg(feature = "axum")]
impl KeyExtractor for MatchedPath {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let route = head.extensions.get::<axum::extract::MatchedPath>();
        Ok(Some(route.map_or_else(Key::everybody, |route| Key::from(route.as_str()))))
    }
}
