//! The error replies of Redis.

use std::error::Error;
use std::fmt;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::quote::without_arguments;
use crate::storage::{StorageError, StorageErrorKind};

/// An error of the `redis` crate, as the source of a [`StorageError`].
#[derive(Debug)]
struct RedisCause(RedisError);

/// The redirection in a reply of a cluster node. The node did not execute the command.
#[cfg(feature = "redis-cluster")]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect<'a> {
    /// The slot has moved to this address.
    Moved(&'a str),
    /// The slot is being migrated. The key is at this address already.
    Ask(&'a str),
    /// The slot is being migrated. The same node can execute the command later.
    TryAgain,
}

/// Converts an error of the `redis` crate. An error reply of `server` means that it refused the
/// command. Any other error means that the connection was lost after the command was sent.
pub(super) fn from_redis(server: &str, error: RedisError) -> StorageError {
    let cause = RedisCause(without_arguments(error));
    match cause.0.kind() {
        ErrorKind::Server(_) | ErrorKind::Extension => StorageError::refused(server, cause),
        _ => StorageError::connection_lost(server, cause),
    }
}

/// Creates the error of a script's reply that has the wrong type.
pub(super) fn unexpected_script_reply(reply: &redis::Value) -> StorageError {
    StorageError::unexpected_reply("the server", format!("the script returned {reply:?}"))
}

/// Returns `true` if the server has not cached the script. Then it has executed nothing.
pub(super) fn is_script_missing(error: &StorageError) -> bool {
    is_server_error(error, ServerErrorKind::NoScript)
}

/// Returns `true` if the user has no right to run the command.
pub(super) fn is_permission_denied(error: &StorageError) -> bool {
    is_server_error(error, ServerErrorKind::NoPerm)
}

/// Returns `true` if the server has become a replica, or requires another login. A new connection
/// can succeed.
pub(super) fn needs_new_connection(error: &StorageError) -> bool {
    let code = error_reply(error).and_then(RedisError::code);
    is_server_error(error, ServerErrorKind::ReadOnly) || matches!(code, Some("NOAUTH" | "WRONGPASS"))
}

/// Returns the redirection, if the error is one.
#[cfg(feature = "redis-cluster")]
pub(super) fn redirect(error: &StorageError) -> Option<Redirect<'_>> {
    let reply = error_reply(error)?;
    let target = reply.redirect_node().map(|(address, _)| address);
    match reply.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => target.map(Redirect::Moved),
        ErrorKind::Server(ServerErrorKind::Ask) => target.map(Redirect::Ask),
        ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Redirect::TryAgain),
        _ => None,
    }
}

/// Returns `true` if another node may hold the slot by now.
#[cfg(feature = "redis-cluster")]
pub(super) fn needs_new_slot_map(error: &StorageError) -> bool {
    let down = [ServerErrorKind::ClusterDown, ServerErrorKind::MasterDown];
    error.kind() != StorageErrorKind::Refused
        || down.into_iter().any(|kind| is_server_error(error, kind))
        || needs_new_connection(error)
}

fn is_server_error(error: &StorageError, kind: ServerErrorKind) -> bool {
    error_reply(error).is_some_and(|reply| reply.kind() == ErrorKind::Server(kind))
}

/// Returns the server's error reply to the command, or `None` if the error has another cause.
fn error_reply(error: &StorageError) -> Option<&RedisError> {
    let source = error.source().filter(|_| error.kind() == StorageErrorKind::Refused)?;
    source.downcast_ref().map(|RedisCause(reply)| reply)
}

impl fmt::Display for RedisCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(error) = self;
        match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => write!(f, "{code} {detail}")?,
            _ => error.fmt(f)?,
        }
        if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) {
            f.write_str(" (the server belongs to a cluster: write redis+cluster:// in the URL)")?;
        }
        Ok(())
    }
}

impl Error for RedisCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The message of a `RedisError` includes its source, so the chain continues after the
        // source.
        self.0.source().and_then(Error::source)
    }
}
