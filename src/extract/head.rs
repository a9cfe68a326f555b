use http::{Extensions, HeaderMap, Method, Request, Uri, Version};

/// A request without its body, borrowed: what extractors, policies and rejections look at.
///
/// ```
/// use tower_ratelimit::extract::Head;
///
/// let request = http::Request::get("/login").body("..").unwrap();
/// assert_eq!(Head::of(&request).uri.path(), "/login");
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target, as the client wrote it.
    pub uri: &'a Uri,
    /// The version of HTTP.
    pub version: Version,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// What the server and outer layers have attached.
    pub extensions: &'a Extensions,
}

impl<'a> Head<'a> {
    /// The head of a request.
    pub fn of<B>(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            uri: request.uri(),
            version: request.version(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }
}
