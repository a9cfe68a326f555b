//! The errors of the compare-and-swap loop.

use crate::storage::text::UnknownVersion;
use crate::storage::{StorageError, StorageErrorKind};

/// Creates the error of a timeout of `store`. `sent` is `true` if a swap was sent, which the store
/// may have executed.
pub(super) fn late(store: &str, sent: bool) -> StorageError {
    let message = if sent {
        format!("{store} did not confirm a swap within the timeout: the call may have been executed")
    } else {
        format!("{store} did not return the state within the timeout")
    };
    StorageError::new(StorageErrorKind::Timeout, message).with_may_have_counted(sent)
}

pub(super) fn check_timed_out(store: &str) -> StorageError {
    StorageError::new(StorageErrorKind::Timeout, format!("{store} did not answer a check within the timeout"))
        .uncounted()
}

pub(super) fn contended() -> StorageError {
    let message = "other processes changed the key before every swap, nothing was cleared or settled; try again";
    StorageError::new(StorageErrorKind::Contended, message)
}

pub(super) fn too_long(bytes: usize, longest: usize) -> StorageError {
    let message = format!(
        "the state of the key has grown to {bytes} bytes, and the store keeps at most {longest}; use a different \
         name for each policy, implement Strategy::log_entries for strategies with a log, and use no moving window \
         for costs that are settled"
    );
    StorageError::new(StorageErrorKind::Unsupported, message)
}

pub(super) fn cancelled() -> StorageError {
    let message = "the background task ended without a decision: its runtime was shut down, or a strategy panicked";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

/// Creates the error of a decision on a text of another version of this crate.
pub(super) fn unknown_version(UnknownVersion(version): &UnknownVersion<'_>) -> StorageError {
    let message = format!(
        "the state of the key has the unknown format v{version}, which another version of this program wrote; upgrade \
         all processes, use another prefix for each version, or clear the key"
    );
    StorageError::new(StorageErrorKind::Unsupported, message)
}
