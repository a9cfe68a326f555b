//! Responses to refused requests.

mod grpc;

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};

pub use self::grpc::GrpcRejection;
pub(crate) use self::grpc::extend_wait as extend_grpc_wait;
use crate::decision::Decision;
use crate::extract::{Head, KeyError};
use crate::key::Key;
use crate::policy::Policy;
use crate::text::write_json_string;
use crate::time::seconds_up;

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
    /// [`KeyError::status`] for a missing key or cost. A limit of all
    /// [requests in flight](crate::InFlightLayer), whose key is [`Global`](crate::Global), has status
    /// 503, because the service is overloaded. The client has not exceeded a limit of its own. A
    /// [`Rejection`] sets this status in its response, unless its protocol needs another one, as
    /// [`GrpcRejection`] does.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limit(refusal) if refusal.is_overload => StatusCode::SERVICE_UNAVAILABLE,
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
/// | [`Limit`](RejectReason::Limit) | those of [`Headers`](crate::Headers), `Retry-After` unless the cost can never be admitted, and `Cache-Control: no-store` unless the response has a `Cache-Control` | the [`Decision`](crate::Decision) |
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
    /// Builds the response to a refused request. The implementation has to set the status, in most
    /// cases to [`RejectReason::status`].
    fn reject(&self, refused: RejectReason<'_>, head: &Head<'_>) -> Response<B>;
}

/// Responds with [`RejectReason::status`] and a short English text. This is the default of
/// [`RateLimitLayer::rejection`](crate::RateLimitLayer::rejection).
///
/// | reason | text |
/// |---|---|
/// | limit exceeded | `too many requests, retry in 5 s`, with the wait in whole seconds, rounded up, at least 1 |
/// | limit of an [`InFlightLayer`](crate::InFlightLayer) reached | `too many requests in flight, retry in 1 s` |
/// | cost exceeds the capacity | `too many requests: the cost of this request exceeds the limit` |
/// | storage failed | `temporarily unavailable, retry in 1 s` |
/// | [`KeyError`](crate::KeyError) with status 400 or 401 | its reason |
/// | [`KeyError`](crate::KeyError) with status 500 | its reason in builds with debug assertions, otherwise `internal server error` |
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct TextRejection;

impl TextRejection {
    /// Creates the rejection.
    pub const fn new() -> Self {
        Self
    }
}

#[diagnostic::do_not_recommend]
impl<B: From<String>> Rejection<B> for TextRejection {
    fn reject(&self, refused: RejectReason<'_>, _: &Head<'_>) -> Response<B> {
        let mut response = Response::new(refused.message("\n").into());
        *response.status_mut() = refused.status();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    }
}

impl RejectReason<'_> {
    /// Returns the message for the client, followed by `end`.
    pub(super) fn message(&self, end: &str) -> String {
        let text = match self {
            Self::Limit(refusal) => match refusal.retry_after() {
                Some(wait) => {
                    let mut digits = itoa::Buffer::new();
                    let seconds = digits.format(seconds_up(wait).max(1));
                    // With an exact capacity, the conversion into a body does not reallocate.
                    let what = if refusal.counts_in_flight {
                        "too many requests in flight, retry in "
                    } else {
                        "too many requests, retry in "
                    };
                    let parts = [what, seconds, " s", end];
                    let mut text = String::with_capacity(parts.iter().map(|part| part.len()).sum());
                    for part in parts {
                        text.push_str(part);
                    }
                    return text;
                }
                None => "too many requests: the cost of this request exceeds the limit",
            },
            Self::Storage => "temporarily unavailable, retry in 1 s",
            // Hides mistakes in the server's setup from the clients of a release build.
            Self::Key(missing) if missing.is_clients_fault() || cfg!(debug_assertions) => missing.reason(),
            Self::Key(_) => "internal server error",
        };
        [text, end].concat()
    }
}

