//! Responses to refused requests.

mod bodies;
mod grpc;

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

use http::{Response, StatusCode};

pub use self::bodies::{ProblemRejection, TextRejection};
pub use self::grpc::GrpcRejection;
pub(crate) use self::grpc::extend_wait as extend_grpc_wait;
use crate::decision::Decision;
use crate::extract::{Head, KeyError};
use crate::policy::Policy;

/// The reason for the rejection of a request.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RejectReason<'a> {
    /// At least one limit of the policy refused the request, or the storage refused it because it
    /// was [full](crate::Decision::is_storage_full) or
    /// [contended](crate::Decision::is_contended).
    Limit(LimitExceeded<'a>),
    /// The storage or the lookup of the policy failed, and the layer uses
    /// [`OnError::Refuse`](crate::OnError::Refuse).
    Storage,
    /// The key extractor, the closure of [`cost`](crate::RateLimitLayer::cost) or the lookup of
    /// the policy returned this error.
    Key(&'a KeyError),
}

impl RejectReason<'_> {
    /// Returns the HTTP status for this reason: 429 for a limit, 503 for the storage, and
    /// [`KeyError::status`] for a missing key or cost. A [`Rejection`] sets this status in its
    /// response, unless its protocol needs another one, as [`GrpcRejection`] does.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limit(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Storage => StatusCode::SERVICE_UNAVAILABLE,
            Self::Key(missing) => missing.status(),
        }
    }
}

/// Builds the response to a refused request. `B` is the type of its body, which is that of the
/// inner service.
///
/// Implemented for
///
/// - [`TextRejection`], the default,
/// - [`EmptyRejection`], [`ProblemRejection`] and [`GrpcRejection`],
/// - closures that take a [`RejectReason`] and the request's [`&Head`](Head),
/// - `Arc` and `Box<dyn Rejection<B>>`.
///
/// The middleware then adds header fields and an extension to the response:
///
/// | reason | header fields | extension |
/// |---|---|---|
/// | [`Limit`](RejectReason::Limit) | those of [`Headers`](crate::Headers), `Retry-After` unless the cost exceeds the capacity, and `Cache-Control: no-store` unless the response has a `Cache-Control` | the [`Decision`](crate::Decision) |
/// | [`Storage`](RejectReason::Storage) | `Retry-After: 1` | |
/// | [`Key`](RejectReason::Key) | the `WWW-Authenticate` of the [`KeyError`], if it has one and the response has none | the [`KeyError`] |
///
/// To choose a rejection at run time, box it. The layer's type then is
/// `RateLimitLayer<Box<dyn Rejection<B>>>`:
///
/// ```
/// use axum::body::Body;
/// use tower_ratelimit::{Global, ProblemRejection, Quota, RateLimitLayer, Rejection, TextRejection};
///
/// type AnyRejection = Box<dyn Rejection<Body>>;
///
/// let wants_json = std::env::var("ERRORS").is_ok_and(|format| format == "json");
/// let rejection: AnyRejection = if wants_json { Box::new(ProblemRejection::new()) } else { Box::new(TextRejection::new()) };
/// let layer: RateLimitLayer<AnyRejection> =
///     RateLimitLayer::new(Quota::per_second(10), Global::new()).rejection(rejection);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot build a response with the body `{B}`",
    label = "this layer needs another rejection for this body type",
    note = "if a layer inside of this one changes the body (TraceLayer, CompressionLayer, CatchPanicLayer), put \
            `MapResponseBodyLayer::new(Body::new)` of tower-http (feature `map-response-body`) between the two, or add \
            each by a `Router::layer` of its own",
    note = "`TextRejection`, the default, needs `{B}: From<String>`",
    note = "`.rejection(ProblemRejection::new())` needs `{B}: From<String>` too",
    note = "`.rejection(EmptyRejection::new())` needs `{B}: Default`",
    note = "`.rejection(GrpcRejection::new())` needs `{B}: Default` and is for gRPC, tonic's servers for example",
    note = "`.rejection_by(|refused, head| ..)` builds any response"
)]
pub trait Rejection<B>: Send + Sync + 'static {
    /// Builds the response to a refused request. It has to set the status, in most cases to
    /// [`RejectReason::status`].
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B>;
}

/// Responds with [`RejectReason::status`] and an empty body.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct EmptyRejection;

impl EmptyRejection {
    /// Creates the rejection.
    pub const fn new() -> Self {
        Self
    }
}

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

/// Shares one rejection among several layers.
impl<B, R: Rejection<B> + ?Sized> Rejection<B> for Arc<R> {
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B> {
        (**self).reject(refused, head)
    }
}

/// Calls the boxed rejection, so that a program can choose one at run time.
impl<B: 'static> Rejection<B> for Box<dyn Rejection<B>> {
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B> {
        (**self).reject(refused, head)
    }
}

/// The refusal of a request: the decision, and the policy that refused. Contained in
/// [`RejectReason::Limit`](crate::RejectReason::Limit).
///
/// Dereferences to the [`Decision`].
///
/// ```
/// use http::Response;
/// use tower_ratelimit::{Global, Policy, RateLimitLayer, RejectReason};
///
/// let policy = "10/second; 1000/day".parse::<Policy>()?.with_name("free");
/// let layer = RateLimitLayer::new(policy, Global::new()).rejection_by(|refused, _| {
///     let text = match refused {
///         // "limit free-2 is exceeded, at most 1000"
///         RejectReason::Limit(refusal) => {
///             let names: Vec<_> = refusal.violated().collect();
///             format!("limit {} is exceeded, at most {}", names.join(", "), refusal.shown().capacity())
///         }
///         _ => "try again later".to_owned(),
///     };
///     let mut response = Response::new(text);
///     *response.status_mut() = refused.status();
///     response
/// });
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LimitExceeded<'a> {
    decision: &'a Decision,
    policy: &'a Policy,
}

impl<'a> LimitExceeded<'a> {
    pub(crate) fn new(decision: &'a Decision, policy: &'a Policy) -> Self {
        Self { decision, policy }
    }

    /// Returns the decision, which contains the status of each limit.
    pub fn decision(self) -> &'a Decision {
        self.decision
    }

    /// Returns the policy that refused.
    pub fn policy(self) -> &'a Policy {
        self.policy
    }

    /// Returns the names of the limits that refuse, in the order of the policy. See
    /// [`Policy::limit_name`].
    ///
    /// If the storage could not decide, because it was [full](Decision::is_storage_full) or
    /// [contended](Decision::is_contended), all limits refuse.
    pub fn violated(self) -> impl Iterator<Item = Cow<'a, str>> {
        self.refusing().map(move |position| self.policy.limit_name(position))
    }

    /// Returns the positions of the limits that refuse, in the order of the policy.
    pub(super) fn refusing(self) -> impl Iterator<Item = usize> {
        // A custom storage may return more statuses than the policy has limits.
        let statuses = self.policy.limits().iter().zip(self.decision.limits()).enumerate();
        statuses.filter(|(_, (_, status))| !status.is_admitted()).map(|(position, _)| position)
    }
}

impl Deref for LimitExceeded<'_> {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        self.decision
    }
}
