//! The route `/try`, which is limited by the policy in its query.

use axum::Router;
use axum::body::Body;
use axum::extract::Query;
use axum::http::{Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use serde::Deserialize;
use serde_json::json;
use tower_ratelimit::{Headers, PeerIp, Policy, RateLimitLayer, RejectReason, policy_by};

#[derive(Deserialize)]
struct Trial {
    policy: String,
}

pub(crate) fn route() -> Router {
    // An invalid policy limits nothing, and the handler reports the error.
    let policy = policy_by(|head| {
        Query::<Trial>::try_from_uri(head.uri()).ok().and_then(|trial| trial.policy.parse::<Policy>().ok())
    });
    let limit = RateLimitLayer::new(policy, PeerIp::new())
        .headers(Headers::x_rate_limit().and(Headers::draft11()))
        .rejection_by(|refused, _| refusal(refused));
    let own = super::limits::of_trials().rejection_by(|refused, _| refusal(refused));
    Router::new().route("/try", get(admitted)).layer(limit).layer(own)
}

async fn admitted(Query(trial): Query<Trial>) -> Response<Body> {
    match trial.policy.parse::<Policy>() {
        Ok(_) => axum::Json(json!({ "verdict": "admitted" })).into_response(),
        Err(error) => {
            (StatusCode::UNPROCESSABLE_ENTITY, axum::Json(json!({ "error": error.to_string() }))).into_response()
        }
    }
}

/// Responds with the exact time for the countdown, because `Retry-After` is in whole seconds,
/// rounded up.
fn refusal(refused: RejectReason<'_>) -> Response<Body> {
    let wait = match refused {
        RejectReason::Limit(limit) => limit.decision().retry_after(),
        _ => None,
    };
    let wait = wait.and_then(|wait| u64::try_from(wait.as_micros()).ok());
    let body = json!({ "verdict": "refused", "retry_after_us": wait }).to_string();
    let response = Response::builder().status(refused.status()).header(header::CONTENT_TYPE, "application/json");
    response.body(body.into()).expect("the header is valid")
}
