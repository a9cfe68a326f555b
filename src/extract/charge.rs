//! The axum extractor for charges.

use std::convert::Infallible;
use std::fmt;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use crate::Charge;

/// Extracts the charge of the innermost layer with
/// [`settle_later`](crate::RateLimitLayer::settle_later). Use `Option<Charge>` if a request may
/// have none: it is not limited, or the storage failed.
impl<S: Sync> FromRequestParts<S> for Charge {
    type Rejection = NoCharge;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoCharge> {
        parts.extensions.get().cloned().ok_or(NoCharge)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Charge {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The rejection of the extractor [`Charge`]: the request has no charge. Responds with 500. The
/// response body does not contain the cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoCharge;

impl fmt::Display for NoCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the request has no charge to settle: call settle_later() on the layer, \
             or extract Option<Charge> if requests may be unlimited",
        )
    }
}

impl std::error::Error for NoCharge {}

impl IntoResponse for NoCharge {
    fn into_response(self) -> Response {
        let mut response = (StatusCode::INTERNAL_SERVER_ERROR, "internal server error\n").into_response();
        response.extensions_mut().insert(self);
        response
    }
}
