use super::{Head, KeyError, KeyExtractor};
use crate::Key;

/// One key for all requests, [`Key::everybody`]. Limits the whole service.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::everybody()))
    }
}

/// The path of the request as the key, as the client sent it. `/users/7` and `/users/8` are
/// different keys.
///
/// Nested routers do not change this path, see [`Head::uri`]. To use the route instead, use
/// `MatchedPath` (feature `axum`).
///
/// A client that can request any path gets a new quota with each path. Combine this extractor with
/// another one by [`and`](KeyExtractor::and), or add the layer only to routes without parameters.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Path;

impl KeyExtractor for Path {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.uri().path())))
    }
}

/// The HTTP method of the request as the key. GET and POST are different keys.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Method;

impl KeyExtractor for Method {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.method.as_str())))
    }
}

/// The route that axum matched, as written in the router, as the key (feature `axum`).
/// `/users/{id}` is one key for all users.
///
/// Requests without a match share one key, [`Key::everybody`]. Add the layer inside of the router,
/// with `route_layer`, or with `layer` after the routes. Outside of the router the route is not
/// known yet.
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
