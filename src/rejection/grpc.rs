use http::Response;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};

use super::{Refused, Rejection};
use crate::extract::Head;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

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
/// | for the storage failed | 14, `UNAVAILABLE` |
/// | for the client left something out | 3, `INVALID_ARGUMENT` |
/// | for the server is set up wrong | 13, `INTERNAL` |
///
/// `grpc-message` says the same in words as [`TextRejection`](crate::TextRejection).
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
    fn reject(&self, refused: Refused<'_>, _: &Head<'_>) -> Response<B> {
        let status = match refused {
            Refused::Limit(_) => "8",
            Refused::Storage => "14",
            Refused::Missing(missing) if missing.is_clients_fault() => "3",
            Refused::Missing(_) => "13",
        };
        // To be percent-encoded, were there anything to encode: printable ASCII is as it is, but for the percent sign.
        let message = HeaderValue::try_from(refused.in_words("")).expect("printable ASCII can stand in a header");
        let mut response = Response::new(B::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(STATUS, HeaderValue::from_static(status));
        headers.insert(MESSAGE, message);
        response
    }
}
