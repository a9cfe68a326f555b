use http::{Extensions, HeaderMap, Method, Request, Uri, Version};

/// The head of a request, borrowed. The closures and traits of a layer receive it, such as a
/// [`KeyExtractor`](crate::KeyExtractor), [`policy_by`](crate::policy_by) and a
/// [`Rejection`](crate::Rejection).
///
/// ```
/// use tower_ratelimit::extract::Head;
///
/// let request = http::Request::get("/login").body("..").unwrap();
/// assert_eq!(Head::of(&request).uri().path(), "/login");
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The HTTP method.
    pub method: &'a Method,
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
    pub fn of<B>(request: &'a Request<B>) -> Self {
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
}
