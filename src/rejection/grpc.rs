use std::fmt::Write;

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use super::{RejectReason, Rejection};
use crate::extract::Head;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
pub(crate) const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// A gRPC status without a body, for the servers of tonic and for any other that speaks gRPC.
///
/// It is what the [protocol] calls a response of trailers only: HTTP says 200, and the status is in the header fields.
/// `Retry-After` and `X-RateLimit-*` are there as on any refusal, and clients find them in the status's metadata.
///
/// [protocol]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
///
/// | refused | `grpc-status` |
/// |---|---|
/// | by a limit | 8, `RESOURCE_EXHAUSTED` |
/// | because the storage failed | 14, `UNAVAILABLE` |
/// | because the client left something out | 3, `INVALID_ARGUMENT` |
/// | because the client did not say who it is | 16, `UNAUTHENTICATED` |
/// | because the server is set up wrong | 13, `INTERNAL` |
///
/// `grpc-message` has the text of [`TextRejection`](crate::TextRejection).
///
/// `grpc-retry-pushback-ms` says when a client with a retry policy tries again (gRFC A6): after the
/// milliseconds until the request would be admitted, rounded up; after a second when the storage
/// failed; never (-1) when the cost does not fit the limit.
///
/// ```
/// # #[cfg(feature = "tonic")]
/// # fn server() {
/// use tonic::transport::Server;
/// use tower_ratelimit::{GrpcRejection, PeerIp, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).rejection(GrpcRejection);
/// let server = Server::builder().layer(limit);
/// # drop(server);
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "callers write its name as a value")]
pub struct GrpcRejection;

impl<B: Default> Rejection<B> for GrpcRejection {
    fn reject(&self, refused: RejectReason<'_>, _: &Head<'_>) -> Response<B> {
        let status = match refused {
            RejectReason::Limit(_) => "8",
            RejectReason::Storage => "14",
            RejectReason::Key(missing) if missing.status() == StatusCode::UNAUTHORIZED => "16",
            RejectReason::Key(missing) if missing.is_clients_fault() => "3",
            RejectReason::Key(_) => "13",
        };
        let message = HeaderValue::try_from(percent_encoded(&refused.message("")));
        let message = message.expect("printable ASCII is the value of a header field");
        let mut response = Response::new(B::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(STATUS, HeaderValue::from_static(status));
        headers.insert(MESSAGE, message);
        if let Some(pushback) = pushback(refused) {
            headers.insert(PUSHBACK, pushback);
        }
        response
    }
}

/// When a client may retry: milliseconds, or -1 for never (gRFC A6).
fn pushback(refused: RejectReason<'_>) -> Option<HeaderValue> {
    match refused {
        RejectReason::Limit(refusal) => Some(match refusal.retry_after() {
            Some(wait) => u64::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX).into(),
            None => HeaderValue::from_static("-1"),
        }),
        RejectReason::Storage => Some(HeaderValue::from_static("1000")),
        RejectReason::Key(_) => None,
    }
}

/// Encodes a message as gRPC wants it: bytes that are not printable ASCII, and the percent sign, as
/// `%` and two digits.
fn percent_encoded(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => write!(encoded, "%{byte:02X}").expect("writing to a string does not fail"),
        }
    }
    encoded
}
