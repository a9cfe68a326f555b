//! The usage of a client: its limits and the units that remain.

use std::borrow::Cow;
use std::fmt::{self, Write};
#[cfg(feature = "lookup")]
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "lookup")]
use http::Request;

#[cfg(feature = "axum")]
pub use self::handler::UsageHandler;
use crate::decision::Decision;
use crate::error::BoxError;
#[cfg(feature = "lookup")]
use crate::extract::KeyExtractor;
use crate::extract::{Head, KeyError};
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{TenantLookup, TenantPolicy};
use crate::middleware::config::LayerConfig;
use crate::middleware::state::LayerState;
use crate::policy::{Op, Policy};
use crate::storage::{Storage, StorageRequest};
use crate::text::write_json_string;
use crate::time::Timestamp;

/// The limits of a client, and the remaining units of each limit. Returned by
/// [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Clone, Debug)]
pub struct Usage {
    policy: Policy,
    decision: Decision,
}

impl Usage {
    pub(crate) fn new(policy: Policy, decision: Decision) -> Self {
        Self { policy, decision }
    }

    /// Returns the policy that applies to the client.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the decision on a peek with a cost of 1, which contains the [status of each
    /// limit](Decision::limits).
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Returns the usage as JSON. The [guide](crate::guide::deploying#usage) explains the members.
    pub fn to_json(&self) -> String {
        to_json(&self.policy, &self.decision)
    }
}

/// The error of [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Debug)]
#[non_exhaustive]
pub enum UsageError {
    /// The key extractor or the lookup of the policy returned this error.
    Key(KeyError),
    /// The storage or the lookup of the policy failed.
    Storage(BoxError),
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key(_) => "the request has no rate limit key",
            Self::Storage(_) => "cannot read the usage",
        })
    }
}

impl std::error::Error for UsageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Key(error) => error,
            Self::Storage(error) => &**error,
        })
    }
}

fn to_json(policy: &Policy, decision: &Decision) -> String {
    let mut json = String::with_capacity(64 + 128 * policy.limits().len());
    write_json(policy, decision, &mut json).expect("writing to a string does not fail");
    json
}

fn write_json(policy: &Policy, decision: &Decision, json: &mut String) -> fmt::Result {
    write!(json, r#"{{"limited":true,"admitted":{}"#, decision.is_admitted())?;
    if let Some(wait) = decision.retry_after() {
        write!(json, r#","retry_after":{}"#, Seconds(wait))?;
    }
    json.push_str(r#","limits":["#);
    for (position, (limit, status)) in policy.limits().iter().zip(decision.limits()).enumerate() {
        let comma = if position == 0 { "" } else { "," };
        // `quoted_name` returns a Structured Field string: printable ASCII, in which only `"` and
        // `\` are escaped. So it is also a valid JSON string.
        write!(json, r#"{comma}{{"name":{},"strategy":"#, policy.quoted_name(position))?;
        write_json_string(limit.strategy().name(), json)?;
        write!(
            json,
            r#","quota":"{}","limit":{},"remaining":{},"reset":{}"#,
            limit.quota(),
            status.capacity(),
            status.remaining(),
            Seconds(status.reset_after())
        )?;
        if let Some(window) = limit.window(status, decision.at()) {
            write!(json, r#","begin":{},"end":{}"#, unix_time(window.start), unix_time(window.end))?;
        }
        json.push('}');
    }
    json.push_str("]}");
    Ok(())
}

fn unix_time(instant: Timestamp) -> Seconds {
    Seconds(Duration::from_micros(instant.as_micros()))
}

/// Seconds with up to six decimals.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_micros() {
            0 => write!(f, "{}", self.0.as_secs()),
            micros => f.write_str(format!("{}.{micros:06}", self.0.as_secs()).trim_end_matches('0')),
        }
    }
}

/// The policy and the key of a limited client.
type Limited = (Policy, Key);

/// Returns the usage of the request's client, or `None` if the client is not limited. Spends
/// nothing.
pub(crate) fn usage(
    state: &LayerState,
    head: &Head<'_>,
) -> impl Future<Output = Result<Option<Usage>, UsageError>> + Send + use<> {
    let storage = state.storage.clone();
    let limited = limited(&state.config, head);
    async move {
        let Some((policy, key)) = limited.await? else { return Ok(None) };
        let decided = storage.decide(StorageRequest::new(&policy, &key, Op::Peek, 1)).await;
        let decision = decided.map_err(|error| UsageError::Storage(error.into()))?;
        Ok(Some(Usage::new(policy, decision)))
    }
}

/// Returns the policy and the key of the request, or `None` if it is not limited.
fn limited(
    config: &LayerConfig,
    head: &Head<'_>,
) -> impl Future<Output = Result<Option<Limited>, UsageError>> + Send + use<> {
    let is_skipped = config.skips(head);
    #[cfg(feature = "lookup")]
    let looking_up = config.policies.lookup().filter(|_| !is_skipped).map(|lookup| {
        // The tenant's extensions are inserted into a copy, because the extractor may read them.
        looked_up(lookup.find(head), Arc::clone(&config.key), head.to_request())
    });
    let policy = if is_skipped { None } else { config.policies.of(head).map(Cow::into_owned) };
    let limited = policy.map(|policy| with_key(policy, config.key.extract(head)));
    async move {
        #[cfg(feature = "lookup")]
        if let Some(looking_up) = looking_up {
            return looking_up.await;
        }
        limited.unwrap_or(Ok(None))
    }
}

fn with_key(policy: Policy, key: Result<Option<Key>, KeyError>) -> Result<Option<Limited>, UsageError> {
    Ok(key.map_err(UsageError::Key)?.map(|key| (policy, key)))
}

/// Returns the policy and the key of a request after its lookup.
#[cfg(feature = "lookup")]
async fn looked_up(
    found: TenantLookup,
    extractor: Arc<dyn KeyExtractor>,
    mut request: Request<()>,
) -> Result<Option<Limited>, UsageError> {
    let found = match found {
        TenantLookup::Ready(found) => found,
        TenantLookup::Pending(lookup) => lookup.await,
    };
    let tenant = found.map_err(|error| UsageError::Storage(error.into()))?;
    request.extensions_mut().extend(tenant.extensions.clone());
    match &tenant.policy {
        TenantPolicy::Limited(policy, Some(key)) => Ok(Some((policy.read().into_owned(), key.clone()))),
        TenantPolicy::Limited(policy, None) => {
            with_key(policy.read().into_owned(), extractor.extract(&Head::of(&request)))
        }
        TenantPolicy::Unlimited => Ok(None),
        TenantPolicy::Rejected(error) => Err(UsageError::Key(error.clone())),
    }
}

/// The axum handler that returns the usage of a client.
#[cfg(feature = "axum")]
mod handler {
    use std::fmt;
    use std::pin::Pin;
    use std::sync::Arc;

    use axum::body::Body;
    use axum::handler::Handler;
    use axum::response::Response;
    use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
    use http::{Request, StatusCode};

    use crate::extract::Head;
    use crate::middleware::state::SharedState;
    use crate::rejection::TextRejection;
    use crate::text::write_json_string;
    use crate::usage::{Usage, UsageError, usage};

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
}
