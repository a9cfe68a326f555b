use std::fmt::Write;

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

use super::{RejectReason, Rejection};
use crate::extract::Head;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
pub(crate) const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// Responds with a gRPC status and no body. For tonic and other gRPC servers.
///
/// The response is `Trailers-Only` as defined by the [protocol]: the HTTP status is 200, and the
/// gRPC status is in the header fields. `Retry-After` and `X-RateLimit-*` are written as for other
/// rejections. Clients find them in the metadata of the status.
///
/// [protocol]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
///
/// | reason | `grpc-status` |
/// |---|---|
/// | limit exceeded | 8, `RESOURCE_EXHAUSTED` |
/// | storage failed | 14, `UNAVAILABLE` |
/// | key or cost missing from the request | 3, `INVALID_ARGUMENT` |
/// | client not authenticated | 16, `UNAUTHENTICATED` |
/// | server set up wrong | 13, `INTERNAL` |
///
/// `grpc-message` contains the text of [`TextRejection`](crate::TextRejection).
///
/// `grpc-retry-pushback-ms` controls clients with a retry policy (gRFC A6). It is the time until
/// the request would be admitted, in milliseconds, rounded up. It is 1000 if the storage failed,
/// and -1 (never retry) if the cost exceeds the capacity.
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
        let message = message.expect("printable ASCII is a valid header value");
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

/// Returns the pushback in milliseconds, or -1 for never (gRFC A6).
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

/// Percent-encodes a message for gRPC: the percent sign, and bytes that are not printable ASCII.
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
