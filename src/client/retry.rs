//! The copies of requests that are sent again after a 429.

use http::Request;

/// Copies a request, to send it again after a refusal. Implemented for closures that return a copy, or
/// `None` if the request must not be sent again. See
/// [`ClientLimitLayer::retry_once`](crate::ClientLimitLayer::retry_once).
pub trait CopyRequest<B>: Clone + Send + Sync + 'static {
    /// Returns a copy of the request, or `None` if it must not be sent again.
    fn copy(&self, request: &Request<B>) -> Option<Request<B>>;
}

/// Sends no request again. The default of a [`ClientLimitLayer`](crate::ClientLimitLayer).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NoRetry;

impl<B> CopyRequest<B> for NoRetry {
    fn copy(&self, _: &Request<B>) -> Option<Request<B>> {
        None
    }
}

impl<F, B> CopyRequest<B> for F
where
    F: Fn(&Request<B>) -> Option<Request<B>> + Clone + Send + Sync + 'static,
{
    fn copy(&self, request: &Request<B>) -> Option<Request<B>> {
        self(request)
    }
}
