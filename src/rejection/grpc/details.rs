//! The details of a refusal in `grpc-status-details-bin`: protobuf in base64.
//!
//! There are only three kinds of protobuf fields, so no crate is needed.
//!
//! A pushback beyond the bound is -1, because clients with a retry policy would sleep until the
//! deadline of the call. `RetryInfo` is the last field of the details, so an outer layer can extend
//! the wait without decoding.

use http::header::{HeaderName, HeaderValue};

use crate::rejection::LimitExceeded;

pub(super) const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";
const QUOTA_FAILURE: &str = "type.googleapis.com/google.rpc.QuotaFailure";

/// A `google.rpc.Status` without its `RetryInfo`, as protobuf.
///
/// The `RetryInfo` is the last field, so it can be written again when an outer layer raises the
/// wait.
#[derive(Clone, Debug)]
pub(super) struct StatusDetails(Message);

impl StatusDetails {
    /// Creates the status. If a limit refused, its details contain a `QuotaFailure` with one
    /// violation for each limit that refuses.
    pub(super) fn new(code: u64, message: &str, refusal: Option<LimitExceeded<'_>>) -> Self {
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
    pub(super) fn value(&self, wait_millis: Option<u64>) -> HeaderValue {
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
    pub(super) fn int(&mut self, field: u64, value: u64) -> &mut Self {
        if value != 0 {
            self.varint(field << 3 | VARINT);
            self.varint(value);
        }
        self
    }

    pub(super) fn text(&mut self, field: u64, text: &str) -> &mut Self {
        self.delimited(field, text.as_bytes())
    }

    pub(super) fn message(&mut self, field: u64, message: &Self) -> &mut Self {
        self.delimited(field, &message.0)
    }

    pub(super) fn bytes(&self) -> &[u8] {
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
