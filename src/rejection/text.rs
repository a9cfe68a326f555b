use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};

use super::{Refused, Rejection};
use crate::extract::Head;
use crate::time::seconds_up;

/// A short text in English, the default of a layer.
///
/// A missing key or cost is answered with its reason if the client can do something about it. The
/// reason of a server's mistake is told only by a build with debug assertions, which has it in the log
/// too; a release says "internal server error".
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct TextRejection;

#[diagnostic::do_not_recommend]
impl<B: From<String>> Rejection<B> for TextRejection {
    fn reject(&self, refused: Refused<'_>, _: &Head<'_>) -> Response<B> {
        let mut response = Response::new(refused.message("\n").into());
        *response.status_mut() = refused.status();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    }
}

impl Refused<'_> {
    /// What people are told, and then `end`.
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
            // Whoever develops the server is told what is wrong with it; clients of a release are not.
            Self::Missing(missing) if missing.is_clients_fault() || cfg!(debug_assertions) => missing.reason(),
            Self::Missing(_) => "internal server error",
        };
        [text, end].concat()
    }
}
