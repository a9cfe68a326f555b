use std::error::Error;
use std::fmt;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::quote::without_arguments;
use crate::BoxError;
use crate::storage::net::{Kind, LinkError};

/// Why a Redis or Valkey server could not be asked, or what it answered instead of a decision.
///
/// It names the server, and never a password or a client's key. What caused it is its [`source`](Error::source).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let nobody = RedisStorage::new("redis://:secret@127.0.0.1:1")?;
/// let error = nobody.ready(Duration::from_millis(50)).await.unwrap_err();
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
    /// It was only a look.
    is_harmless: bool,
}

enum Source {
    Redis(RedisError),
    Other(BoxError),
}

/// Where else a command is to be sent, which this server has not executed.
#[cfg(feature = "redis-cluster")]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect<'a> {
    /// The slot lives there.
    Moved(&'a str),
    /// This key lives there already, the slot not yet.
    Ask(&'a str),
    /// Nowhere else, but later.
    Later,
}

impl RedisStorageError {
    /// Nothing was sent, since `server` could not be reached.
    pub(super) fn unreached(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, server, Some(Source::Other(source.into())))
    }

    /// The deadline passed, after the command was `sent` or before.
    pub(super) fn late(server: &str, sent: bool) -> Self {
        Self::new(Kind::Late { sent }, server, None)
    }

    /// What came back in place of a reply, after the command was sent.
    pub(super) fn answered(server: &str, error: RedisError) -> Self {
        let refused = matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
        Self::new(
            if refused { Kind::Refused } else { Kind::Lost },
            server,
            Some(Source::Redis(without_arguments(error))),
        )
    }

    /// A reply that is not what the command answers; `what` says what it was.
    pub(super) fn unexpected(server: &str, what: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unexpected, server, Some(Source::Other(what.into())))
    }

    fn new(kind: Kind, server: &str, source: Option<Source>) -> Self {
        Self(Arc::new(Inner { kind, server: server.into(), source, is_harmless: false }))
    }

    /// Nothing is wrong with the server: `why` it did not decide, and whether something was `sent` of which it is not known what
    /// became of it.
    pub(super) fn undecided(why: impl Into<BoxError>, sent: bool) -> Self {
        Self::new(Kind::Undecided { sent }, "", Some(Source::Other(why.into())))
    }

    /// The same, of a command that changes nothing.
    pub(super) fn of_a_look(self) -> Self {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => Self(Arc::new(Inner { is_harmless: true, ..inner })),
            // Shared by all who waited for the same connection: nothing was sent.
            Err(shared) => Self(shared),
        }
    }

    /// The same, of an attempt to connect: what was asked for has not been sent.
    pub(super) fn while_connecting(self) -> Self {
        let server = self.0.server.clone();
        Self::unreached(&server, Cause(self))
    }

    /// The same, when what caused it is better not shown.
    pub(super) fn without_its_cause(&self) -> Self {
        Self::new(self.0.kind, &self.0.server, Some(Source::Other("its answer holds the password".into())))
    }

    /// Whether the server did not answer within the deadline.
    pub fn is_timeout(&self) -> bool {
        self.0.kind.is_timeout()
    }

    /// Whether a hit may have been counted all the same: its command was sent, and whether it was executed is not known. Such
    /// a command is never sent again, since then it might be counted twice.
    pub fn may_have_counted(&self) -> bool {
        !self.0.is_harmless && self.0.kind.may_have_counted()
    }

    /// Whether the server does not have the script: it was not executed.
    pub(super) fn is_no_script(&self) -> bool {
        self.says(ServerErrorKind::NoScript)
    }

    /// Whether the user may not say such a command.
    pub(super) fn is_no_permission(&self) -> bool {
        self.says(ServerErrorKind::NoPerm)
    }

    /// Whether the connection leads to a server that it should not lead to any more, or is not let in by.
    pub(super) fn is_of_the_wrong_server(&self) -> bool {
        self.says(ServerErrorKind::ReadOnly) || matches!(self.code(), Some("NOAUTH" | "WRONGPASS"))
    }

    /// Whether the connection is of no more use.
    pub(super) fn is_lost(&self) -> bool {
        self.0.kind == Kind::Lost
    }

    /// Where else to send the command, if this server says so.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn redirect(&self) -> Option<Redirect<'_>> {
        let Some(Source::Redis(error)) = &self.0.source else { return None };
        let there = error.redirect_node().map(|(address, _)| address);
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => there.map(Redirect::Moved),
            ErrorKind::Server(ServerErrorKind::Ask) => there.map(Redirect::Ask),
            ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Redirect::Later),
            _ => None,
        }
    }

    /// Whether the server's answer says that another server may be in its place by now.
    #[cfg(feature = "redis-cluster")]
    pub(super) fn doubts_the_map(&self) -> bool {
        let down = self.says(ServerErrorKind::ClusterDown) || self.says(ServerErrorKind::MasterDown);
        self.0.kind != Kind::Refused || down || self.is_of_the_wrong_server()
    }

    fn says(&self, kind: ServerErrorKind) -> bool {
        matches!(&self.0.source, Some(Source::Redis(error)) if error.kind() == ErrorKind::Server(kind))
    }

    fn code(&self) -> Option<&str> {
        let Some(Source::Redis(error)) = &self.0.source else { return None };
        error.code()
    }
}

impl LinkError for RedisStorageError {
    fn late(server: &str) -> Self {
        Self::late(server, false)
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
        let cluster = self.says(ServerErrorKind::Moved) && self.0.kind == Kind::Refused;
        if cluster { f.write_str(" (a cluster: write redis+cluster:// in its URL)") } else { Ok(()) }
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

/// What went wrong while connecting, without the server's name: it is said once.
struct Cause(RedisStorageError);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.0.source {
            Some(source) => source.fmt(f),
            None => f.write_str("it did not answer in time"),
        }
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