/// Responds with a JSON problem, `application/problem+json` (RFC 9457).
///
/// | reason | status | `type` |
/// |---|---|---|
/// | limit exceeded | 429, or 503 as in [`RejectReason::status`] | `https://iana.org/assignments/http-problem-types#quota-exceeded` |
/// | storage failed | 503 | `about:blank` |
/// | key or cost missing | 400, 401 or 500 | `about:blank` |
///
/// Every problem has a `title`, a `status`, and a `detail` with the text of
/// [`TextRejection`](crate::TextRejection). If a limit is exceeded, `violated-policies` is a list
/// of the [names](crate::Policy::limit_name) of the limits that refuse
/// (draft-ietf-httpapi-ratelimit-headers, section 5).
///
/// ```
/// # use http::{Request, Response};
/// # use tower::{Layer, ServiceExt, service_fn};
/// use tower_ratelimit::{Global, Policy, ProblemRejection, RateLimitLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let hello = service_fn(|_: Request<()>| async { Ok::<_, std::convert::Infallible>(Response::new(String::new())) });
/// let free = "fixed-window 1/minute".parse::<Policy>()?.with_name("free");
/// let service = RateLimitLayer::new(free, Global::new()).rejection(ProblemRejection::new()).layer(hello);
///
/// service.clone().oneshot(Request::new(())).await?;
/// let refused = service.oneshot(Request::new(())).await?;
/// assert_eq!(refused.headers()["content-type"], "application/problem+json");
/// let problem: serde_json::Value = serde_json::from_str(refused.body())?;
/// assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
/// assert_eq!(problem["violated-policies"][0], "free");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct ProblemRejection;

impl ProblemRejection {
    /// Creates the rejection.
    pub const fn new() -> Self {
        Self
    }
}

impl<B: From<String>> Rejection<B> for ProblemRejection {
    fn reject(&self, refused: RejectReason<'_>, _: &Head<'_>) -> Response<B> {
        // Enough capacity for an exceeded limit with a few short names.
        let mut problem = String::with_capacity(320);
        write_problem(refused, &mut problem).expect("writing to a string does not fail");
        let mut response = Response::new(problem.into());
        *response.status_mut() = refused.status();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response
    }
}

fn write_problem(refused: RejectReason<'_>, json: &mut String) -> fmt::Result {
    let status = refused.status();
    let (kind, title) = match refused {
        RejectReason::Limit(_) => ("https://iana.org/assignments/http-problem-types#quota-exceeded", "Quota exceeded"),
        RejectReason::Storage | RejectReason::Key(_) => ("about:blank", status.canonical_reason().unwrap_or_default()),
    };
    write!(json, r#"{{"type":"{kind}","title":"{title}","status":{}"#, status.as_u16())?;
    json.push_str(r#","detail":"#);
    write_json_string(&refused.message(""), json)?;
    if let RejectReason::Limit(refusal) = refused {
        json.push_str(r#","violated-policies":["#);
        for (i, position) in refusal.refusing().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            // `quoted_name` returns a Structured Field string: printable ASCII, in which only `"`
            // and `\` are escaped. So it is also a valid JSON string.
            write!(json, "{comma}{}", refusal.policy().quoted_name(position))?;
        }
        json.push(']');
    }
    json.push('}');
    Ok(())
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
    pub(crate) counts_in_flight: bool,
    /// `true` if the requests in flight of all clients have reached the limit.
    is_overload: bool,
    retry_after: Option<Duration>,
}

impl<'a> LimitExceeded<'a> {
    pub(crate) fn new(decision: &'a Decision, policy: &'a Policy, key: &Key, retry_after: Option<Duration>) -> Self {
        let counts_in_flight = policy.counts_in_flight();
        Self { decision, policy, counts_in_flight, is_overload: counts_in_flight && key.is_global(), retry_after }
    }

    /// Returns the time after which the client should retry, or `None` if its request can never be
    /// admitted. This is the [`retry_after`](Decision::retry_after) of the decision, lengthened by
    /// [`Headers::retry_jitter`](crate::Headers::retry_jitter).
    pub fn retry_after(self) -> Option<Duration> {
        self.retry_after
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
        let statuses = self.policy.limits().iter().zip(self.decision.statuses()).enumerate();
        statuses.filter(|(_, (_, status))| !status.is_admitted()).map(|(position, _)| position)
    }
}

impl Deref for LimitExceeded<'_> {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        self.decision
    }
}
