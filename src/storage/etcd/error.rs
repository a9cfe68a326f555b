//! The error statuses of etcd.

use std::error::Error;
use std::fmt;

use tonic::{Code, Status};

use crate::storage::{StorageError, StorageErrorKind};

/// The gRPC status of a call that was sent, as the source of its error. The member sent it, or the
/// client created it because the response could not be read.
#[derive(Debug)]
struct EtcdCause(Status);

/// Converts the status of a call that was sent.
pub(super) fn from_status(member: &str, status: Status) -> StorageError {
    let is_local = status.source().is_some();
    let (code, was_refused) = (status.code(), means_not_executed(&status));
    let cause = EtcdCause(status);
    match code {
        // Only a status that the client created has a source. The stream broke, or the response
        // cannot be decoded.
        _ if is_local => StorageError::connection_lost(member, cause),
        _ if was_refused => StorageError::refused(member, cause),
        Code::ResourceExhausted => StorageError::refused(member, cause).with_may_have_counted(true),
        Code::DeadlineExceeded => StorageError::timed_out(member).with_source(cause),
        _ => StorageError::unexpected_reply(member, cause),
    }
}

/// Returns `true` if the lease of a write does not exist. Nothing was written.
pub(super) fn is_lease_not_found(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.code() == Code::NotFound)
}

/// Returns `true` if the member requires a login or rejects the token. Nothing was executed.
pub(super) fn is_unauthenticated(error: &StorageError) -> bool {
    status(error).is_some_and(means_unauthenticated)
}

/// Returns `true` if authentication is disabled in etcd.
pub(super) fn is_auth_disabled(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.message().contains("authentication is not enabled"))
}

/// Returns `true` if the member has no leader. Nothing was executed. Other members may have one.
pub(super) fn has_no_leader(error: &StorageError) -> bool {
    status(error).is_some_and(means_no_leader)
}

/// Returns `true` if the member is temporarily unable to execute the call, for example because of
/// `leader changed` or `request timed out`. Another member may succeed.
pub(super) fn is_unavailable(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.code() == Code::Unavailable)
}

/// Returns `true` if the call was not sent.
pub(super) fn is_unsent(error: &StorageError) -> bool {
    let was_never_sent = error.is_timeout() && !error.may_have_counted();
    error.kind() == StorageErrorKind::Unreachable || was_never_sent
}

/// Returns the status in the member's response. The errors of an attempt to connect have none.
fn status(error: &StorageError) -> Option<&Status> {
    let source = error.source().filter(|_| error.kind() != StorageErrorKind::Unreachable)?;
    source.downcast_ref().map(|EtcdCause(status)| status)
}

/// Returns `true` for statuses that a member returns before it executes a call.
///
/// After `request timed out` or `database space exceeded`, the call may have been executed: etcd can
/// execute the write that exceeds the space, and report the error nevertheless.
fn means_not_executed(status: &Status) -> bool {
    match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::Unimplemented
        | Code::Unauthenticated => true,
        Code::ResourceExhausted => status.message().contains("too many requests"),
        _ => means_no_leader(status),
    }
}

fn means_no_leader(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message().contains("no leader")
}

fn means_unauthenticated(status: &Status) -> bool {
    let messages = ["user name is empty", "revision of auth store is old"];
    status.code() == Code::Unauthenticated || messages.iter().any(|text| status.message().contains(text))
}

impl fmt::Display for EtcdCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(status) = self;
        match status.source() {
            Some(source) => fmt::Display::fmt(source, f),
            None if means_unauthenticated(status) && means_not_executed(status) => {
                write!(f, "{} (write etcd://user:password@ in the URL)", status.message())
            }
            None if status.message().contains("space exceeded") => {
                write!(f, "{} (compact and defragment etcd, then run etcdctl alarm disarm)", status.message())
            }
            None => f.write_str(status.message()),
        }
    }
}

impl Error for EtcdCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // `Display` writes the message of the status's source, so the chain continues after that
        // source.
        self.0.source().and_then(Error::source)
    }
}
