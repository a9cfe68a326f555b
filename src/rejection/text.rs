use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};

use super::{RejectReason, Rejection};
use crate::extract::Head;
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
