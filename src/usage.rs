//! The usage of a client: its limits and the units that remain.

use std::fmt::{self, Write};
use std::time::Duration;

#[cfg(feature = "axum")]
pub use self::handler::UsageHandler;
use crate::decision::{Decision, shown_position};
use crate::error::BoxError;
use crate::extract::{Head, KeyError};
#[cfg(feature = "lookup")]
use crate::middleware::members::{AllTenants, look_up};
use crate::middleware::members::{Undecided, applying};
use crate::middleware::state::LayerState;
use crate::policy::Policy;
use crate::storage::Storage;
use crate::text::write_json_string;
use crate::time::Timestamp;

/// The limits of a client, and the remaining units of each limit. Returned by
/// [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Clone, Debug)]
pub struct Usage {
    policies: Vec<Policy>,
    /// A decision for each policy.
    decisions: Vec<Decision>,
}

impl Usage {
    /// Returns the policy that applies to the client. Of [several](crate::RateLimitLayer::and),
    /// this is the one that refuses with the longest [`retry_after`](Decision::retry_after), or
    /// else the one with the fewest remaining units.
    pub fn policy(&self) -> &Policy {
        &self.policies[shown_position(&self.decisions)]
    }

    /// Returns the decision on a peek at [`policy`](Self::policy) with a cost of 1, which contains
    /// the [status of each limit](Decision::statuses).
    pub fn decision(&self) -> &Decision {
        &self.decisions[shown_position(&self.decisions)]
    }

    /// Iterates over all policies that apply to the client, each with its decision.
    pub fn members(&self) -> impl Iterator<Item = (&Policy, &Decision)> {
        self.policies.iter().zip(&self.decisions)
    }

    /// Returns the usage as JSON, with the limits of all policies. Times are in seconds, with up to
    /// six decimals. The [guide](crate::guide::deploying#usage) explains the members.
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

fn to_json(usage: &Usage) -> String {
    let mut json = String::with_capacity(64 + 128 * usage.policies.len());
    usage.write_json(&mut json).expect("writing to a string does not fail");
    json
}

impl Usage {
    fn write_json(&self, json: &mut String) -> fmt::Result {
        let decision = self.decision();
        write!(json, r#"{{"limited":true,"admitted":{}"#, decision.is_admitted())?;
        if let Some(wait) = decision.retry_after() {
            write!(json, r#","retry_after":{}"#, Seconds(wait))?;
        }
        json.push_str(r#","limits":["#);
        let mut comma = "";
        for (policy, decision) in self.members() {
            for (position, (limit, status)) in policy.limits().iter().zip(decision.statuses()).enumerate() {
                // `quoted_name` returns a Structured Field string: printable ASCII, in which only `"`
                // and `\` are escaped. So it is also a valid JSON string.
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
                comma = ",";
            }
        }
        json.push_str("]}");
        Ok(())
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

/// Returns the usage of the request's client, or `None` if the client is not limited. Spends
/// nothing.
pub(crate) fn usage(
    state: &LayerState,
    head: &Head<'_>,
) -> impl Future<Output = Result<Option<Usage>, UsageError>> + Send + use<> {
    let (config, storage) = (state.config.clone(), state.storage.clone());
    let is_skipped = config.skips(head);
    // Extractors may read the extensions of tenants, which are inserted into this copy.
    let mut request = head.to_request();
    #[cfg(feature = "lookup")]
    let tenants = (!is_skipped).then(|| look_up(&config, head));
    async move {
        if is_skipped {
            return Ok(None);
        }
        #[cfg(feature = "lookup")]
        let found = match tenants {
            None => Vec::new(),
            Some(AllTenants::Ready(found)) => found,
            Some(AllTenants::Pending(lookups)) => lookups.await,
        };
        let (mut policies, mut decisions) = (Vec::new(), Vec::new());
        let applying = applying(
            &config,
            #[cfg(feature = "lookup")]
            &found,
            &mut request,
        );
        for member in applying? {
            let decided = storage.decide(member.peek()).await;
            decisions.push(decided.map_err(|error| UsageError::Storage(error.into()))?);
            policies.push(member.policy);
        }
        Ok(if policies.is_empty() { None } else { Some(Usage { policies, decisions }) })
    }
}

impl From<Undecided> for UsageError {
    fn from(undecided: Undecided) -> Self {
        match undecided {
            Undecided::Key(error, _) => Self::Key(error),
            #[cfg(feature = "lookup")]
            Undecided::Rejected(error) => Self::Key(error),
            #[cfg(feature = "lookup")]
            Undecided::Lookup(error) => Self::Storage(error.into()),
        }
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
            let usage = usage(&self.shared, &Head::from_request(&request));
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
