//! Converts errors of SQLite.

use std::path::Path;

use rusqlite::{Error, ErrorCode};

use crate::storage::{StorageError, StorageErrorKind};

/// Returns `true` if another process has the lock. The transaction can be tried again.
pub(super) fn is_busy(error: &Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Returns `true` if the disk is full, or the database must not grow.
pub(super) fn is_full(error: &Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
}

/// Converts the error of a transaction that was rolled back. It has counted nothing.
pub(super) fn rolled_back(path: &Path, error: Error) -> StorageError {
    let kind = match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen | ErrorCode::NotADatabase) => StorageErrorKind::Unreachable,
        Some(
            ErrorCode::DiskFull
            | ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::AuthorizationForStatementDenied,
        ) => StorageErrorKind::Refused,
        _ => StorageErrorKind::Other,
    };
    let path = path.display();
    let message = match error.sqlite_error_code() {
        Some(ErrorCode::CannotOpen) => {
            format!("cannot open {path}: check that the directory exists and that the program may write to it")
        }
        Some(ErrorCode::NotADatabase) => {
            format!("cannot open {path}: move the file away, and the storage creates a new one")
        }
        Some(ErrorCode::DatabaseCorrupt) => {
            format!("cannot use {path}: move the file away, and the storage creates a new one")
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
            format!("cannot write to {path}: check the permissions of the file and of its directory")
        }
        Some(ErrorCode::DiskFull) => format!("cannot write to {path}: free some space"),
        _ => format!("cannot use {path}"),
    };
    StorageError::new(kind, message).with_may_have_counted(false).with_source(error)
}

/// Converts the error of a commit. The transaction may have been committed, unless the file was
/// locked or the disk was full.
pub(super) fn at_commit(path: &Path, error: Error) -> StorageError {
    let is_certain = is_busy(&error) || is_full(&error);
    rolled_back(path, error).with_may_have_counted(!is_certain)
}

/// Creates the error of a call that was not executed in time.
pub(super) fn late(path: &Path, begun: bool) -> StorageError {
    let path = path.display();
    let message = if begun {
        format!("{path} did not confirm a transaction within the timeout: the call may have been executed")
    } else {
        format!("no transaction on {path} within the timeout: another process may hold its lock")
    };
    StorageError::new(StorageErrorKind::Timeout, message).with_may_have_counted(begun)
}

/// Creates the error of a call that was not queued.
pub(super) fn overloaded(path: &Path, waiting: usize) -> StorageError {
    let message = format!("overloaded: {waiting} calls wait for {}, this call was not queued", path.display());
    StorageError::new(StorageErrorKind::Overloaded, message)
}

/// Creates the error of a call whose worker has ended.
pub(super) fn ended(path: &Path) -> StorageError {
    let message = format!("the thread of {} ended without an answer: a strategy panicked", path.display());
    StorageError::new(StorageErrorKind::Cancelled, message)
}
