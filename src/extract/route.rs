use super::{Head, KeyError, KeyExtractor};
use crate::key::Key;

/// Uses one key for all requests, [`Key::global`], to limit the whole service.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::global()))
    }
}

/// Uses the path of the request as the key. `/users/7` and `/users/8` are different keys. The query
/// is not part of the key.
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

impl KeyExtractor for Path {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        Ok(Some(Key::from(head.uri().path())))
    }
}

/// Uses the HTTP method of the request as the key. GET and POST are different keys.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct Method;

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
impl KeyExtractor for MatchedPath {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let route = head.extensions.get::<axum::extract::MatchedPath>();
        Ok(Some(route.map_or_else(Key::global, |route| Key::from(route.as_str()))))
    }
}
