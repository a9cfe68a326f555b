//! Converts errors of the client.

use std::error::Error as _;

use tokio_postgres::Error;
use tokio_postgres::error::{Severity, SqlState};

use crate::storage::{StorageError, StorageErrorKind};

/// The name of a server whose address is unknown, for messages.
pub(super) const PRODUCT: &str = "PostgreSQL";

/// Converts the error of a statement on `server`.
///
/// A statement is a transaction. If the server reports an error, the statement has changed nothing.
/// If the connection was lost, the server may have committed it.
pub(super) fn of_statement(server: &str, error: Error) -> StorageError {
    if error.code().is_none() || is_fatal(&error) {
        return StorageError::connection_lost(server, PostgresCause(error));
    }
    if is_cancelled(&error) {
        let message = format!("{server} cancelled the statement at the timeout");
        return StorageError::new(StorageErrorKind::Timeout, message).uncounted().with_source(PostgresCause(error));
    }
    if is_missing_table(&error) {
        return missing_table(server).with_source(PostgresCause(error));
    }
    StorageError::refused(server, PostgresCause(error))
}

/// Converts the error of a login on `server`. The server has rejected it, or it needs a password.
/// Any other error has broken the connection.
pub(super) fn at_login(server: &str, error: Error) -> StorageError {
    if error.as_db_error().is_some() || needs_password(&error) {
        StorageError::cannot_log_in(server, PostgresCause(error))
    } else {
        StorageError::unreachable(server, PostgresCause(error))
    }
}

/// Converts the error of a new connection that looks for the table, or creates it.
pub(super) fn at_table(server: &str, error: Error) -> StorageError {
    if error.as_db_error().is_none() {
        return StorageError::unreachable(server, PostgresCause(error));
    }
    let message = format!("cannot find or create the table for the states on {server}");
    StorageError::new(StorageErrorKind::Unreachable, message).with_source(PostgresCause(error))
}

/// Creates the error of a table that does not exist.
pub(super) fn missing_table(server: &str) -> StorageError {
    let message = format!("{server} has no table for the states; call migrate(), or create it");
    StorageError::new(StorageErrorKind::Refused, message)
}

/// Returns `true` if the server requires a password, and the URL has none.
fn needs_password(error: &Error) -> bool {
    error.source().is_some_and(|source| source.to_string() == "password missing")
}

/// Returns `true` if the statement was cancelled, and has changed nothing.
pub(super) fn is_cancelled(error: &Error) -> bool {
    error.code() == Some(&SqlState::QUERY_CANCELED)
}

/// Returns `true` if a cancel request has cancelled the statement. Returns `false` if it was a timeout of
/// the server, or if the server's messages are in another language.
#[cfg(feature = "deadpool-postgres")]
pub(super) fn is_cancelled_by_request(error: &Error) -> bool {
    is_cancelled(error) && error.as_db_error().is_some_and(|error| error.message().ends_with("due to user request"))
}

/// Returns `true` if the statement was rolled back because of another transaction.
pub(super) fn is_serialization_failure(error: &Error) -> bool {
    let code = error.code();
    [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].iter().any(|other| code == Some(other))
}

/// Returns `true` if a new connection may succeed: it can reach the new primary after a failover,
/// or create a table that was dropped.
pub(super) fn needs_another_connection(error: &Error) -> bool {
    is_missing_table(error) || error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
}

/// Returns `true` if the table or its schema does not exist.
pub(super) fn is_missing_table(error: &Error) -> bool {
    [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME].iter().any(|other| error.code() == Some(other))
}

/// Returns `true` if the server has closed the connection.
fn is_fatal(error: &Error) -> bool {
    let severity = error.as_db_error().and_then(tokio_postgres::error::DbError::parsed_severity);
    matches!(severity, Some(Severity::Fatal | Severity::Panic))
}

/// An error whose message includes the server's reason. The message of `tokio_postgres` is only "db
/// error".
#[derive(Debug)]
pub(super) struct PostgresCause(pub(super) Error);

impl std::fmt::Display for PostgresCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.0.as_db_error(), self.0.source()) {
            (Some(error), _) => write!(f, "{} (SQLSTATE {})", error.message(), error.code().code()),
            _ if needs_password(&self.0) => {
                f.write_str("the server requires a password: write postgres://user:password@host/database in the URL")
            }
            (None, Some(source)) => write!(f, "{}: {source}", self.0),
            (None, None) => self.0.fmt(f),
        }
    }
}

impl std::error::Error for PostgresCause {}
