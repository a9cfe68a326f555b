//! The wait that a gRPC status asks for: `grpc-retry-pushback-ms` of gRFC A6, and
//! `google.rpc.RetryInfo` in the details of the status.

use std::time::Duration;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::HeaderMap;

const RESOURCE_EXHAUSTED: &[u8] = b"8";
const UNAVAILABLE: &[u8] = b"14";
/// Servers may omit the padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns `true` if the status of the call is that of a refusal. Only a response without messages
/// has its status in the header fields, as refusals do.
pub(super) fn is_refusal(headers: &HeaderMap) -> bool {
    let code = headers.get("grpc-status").map(http::HeaderValue::as_bytes);
    code.is_some_and(|code| [RESOURCE_EXHAUSTED, UNAVAILABLE].contains(&code))
}

/// Returns the pushback in milliseconds, or `None` if there is none or if it is negative, which means
/// that the call must not be retried.
pub(super) fn pushback(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}

/// Returns the delay of the `RetryInfo` in `grpc-status-details-bin`.
pub(super) fn retry_info(text: &str) -> Option<Duration> {
    let status = BASE64.decode(text).ok()?;
    let info = fields(&status).filter(|field| field.number == 3).find_map(|detail| {
        let of = |number| move |field: &Field<'_>| field.number == number;
        let mut name = fields(detail.bytes).filter(of(1));
        let is_retry_info = name.next()?.bytes.ends_with(b"/google.rpc.RetryInfo");
        fields(detail.bytes).find(of(2)).filter(|_| is_retry_info).map(|value| value.bytes)
    })?;
    let delay = fields(info).find(|field| field.number == 1)?.bytes;
    let int = |number| fields(delay).find(|field| field.number == number).map_or(0, |field| field.int);
    // A negative number is one of 64 bits here.
    let is_valid = int(1) <= i64::MAX.unsigned_abs() && int(2) < 1_000_000_000;
    is_valid.then(|| Duration::from_secs(int(1)).saturating_add(Duration::from_nanos(int(2))))
}

/// A field of a protobuf message. Fields of other types than integers and bytes are 0 and empty.
struct Field<'a> {
    number: u64,
    int: u64,
    bytes: &'a [u8],
}

/// Returns the fields of a message, up to the first one that cannot be read.
fn fields(mut rest: &[u8]) -> impl Iterator<Item = Field<'_>> {
    std::iter::from_fn(move || {
        let tag = varint(&mut rest)?;
        let (mut int, mut bytes) = (0, &b""[..]);
        match tag & 7 {
            0 => int = varint(&mut rest)?,
            1 => (_, rest) = rest.split_at_checked(8)?,
            2 => {
                let length = usize::try_from(varint(&mut rest)?).ok()?;
                (bytes, rest) = rest.split_at_checked(length)?;
            }
            5 => (_, rest) = rest.split_at_checked(4)?,
            _ => return None,
        }
        Some(Field { number: tag >> 3, int, bytes })
    })
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
