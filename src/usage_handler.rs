//! The axum handler that returns the usage of a client.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::handler::Handler;
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Request, StatusCode};

use crate::client_usage::{Usage, UsageError};
use crate::extract::Head;
use crate::middleware::state::SharedState;
use crate::middleware::usage::usage;
use crate::rejection::TextRejection;
use crate::text::write_json_string;

/// An axum handler that responds with the usage of the request's client as JSON. Created by
/// [`RateLimitLayer::usage_handler`](crate::RateLimitLayer::usage_handler), which lists the
/// responses.
pub struct UsageHandler<R = TextRejection> {
    shared: Arc<SharedState<R>>,
}

impl<R> UsageHandler<R> {
    pub(crate) fn new(shared: Arc<SharedState<R>>) -> Self {
        Self { shared }
    }
}

// Otherwise the compiler lists this type in the error for any other handler.
#[diagnostic::do_not_recommend]
impl<R, S> Handler<(), S> for UsageHandler<R>
where
    R: Send + Sync + 'static,
{
    type Future = Pin<Box<dyn Future<Output = Response> + Send>>;

    fn call(self, request: Request<Body>, _: S) -> Self::Future {
        let usage = usage(&self.shared, &Head::of(&request));
        Box::pin(async move { response(usage.await) })
    }
}

fn response(usage: Result<Option<Usage>, UsageError>) -> Response {
    let (status, body) = match &usage {
        Ok(Some(usage)) => (StatusCode::OK, usage.to_json()),
        Ok(None) => (StatusCode::OK, r#"{"limited":false}"#.to_owned()),
        Err(UsageError::Key(error)) if error.is_clients_fault() => (error.status(), error_body(error.reason())),
        Err(UsageError::Key(error)) => (error.status(), error_body("internal server error")),
        Err(UsageError::Storage(_)) => (StatusCode::SERVICE_UNAVAILABLE, error_body("the usage is not available")),
    };
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    match usage {
        Err(UsageError::Key(error)) => {
            headers.extend(error.www_authenticate().map(|challenge| (WWW_AUTHENTICATE, challenge.clone())));
        }
        Err(UsageError::Storage(_)) => {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Ok(_) => {}
    }
    response
}

fn error_body(reason: &str) -> String {
    let mut json = r#"{"error":"#.to_owned();
    write_json_string(reason, &mut json).expect("writing to a string does not fail");
    json + "}"
}

impl<R> Clone for UsageHandler<R> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<R> fmt::Debug for UsageHandler<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsageHandler").field("storage", &self.shared.storage).finish_non_exhaustive()
    }
}
