//! Extractors for axum handlers, for the values that a layer inserts into a request.

use std::fmt;
#[cfg(feature = "tracing")]
use std::sync::Once;

use axum::response::{IntoResponse, Response};
use http::StatusCode;

use crate::decision::Decision;

/// Defines the rejection of a request without a value that a layer inserts.
macro_rules! rejection_without {
    ($(#[$doc:meta])* $rejection:ident: $message:literal) => {
        $(#[$doc])*
        ///
        /// The response is a 500, because this is a mistake in the setup of the server. The first
        /// one in a process is logged as an error (feature `tracing`). The body names the cause
        /// only in a build with debug assertions. The extensions of the response contain this
        /// value, whose text always names the cause.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $rejection;

        impl fmt::Display for $rejection {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($message)
            }
        }

        impl std::error::Error for $rejection {}

        impl IntoResponse for $rejection {
            fn into_response(self) -> Response {
                #[cfg(feature = "tracing")]
                {
                    static LOGGED: Once = Once::new();
                    LOGGED.call_once(|| tracing::error!("{}", $message));
                }
                // A release build does not reveal the mistake to clients.
                let body = if cfg!(debug_assertions) { $message } else { "internal server error" };
                let mut response = (StatusCode::INTERNAL_SERVER_ERROR, format!("{body}\n")).into_response();
                response.extensions_mut().insert(self);
                response
            }
        }
    };
}

rejection_without! {
    /// The rejection of the extractor [`Decision`]: the request has no decision (feature `axum`).
    NoDecision:
    "the request has no rate limit decision: call share_decision() on the layer, \
     or extract Option<Decision>, because a request has none if it is not limited or the storage failed"
}

rejection_without! {
    /// The rejection of the extractor [`Reservation`](crate::Reservation): the request has no
    /// reservation, or it was taken before (feature `axum`).
    NoReservation:
    "the request has no reservation to settle: call settle_later() on the layer, \
     take the reservation only once, \
     or extract Option<Reservation> if requests may be unlimited"
}

rejection_without! {
    /// The rejection of the extractor [`Meter`](crate::Meter): the request has no meter (feature
    /// `axum`).
    NoMeter:
    "the request has no meter: call meter() on the layer, \
     or extract Option<Meter> if requests may be unlimited"
}

rejection_without! {
    /// The rejection of the extractor [`Permit`](crate::Permit): the request has no permit (feature
    /// `axum`).
    NoPermit:
    "the request has no permit: add an InFlightLayer to the route, \
     or extract Option<Permit> if requests may be skipped"
}

/// Implements the extractors of a value that a layer inserts, and of an `Option` of it. `$take` is a
/// function that returns the value from the extensions, if there is one.
macro_rules! extract_inserted {
    ($(#[$doc:meta])* $value:ty, or $rejection:ident: $take:expr) => {
        $(#[$doc])*
        impl<S: Sync> ::axum::extract::FromRequestParts<S> for $value {
            type Rejection = $crate::extract::$rejection;

            async fn from_request_parts(
                parts: &mut ::http::request::Parts,
                _: &S,
            ) -> Result<Self, $crate::extract::$rejection> {
                let take: fn(&::http::Extensions) -> Option<Self> = $take;
                take(&parts.extensions).ok_or_else(Default::default)
            }
        }

        impl<S: Sync> ::axum::extract::OptionalFromRequestParts<S> for $value {
            type Rejection = ::std::convert::Infallible;

            async fn from_request_parts(
                parts: &mut ::http::request::Parts,
                _: &S,
            ) -> Result<Option<Self>, ::std::convert::Infallible> {
                let take: fn(&::http::Extensions) -> Option<Self> = $take;
                Ok(take(&parts.extensions))
            }
        }
    };
}

pub(crate) use extract_inserted;

extract_inserted! {
    /// Extracts the decision of the innermost layer with
    /// [`share_decision`](crate::RateLimitLayer::share_decision) (feature `axum`).
    ///
    /// Without a decision, the request is rejected with [`NoDecision`]. Extract an
    /// `Option<Decision>` if a request may have none, for example because it is not limited, or
    /// because the storage failed.
    ///
    /// ```
    /// use axum::Router;
    /// use axum::routing::get;
    /// use tower_ratelimit::{Decision, Global, Quota, RateLimitLayer};
    ///
    /// let app: Router = Router::new()
    ///     .route("/", get(|decision: Option<Decision>| async move {
    ///         decision.map_or("no limit\n".to_owned(), |decision| format!("{} to go\n", decision.remaining()))
    ///     }))
    ///     .layer(RateLimitLayer::new(Quota::per_minute(60), Global::new()).share_decision());
    /// ```
    Decision, or NoDecision: |extensions| extensions.get().cloned()
}
