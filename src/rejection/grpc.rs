//! A refusal as a gRPC status. Its details in `grpc-status-details-bin` are protobuf in base64.
//!
//! There are only three kinds of protobuf fields, so no crate is needed.
//!
//! A pushback beyond the bound is -1, because clients with a retry policy would sleep until the
//! deadline of the call. `RetryInfo` is the last field of the details, so an outer layer can extend
//! the wait without decoding.

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::{LimitExceeded, RejectReason, Rejection};
use crate::extract::Head;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
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
/// 1000 if the storage failed. It is -1 (never retry) if the cost can never be admitted, or if the
/// time is longer than [`max_pushback`](Self::max_pushback). If the key or the cost is missing,
/// this field and `grpc-status-details-bin` are omitted.
///
/// `grpc-status-details-bin` contains a `google.rpc.Status` with the same status and message. Its
/// details are:
///
/// | detail | condition | content |
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

const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";
const QUOTA_FAILURE: &str = "type.googleapis.com/google.rpc.QuotaFailure";

/// A `google.rpc.Status` without its `RetryInfo`, as protobuf.
///
/// The `RetryInfo` is the last field, so it can be written again when an outer layer raises the
/// wait.
#[derive(Clone, Debug)]
struct StatusDetails(Message);

impl StatusDetails {
    /// Creates the status. If a limit refused, its details contain a `QuotaFailure` with one
    /// violation for each limit that refuses.
    fn new(code: u64, message: &str, refusal: Option<LimitExceeded<'_>>) -> Self {
        let mut status = Message::default();
        status.int(1, code).text(2, message);
        if let Some(refusal) = refusal {
            let mut failure = Message::default();
            for position in refusal.refusing() {
                let policy = refusal.policy();
                let mut violation = Message::default();
                violation.text(1, &policy.limit_name(position)).text(2, &policy.limits()[position].to_string());
                failure.message(1, &violation);
            }
            status.message(3, &any(QUOTA_FAILURE, &failure));
        }
        Self(status)
    }

    /// Returns the field value. `wait_millis` is the delay of the `RetryInfo`, or `None` to omit
    /// it.
    fn value(&self, wait_millis: Option<u64>) -> HeaderValue {
        let mut status = self.0.clone();
        if let Some(millis) = wait_millis {
            let (mut delay, mut info) = (Message::default(), Message::default());
            // `google.protobuf.Duration`: seconds and nanoseconds.
            delay.int(1, millis / 1_000).int(2, millis % 1_000 * 1_000_000);
            info.message(1, &delay);
            status.message(3, &any(RETRY_INFO, &info));
        }
        HeaderValue::try_from(unpadded_base64(status.bytes())).expect("base64 is a valid header value")
    }
}

/// Returns a `google.protobuf.Any`.
fn any(type_url: &str, message: &Message) -> Message {
    let mut any = Message::default();
    any.text(1, type_url).message(2, message);
    any
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes `bytes` (RFC 4648, section 4) without padding.
fn unpadded_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| usize::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        // One byte needs two characters, two need three, and three need four.
        for character in 0..=group.len() {
            text.push(ALPHABET[bits >> (18 - 6 * character) & 0x3f].into());
        }
    }
    text
}

/// The bytes of a message. Fields are written in the order of the calls.
#[derive(Clone, Debug, Default)]
struct Message(Vec<u8>);

// The two wire types of protobuf that are used here.
const VARINT: u64 = 0;
const LENGTH_DELIMITED: u64 = 2;

impl Message {
    /// Writes an integer. Omits zero, which is the default in proto3.
    fn int(&mut self, field: u64, value: u64) -> &mut Self {
        if value != 0 {
            self.varint(field << 3 | VARINT);
            self.varint(value);
        }
        self
    }

    fn text(&mut self, field: u64, text: &str) -> &mut Self {
        self.delimited(field, text.as_bytes())
    }

    fn message(&mut self, field: u64, message: &Self) -> &mut Self {
        self.delimited(field, &message.0)
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn delimited(&mut self, field: u64, bytes: &[u8]) -> &mut Self {
        self.varint(field << 3 | LENGTH_DELIMITED);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    /// Writes seven bits per byte, lowest first. The highest bit of a byte marks that more follow.
    fn varint(&mut self, mut value: u64) {
        while let Some(rest @ 1..) = value.checked_shr(7) {
            self.0.push(low_bits(value) | 0x80);
            value = rest;
        }
        self.0.push(low_bits(value));
    }
}

fn low_bits(value: u64) -> u8 {
    (value & 0x7f).to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vectors of RFC 4648, section 10.
    #[test]
    fn vectors_of_the_rfc_are_encoded_without_padding() {
        let vectors = ["", "f", "fo", "foo", "foob", "fooba", "foobar"];
        let expected = ["", "Zg", "Zm8", "Zm9v", "Zm9vYg", "Zm9vYmE", "Zm9vYmFy"];
        assert_eq!(vectors.map(|vector| unpadded_base64(vector.as_bytes())), expected);
        assert_eq!(unpadded_base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    /// The examples of the protobuf encoding guide.
    #[test]
    fn fields_are_encoded_as_in_the_specification() {
        let (mut number, mut text, mut nested) = (Message::default(), Message::default(), Message::default());
        assert_eq!(number.int(1, 150).bytes(), [0x08, 0x96, 0x01]);
        assert_eq!(text.text(2, "testing").bytes(), b"\x12\x07testing");
        assert_eq!(nested.int(2, 0).message(3, &number).bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
    }

    #[test]
    fn largest_integer_takes_ten_bytes() {
        let mut message = Message::default();
        let expected = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(message.int(1, u64::MAX).bytes(), expected);
    }
}
