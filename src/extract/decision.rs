//! The decision on a request, for axum's handlers.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::Decision;

/// The decision of a layer that [shares](crate::RateLimitLayer::share_decision) it. A request may have none, since it is not
/// limited, or its storage failed: take an `Option<Decision>` where that can be.
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

/// A handler asked for a [`Decision`] that no layer has shared: 500, with the cause only here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoDecision;

impl fmt::Display for NoDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the request has no decision of a rate limit: call share_decision() on the layer, \
             or take an Option<Decision> where requests may not be limited",
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
