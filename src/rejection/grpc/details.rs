//! The details of a refusal in `grpc-status-details-bin`.

use http::header::{HeaderName, HeaderValue};

use super::base64;
use super::protobuf::Message;
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
        HeaderValue::try_from(base64::unpadded(status.bytes())).expect("base64 is a valid header value")
    }
}

/// Returns a `google.protobuf.Any`.
fn any(type_url: &str, message: &Message) -> Message {
    let mut any = Message::default();
    any.text(1, type_url).message(2, message);
    any
}
