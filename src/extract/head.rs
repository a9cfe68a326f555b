use http::{Extensions, HeaderMap, Method, Request, Uri, Version};

/// A borrowed request without its body: what extractors, policies and rejections look at.
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
    /// The method.
    pub method: &'a Method,
    /// The version of HTTP.
    pub version: Version,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// What the server and outer layers have attached.
    pub extensions: &'a Extensions,
    uri: &'a Uri,
}

impl<'a> Head<'a> {
    /// The head of a request.
    pub fn of<B>(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            version: request.version(),
            headers: request.headers(),
            extensions: request.extensions(),
            uri: request.uri(),
        }
    }

    /// The request's target as the client wrote it.
    ///
    /// Inside axum's [`nest`](https://docs.rs/axum/0.8/axum/struct.Router.html#method.nest) the
    /// request itself has lost the prefix of the nested router. With the feature `axum` this
    /// method still returns the whole target, from axum's `OriginalUri`.
    /// [`routed_uri`](Self::routed_uri) returns the rest.
    pub fn uri(&self) -> &'a Uri {
        #[cfg(feature = "axum")]
        if let Some(axum::extract::OriginalUri(uri)) = self.extensions.get() {
            return uri;
        }
        self.uri
    }

    /// The request's target as the service inside the layer gets it: axum's nested routers and
    /// other layers may have changed it.
    pub fn routed_uri(&self) -> &'a Uri {
        self.uri
    }
}
