mod details;

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use self::details::{DETAILS, StatusDetails};
use super::{RejectReason, Rejection};
use crate::extract::Head;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The ASCII bytes that are encoded in a message. All bytes above ASCII are encoded, too.
const NOT_IN_MESSAGES: &AsciiSet = &CONTROLS.add(b'%');

/// Responds with a gRPC status and no body. Use it with tonic and other gRPC servers.
///
/// The response is `Trailers-Only` as defined by the [protocol]: the HTTP status is 200, and the
/// gRPC status is in the header fields. `Retry-After` and `X-RateLimit-*` are written as for other
/// rejections. A client reads them from the metadata of the status.
///
/// [protocol]: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
///
/// | reason | `grpc-status` |
/// |---|---|
/// | limit exceeded | 8, `RESOURCE_EXHAUSTED`, or 14 if the status is 503 |
/// | storage failed | 14, `UNAVAILABLE` |
/// | key or cost missing, status 400 | 3, `INVALID_ARGUMENT` |
/// | key or cost missing, status 401 | 16, `UNAUTHENTICATED` |
/// | key or cost missing, status 500 | 13, `INTERNAL` |
///
/// `grpc-message` contains the text of [`TextRejection`](crate::TextRejection).
///
/// `grpc-retry-pushback-ms` controls clients with a retry policy (gRFC A6), which sleep for this
/// time. It is the time until the request would be admitted, in milliseconds, rounded up. It is
/// 1000 if the storage failed. It is -1 (never retry) if the cost exceeds the capacity, or if the
/// time is longer than [`max_pushback`](Self::max_pushback). If the key or the cost is missing,
/// this field and `grpc-status-details-bin` are omitted.
///
/// `grpc-status-details-bin` contains a `google.rpc.Status` with the same status and message. Its
/// details are:
///
/// | detail | if | contains |
/// |---|---|---|
/// | `google.rpc.RetryInfo` | a retry can succeed | the time until the request would be admitted as `retry_delay`, also if the pushback is -1 |
/// | `google.rpc.QuotaFailure` | a limit is exceeded | a violation for each limit that refuses |
///
/// The `subject` of a violation is the [name of the limit](crate::Policy::limit_name), and its
/// `description` is the limit as text, for example `fixed-window 10/minute`. The details never
/// contain the client's key. With tonic, `StatusExt::get_details_retry_info` of the crate
/// `tonic-types` reads the delay.
///
/// ```
/// # #[cfg(feature = "tonic")]
/// # fn server() {
/// use tonic::transport::Server;
/// use tower_ratelimit::{GrpcRejection, PeerIp, Quota, RateLimitLayer};
///
/// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).rejection(GrpcRejection::new());
/// let server = Server::builder().layer(limit);
/// # drop(server);
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct GrpcRejection {
    max_pushback: Duration,
}

/// The default of [`GrpcRejection::max_pushback`].
const MAX_PUSHBACK: Duration = Duration::from_secs(60);

impl GrpcRejection {
    /// Creates the rejection.
    pub const fn new() -> Self {
        Self { max_pushback: MAX_PUSHBACK }
    }

    /// Sets the longest `grpc-retry-pushback-ms`. Defaults to 60 seconds.
    ///
    /// If a refused request has to wait longer, the field is -1, and clients with a retry policy
    /// return the error immediately. Without this bound, they would sleep until the deadline of the
    /// call. The `RetryInfo` and `Retry-After` still contain the time, for clients that read them.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Global, GrpcRejection, Quota, RateLimitLayer};
    ///
    /// let rejection = GrpcRejection::new().max_pushback(Duration::from_secs(5));
    /// let layer = RateLimitLayer::new(Quota::per_second(100), Global::new()).rejection(rejection);
    /// # let _ = layer;
    /// ```
    #[must_use]
    pub const fn max_pushback(self, max_pushback: Duration) -> Self {
        Self { max_pushback }
    }
}

impl Default for GrpcRejection {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: Default> Rejection<B> for GrpcRejection {
    fn reject(&self, refused: RejectReason<'_>, _: &Head<'_>) -> Response<B> {
        let status: u64 = match refused {
            RejectReason::Limit(_) if refused.status() == StatusCode::SERVICE_UNAVAILABLE => 14,
            RejectReason::Limit(_) => 8,
            RejectReason::Storage => 14,
            RejectReason::Key(missing) if missing.status() == StatusCode::UNAUTHORIZED => 16,
            RejectReason::Key(missing) if missing.is_clients_fault() => 3,
            RejectReason::Key(_) => 13,
        };
        let message = refused.message("");
        let encoded = HeaderValue::try_from(utf8_percent_encode(&message, NOT_IN_MESSAGES).to_string());
        let encoded = encoded.expect("printable ASCII is a valid header value");
        let mut response = Response::new(B::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(STATUS, status.into());
        headers.insert(MESSAGE, encoded);
        let (wait, refusal) = match refused {
            RejectReason::Limit(refusal) => (refusal.retry_after().map(millis_up), Some(refusal)),
            RejectReason::Storage => (Some(1_000), None),
            RejectReason::Key(_) => return response,
        };
        let details = StatusDetails::new(status, &message, refusal);
        let fields = WaitFields { wait, max_pushback: self.max_pushback, details };
        fields.write(headers);
        response.extensions_mut().insert(fields);
        response
    }
}

/// The fields of a refusal that contain a wait. A response keeps them in its extensions, so that an
/// outer layer can raise the wait.
#[derive(Clone)]
struct WaitFields {
    /// In milliseconds. `None` if no retry can succeed.
    wait: Option<u64>,
    max_pushback: Duration,
    details: StatusDetails,
}

impl WaitFields {
    fn write(&self, headers: &mut HeaderMap) {
        headers.insert(PUSHBACK, pushback(self.wait, self.max_pushback));
        headers.insert(DETAILS, self.details.value(self.wait));
    }
}

/// Returns the pushback for a wait in milliseconds. -1 means never (gRFC A6).
fn pushback(wait: Option<u64>, max: Duration) -> HeaderValue {
    let bounded = wait.filter(|wait| Duration::from_millis(*wait) <= max);
    bounded.map_or(HeaderValue::from_static("-1"), HeaderValue::from)
}

/// Raises the wait in the pushback and in the `RetryInfo` of a refusal to at least this number of
/// seconds. Does nothing if the response has no wait, because no retry can succeed.
///
/// A pushback that [`GrpcRejection`] did not write has the default bound.
pub(crate) fn extend_wait<B>(response: &mut Response<B>, seconds: u32) {
    let extended = u64::from(seconds) * 1_000;
    let is_shorter = |wait: Option<u64>| wait.is_some_and(|wait| wait < extended);
    if let Some(mut fields) = response.extensions_mut().remove::<WaitFields>() {
        if is_shorter(fields.wait) {
            fields.wait = Some(extended);
            fields.write(response.headers_mut());
        }
        response.extensions_mut().insert(fields);
        return;
    }
    let written = response.headers().get(PUSHBACK).and_then(|value| value.to_str().ok()?.parse().ok());
    if is_shorter(written) {
        response.headers_mut().insert(PUSHBACK, pushback(Some(extended), MAX_PUSHBACK));
    }
}

/// Returns a wait in milliseconds, rounded up, so that a retry is never early.
fn millis_up(wait: Duration) -> u64 {
    u64::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}
