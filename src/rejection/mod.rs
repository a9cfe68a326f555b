//! From a refusal to a response.

mod grpc;
mod limit_exceeded;
mod problem;
mod text;

use std::sync::Arc;

use http::{Response, StatusCode};

pub use self::grpc::GrpcRejection;
pub(crate) use self::grpc::PUSHBACK;
pub use self::limit_exceeded::LimitExceeded;
pub use self::problem::ProblemRejection;
pub use self::text::TextRejection;
use crate::extract::{Head, KeyError};

/// Why a request is not passed on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RejectReason<'a> {
    /// The policy refused.
    Limit(LimitExceeded<'a>),
    /// The storage failed, and [`OnError::Refuse`](crate::OnError::Refuse) was asked for.
    Storage,
    /// There is no key, or no cost.
    Key(&'a KeyError),
}

impl RejectReason<'_> {
    /// The status to answer with: 429 for a limit, 503 for a storage, and [`KeyError::status`] for a
    /// missing key or cost.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limit(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Storage => StatusCode::SERVICE_UNAVAILABLE,
            Self::Key(missing) => missing.status(),
        }
    }
}

/// Makes the response to a refused request, of the inner service's own body type.
///
/// Closures over [`RejectReason`] and the request's [`Head`] do. On whatever is made for a limit, the middleware then sets
/// `X-RateLimit-*` and `Retry-After`, and `Cache-Control: no-store` unless there is a `Cache-Control` already.
///
/// ```
/// use http::Response;
/// use tower_ratelimit::extract::Head;
/// use tower_ratelimit::{Global, Quota, RateLimitLayer, RejectReason};
///
/// let layer = RateLimitLayer::new(Quota::per_second(10), Global).rejection(|refused: RejectReason<'_>, head: &Head<'_>| {
///     let mut response = Response::new(format!("not now: {}", head.uri().path()));
///     *response.status_mut() = refused.status();
///     response
/// });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot make a response with the body `{B}`",
    label = "the refusal of this layer needs another way to make a response",
    note = "`TextRejection`, the default, needs `{B}: From<String>`",
    note = "`.rejection(ProblemRejection)` needs `{B}: From<String>` too",
    note = "`.rejection(EmptyRejection)` needs `{B}: Default`",
    note = "`.rejection(GrpcRejection)` needs `{B}: Default` and is for gRPC, tonic's servers for example",
    note = "`.rejection(|refused: Refused<'_>, head: &Head<'_>| ..)` makes any response",
    note = "if a layer inside of this one changes the body (TraceLayer, CompressionLayer, CatchPanicLayer), put \
            `MapResponseBodyLayer::new(Body::new)` of tower-http between the two",
    note = "let the compiler infer the types of a closure's arguments by `rejection_by(|refused, head| ..)`"
)]
pub trait Rejection<B>: Send + Sync + 'static {
    /// The response to a refused request.
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B>;
}

/// A status without a body.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct EmptyRejection;

impl<B: Default> Rejection<B> for EmptyRejection {
    fn reject(&self, refused: RejectReason<'_>, _: &Head<'_>) -> Response<B> {
        let mut response = Response::new(B::default());
        *response.status_mut() = refused.status();
        response
    }
}

impl<F, B> Rejection<B> for F
where
    F: Fn(RejectReason<'_>, &Head<'_>) -> Response<B> + Send + Sync + 'static,
{
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B> {
        self(refused, head)
    }
}

/// Lets the compiler infer the types of the arguments of a closure that is used as a [`Rejection`].
///
/// A closure that names the types, `|refused: RejectReason<'_>, head: &Head<'_>| ..`, needs no
/// `rejection_by`.
///
/// ```
/// use http::Response;
/// use tower_ratelimit::{Global, Quota, RateLimitLayer, rejection_by};
///
/// let layer = RateLimitLayer::new(Quota::per_second(10), Global).rejection(rejection_by(|refused, head| {
///     let mut response = Response::new(format!("not now: {}", head.uri().path()));
///     *response.status_mut() = refused.status();
///     response
/// }));
/// ```
pub fn rejection_by<F, B>(reject: F) -> F
where
    F: Fn(RejectReason<'_>, &Head<'_>) -> Response<B> + Send + Sync + 'static,
{
    reject
}

/// One for several layers.
impl<B, R: Rejection<B> + ?Sized> Rejection<B> for Arc<R> {
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B> {
        (**self).reject(refused, head)
    }
}

/// One chosen while the program runs.
impl<B: 'static> Rejection<B> for Box<dyn Rejection<B>> {
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B> {
        (**self).reject(refused, head)
    }
}
