use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};

use super::{RejectReason, Rejection};
use crate::extract::Head;
use crate::time::seconds_up;

/// A short text in English, the default of a layer.
///
/// A missing key or cost is answered with its reason if the client can do something about it. A
/// server's mistake is answered with its reason in builds with debug assertions, and with "internal
/// server error" in others.
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
    /// The message to the client, followed by `end`.
    pub(super) fn message(&self, end: &str) -> String {
        let text = match self {
            Self::Limit(refusal) => match refusal.retry_after() {
                Some(wait) => {
                    let mut digits = itoa::Buffer::new();
                    let seconds = digits.format(seconds_up(wait).max(1));
                    return ["too many requests, retry in ", seconds, " s", end].concat();
                }
                None => "too many requests: this one is larger than the limit",
            },
            Self::Storage => "temporarily unavailable, retry in 1 s",
            // Developers see the reason of their mistake. Clients of a release do not.
            Self::Key(missing) if missing.is_clients_fault() || cfg!(debug_assertions) => missing.reason(),
            Self::Key(_) => "internal server error",
        };
        [text, end].concat()
    }
}
