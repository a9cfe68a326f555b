//! Rejections with a text or a JSON problem as the body.

use std::fmt::{self, Write};

use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};

use super::{RejectReason, Rejection};
use crate::extract::Head;
use crate::text::write_json_string;
use crate::time::seconds_up;

/// Responds with [`RejectReason::status`] and a short English text. This is the default of
/// [`RateLimitLayer::rejection`](crate::RateLimitLayer::rejection).
///
/// | reason | text |
/// |---|---|
/// | limit exceeded | `too many requests, retry in 5 s`, with the wait in whole seconds, rounded up, at least 1 |
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
                    let parts = ["too many requests, retry in ", seconds, " s", end];
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
/// | limit exceeded | 429 | `https://iana.org/assignments/http-problem-types#quota-exceeded` |
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
