//! The axum extractor for decisions.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::Decision;

/// Extracts the decision of a layer with [`share_decision`](crate::RateLimitLayer::share_decision).
/// Use `Option<Decision>` if a request may have none: it is not limited, or the storage failed.
///
/// ```
/// use axum::Router;
/// use axum::routing::get;
/// use tower_ratelimit::{Decision, Global, Quota, RateLimitLayer};
///
/// let app: Router = Router::new()
///     .route("/", get(|decision: Decision| async move { format!("{} to go\n", decision.remaining()) }))
///     .layer(RateLimitLayer::new(Quota::per_minute(60), Global).share_decision());
/// ```
impl<S: Sync> FromRequestParts<S> for Decision {
    type Rejection = NoDecision;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoDecision> {
        parts.extensions.get().cloned().ok_or(NoDecision)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Decision {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The rejection of the extractor [`Decision`]: the request has no decision. Responds with 500. The
/// response body does not contain the cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoDecision;

impl fmt::Display for NoDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the request has no rate limit decision: call share_decision() on the layer, \
             or extract Option<Decision> if requests may be unlimited",
        )
    }
}

impl std::error::Error for NoDecision {}

impl IntoResponse for NoDecision {
    fn into_response(self) -> Response {
        let mut response = (StatusCode::INTERNAL_SERVER_ERROR, "internal server error\n").into_response();
        response.extensions_mut().insert(self);
        response
    }
}
