use std::error::Error;
use std::fmt;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::quote::without_arguments;
use crate::BoxError;
use crate::storage::net::{Kind, LinkError};

/// The error of a call to a Redis or Valkey server.
///
/// The message names the server, and never contains a password or a client's key.
/// [`source`](Error::source) returns the cause.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let unreachable = RedisStorage::new("redis://:secret@127.0.0.1:1")?;
/// let error = unreachable.ready(Duration::from_millis(50)).await.unwrap_err();
/// assert!(error.to_string().starts_with("cannot reach 127.0.0.1:1: "), "{error}");
/// assert!(!error.may_have_counted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStorageError(Arc<Inner>);

struct Inner {
    kind: Kind,
    server: Box<str>,
    source: Option<Source>,
    /// `false` for a command that cannot count a hit.
    counts: bool,
}

enum Source {
    Redis(RedisError),
    Other(BoxError),
}

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

impl RedisStorageError {
    /// Creates the error of a command that was not sent because `server` is unreachable.
    pub(super) fn unreachable(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, server, Some(Source::Other(source.into())))
    }

    /// Creates the error of a timeout. `sent` is `true` if the command was sent before.
    pub(super) fn timed_out(server: &str, sent: bool) -> Self {
        Self::new(Kind::Late { sent }, server, None)
    }

    /// Converts an error that the client returned after the command was sent: an error reply of
    /// `server`, or an I/O error.
    pub(super) fn from_redis(server: &str, error: RedisError) -> Self {
        let refused = matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
        Self::new(
            if refused { Kind::Refused } else { Kind::Lost },
            server,
            Some(Source::Redis(without_arguments(error))),
        )
    }

    /// Creates the error of a reply of the wrong type. `detail` describes the reply.
    pub(super) fn unexpected_reply(server: &str, detail: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unexpected, server, Some(Source::Other(detail.into())))
    }

    fn new(kind: Kind, server: &str, source: Option<Source>) -> Self {
        Self(Arc::new(Inner { kind, server: server.into(), source, counts: true }))
    }

    /// Creates the error of a call without a decision, although no server failed. `sent` is `true`
    /// if a command was sent and its outcome is unknown.
    pub(super) fn undecided(source: impl Into<BoxError>, sent: bool) -> Self {
        Self::new(Kind::Undecided { sent }, "", Some(Source::Other(source.into())))
    }

    /// Marks the error as one of a command that cannot have counted a hit.
    pub(super) fn uncounted(self) -> Self {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => Self(Arc::new(Inner { counts: false, ..inner })),
            // Only callers that waited for the same connection share an error. They sent nothing.
            Err(shared) => Self(shared),
        }
    }

    /// Converts an error of an attempt to connect. The caller's command was not sent.
    pub(super) fn while_connecting(self) -> Self {
        let server = self.0.server.clone();
        Self::unreachable(&server, ConnectCause(self))
    }

    /// Replaces the source, which contains a password.
    pub(super) fn with_hidden_source(&self) -> Self {
        let hidden = "the server's message is hidden, because it contains the password";
        Self::new(self.0.kind, &self.0.server, Some(Source::Other(hidden.into())))
    }

    /// Returns `true` if the server did not reply within the timeout.
    pub fn is_timeout(&self) -> bool {
        self.0.kind.is_timeout()
    }

    /// Returns `true` if the hit may have been counted in spite of the error.
    ///
    /// That is the case if the command was sent and its outcome is unknown. The storage does not
    /// retry such a command, because the retry could count the hit twice.
    pub fn may_have_counted(&self) -> bool {
        self.0.counts && self.0.kind.may_have_counted()
    }

    /// Returns `true` if the server has not cached the script. It executed nothing.
    pub(super) fn is_script_missing(&self) -> bool {
        self.is_server_error(ServerErrorKind::NoScript)
    }

    /// Returns `true` if the user has no right to run the command.
    pub(super) fn is_permission_denied(&self) -> bool {
        self.is_server_error(ServerErrorKind::NoPerm)
    }

    /// Returns `true` if the server has become a replica, or requires another login. A new
    /// connection can succeed.
    pub(super) fn needs_new_connection(&self) -> bool {
        self.is_server_error(ServerErrorKind::ReadOnly) || matches!(self.code(), Some("NOAUTH" | "WRONGPASS"))
    }

    /// Returns `true` if the connection is broken.
    pub(super) fn is_connection_lost(&self) -> bool {
        self.0.kind == Kind::Lost
    }

    /// Returns the redirection, if the error is one.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn redirect(&self) -> Option<Redirect<'_>> {
        let Some(Source::Redis(error)) = &self.0.source else { return None };
        let target = error.redirect_node().map(|(address, _)| address);
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => target.map(Redirect::Moved),
            ErrorKind::Server(ServerErrorKind::Ask) => target.map(Redirect::Ask),
            ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Redirect::TryAgain),
            _ => None,
        }
    }

    /// Returns `true` if another node may hold the slot by now.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn needs_new_slot_map(&self) -> bool {
        let down =
            self.is_server_error(ServerErrorKind::ClusterDown) || self.is_server_error(ServerErrorKind::MasterDown);
        self.0.kind != Kind::Refused || down || self.needs_new_connection()
    }

    fn is_server_error(&self, kind: ServerErrorKind) -> bool {
        matches!(&self.0.source, Some(Source::Redis(error)) if error.kind() == ErrorKind::Server(kind))
    }

    fn code(&self) -> Option<&str> {
        let Some(Source::Redis(error)) = &self.0.source else { return None };
        error.code()
    }
}

impl LinkError for RedisStorageError {
    fn late(server: &str) -> Self {
        Self::timed_out(server, false)
    }

    fn overloaded(server: &str, in_flight: usize) -> Self {
        Self::new(Kind::Overloaded { in_flight }, server, None)
    }

    fn is_timeout(&self) -> bool {
        self.is_timeout()
    }
}

impl fmt::Display for RedisStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.kind.write(&self.0.server, f)?;
        self.0.source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))?;
        let is_cluster_node = self.is_server_error(ServerErrorKind::Moved) && self.0.kind == Kind::Refused;
        if is_cluster_node {
            f.write_str(" (the server belongs to a cluster: write redis+cluster:// in the URL)")
        } else {
            Ok(())
        }
    }
}

impl fmt::Debug for RedisStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStorageError").field(&self.0.kind).field(&self.to_string()).finish()
    }
}

impl Error for RedisStorageError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self.0.source.as_ref()? {
            Source::Redis(error) => Some(error),
            Source::Other(error) => Some(&**error),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redis(error) => match (error.code(), error.detail()) {
                (Some(code), Some(detail)) => write!(f, "{code} {detail}"),
                _ => error.fmt(f),
            },
            Self::Other(error) => error.fmt(f),
        }
    }
}

/// The cause of a failed attempt to connect. It omits the server's name, which the outer error has.
struct ConnectCause(RedisStorageError);

impl fmt::Display for ConnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.0.source {
            Some(source) => source.fmt(f),
            None => f.write_str("timed out"),
        }
    }
}

impl fmt::Debug for ConnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for ConnectCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
