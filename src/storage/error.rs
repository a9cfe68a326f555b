//! The error of the storages that can fail.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::error::{BoxError, ConfigError, chain};

/// The error of a storage. A [`MemoryStorage`](crate::MemoryStorage) returns only errors of the
/// kind [`Unsupported`](StorageErrorKind::Unsupported).
///
/// | format | output |
/// |---|---|
/// | `{error}` | the message, without its cause, which is the [`source`](Error::source) |
/// | `{error:#}` | the message and all causes, in one line |
/// | `{error:?}` | the [kind](Self::kind), the message and all causes, in one line |
///
/// No message of this crate contains a password or the key of a client.
///
/// ```
/// use tower_ratelimit::storage::{StorageError, StorageErrorKind};
///
/// let error = StorageError::new(StorageErrorKind::Unreachable, "cannot reach cache:6379")
///     .with_source(std::io::Error::other("connection refused"));
/// assert_eq!(error.to_string(), "cannot reach cache:6379");
/// assert_eq!(format!("{error:#}"), "cannot reach cache:6379: connection refused");
/// assert!(!error.may_have_counted());
/// ```
#[derive(Clone)]
pub struct StorageError(Arc<ErrorInner>);

#[derive(Clone)]
struct ErrorInner {
    kind: StorageErrorKind,
    message: Cow<'static, str>,
    may_have_counted: bool,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// The kind of a [`StorageError`].
///
/// Use [`StorageError::may_have_counted`] to distinguish a call that was not executed from one
/// whose outcome is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageErrorKind {
    /// The server could not be reached, it rejected the login, or the database file could not be
    /// opened. The call was not executed.
    Unreachable,
    /// Too many calls are in flight. The call was not sent.
    Overloaded,
    /// The call took longer than its timeout. It may have been sent.
    Timeout,
    /// The connection broke after the call was sent.
    ConnectionLost,
    /// The server rejected the call, for example because a right is missing or the disk is full.
    Refused,
    /// The server returned a reply that does not match the call, or an error after which the call
    /// may have been executed.
    UnexpectedReply,
    /// Other processes changed the key before every compare-and-swap of a clear, a refund, a
    /// settlement or a claim of slots. Retrying can succeed. A hit is refused as
    /// [contended](crate::Decision::is_contended) instead.
    Contended,
    /// The [circuit breaker](super::Breaker) is open, so the storage was not called.
    CircuitOpen,
    /// The storage does not support the policy or the operation, the state of the key is too long
    /// for it, or another version of this crate has written the state in an unknown format.
    Unsupported,
    /// The call ended without a result: there is no tokio runtime, its runtime was shut down, or a
    /// custom strategy panicked.
    Cancelled,
    /// Any other error, for example of a custom storage.
    Other,
}

impl StorageErrorKind {
    /// Returns `true` if the storage may have executed a call that failed with this kind of error.
    const fn may_have_counted(self) -> bool {
        match self {
            Self::Timeout | Self::ConnectionLost | Self::UnexpectedReply | Self::Cancelled | Self::Other => true,
            Self::Unreachable
            | Self::Overloaded
            | Self::Refused
            | Self::Contended
            | Self::CircuitOpen
            | Self::Unsupported => false,
        }
    }
}

impl StorageError {
    /// Creates an error without a source. [`with_source`](Self::with_source) adds one.
    ///
    /// The message must not repeat the source, and must not contain a password or the key of a
    /// client.
    ///
    /// [`may_have_counted`](Self::may_have_counted) defaults to `true` for the kinds `Timeout`,
    /// `ConnectionLost`, `UnexpectedReply`, `Cancelled` and `Other`, and to `false` for the others.
    pub fn new(kind: StorageErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        let (message, may_have_counted) = (message.into(), kind.may_have_counted());
        Self(Arc::new(ErrorInner { kind, message, may_have_counted, source: None }))
    }

    /// Creates an error of the kind [`Other`](StorageErrorKind::Other) with this source.
    pub fn other(source: impl Into<BoxError>) -> Self {
        Self::new(StorageErrorKind::Other, "storage failed").with_source(source)
    }

    /// Converts any error to a `StorageError`. A `StorageError` is returned unchanged. An error of
    /// another type becomes the source of an [`other`](Self::other) error.
    pub fn from_boxed(error: impl Into<BoxError>) -> Self {
        error.into().downcast::<Self>().map_or_else(Self::other, |error| *error)
    }

    /// Sets the cause of this error, which [`source`](Error::source) returns. Defaults to none.
    #[must_use]
    pub fn with_source(self, source: impl Into<BoxError>) -> Self {
        self.with_shared_source(source.into().into())
    }

    /// Sets the value of [`may_have_counted`](Self::may_have_counted). The default depends on the
    /// kind: see [`new`](Self::new).
    #[must_use]
    pub fn with_may_have_counted(mut self, may_have_counted: bool) -> Self {
        Arc::make_mut(&mut self.0).may_have_counted = may_have_counted;
        self
    }

    /// Returns the kind of this error.
    pub fn kind(&self) -> StorageErrorKind {
        self.0.kind
    }

    /// Returns `true` if the call took longer than its timeout.
    pub fn is_timeout(&self) -> bool {
        self.kind() == StorageErrorKind::Timeout
    }

    /// Returns `true` if the storage was not called because a [circuit breaker](super::Breaker) was
    /// open. The source is the last error of the breaker's primary storage.
    pub fn is_circuit_open(&self) -> bool {
        self.kind() == StorageErrorKind::CircuitOpen
    }

    /// Returns `true` if the storage may have executed the call in spite of the error: counted the
    /// hit, refunded the units, or cleared the key.
    ///
    /// This is the case if a call that changes states was sent, and its outcome is unknown. The
    /// storages of this crate do not retry such a hit, charge or refund, because the retry could
    /// count twice.
    pub fn may_have_counted(&self) -> bool {
        self.0.may_have_counted
    }

    /// Creates an error of the same kind with `message`, and with `self` as its source.
    pub(super) fn context(self, message: &'static str) -> Self {
        let may_have_counted = self.may_have_counted();
        Self::new(self.kind(), message).with_may_have_counted(may_have_counted).with_source(self)
    }

    /// Creates the error of a policy that the storage does not support.
    pub(super) fn unsupported_policy(error: ConfigError) -> Self {
        Self::new(StorageErrorKind::Unsupported, "the storage does not support the policy").with_source(error)
    }

    /// Creates the error of a call outside of a tokio runtime.
    pub(crate) fn no_runtime() -> Self {
        Self::new(StorageErrorKind::Cancelled, "no tokio runtime: await the call inside a tokio runtime").uncounted()
    }

    /// Marks the error of a call that cannot have counted a hit.
    pub(super) fn uncounted(self) -> Self {
        self.with_may_have_counted(false)
    }

    /// Marks the error of a call that cannot have counted a hit if `is_peek`.
    #[cfg(any(feature = "redis", feature = "sqlite"))]
    pub(super) fn uncounted_if(self, is_peek: bool) -> Self {
        if is_peek { self.uncounted() } else { self }
    }

    fn with_shared_source(mut self, source: Arc<dyn Error + Send + Sync>) -> Self {
        Arc::make_mut(&mut self.0).source = Some(source);
        self
    }
}

/// The errors of the calls to a server.
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres"))]
impl StorageError {
    pub(super) fn unreachable(server: &str, source: impl Into<BoxError>) -> Self {
        Self::cannot_reach(server).with_source(source)
    }

    fn cannot_reach(server: &str) -> Self {
        Self::new(StorageErrorKind::Unreachable, format!("cannot reach {server}"))
    }

    /// Creates the error of a server that rejects the login, or of credentials that are missing.
    pub(super) fn cannot_log_in(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(StorageErrorKind::Unreachable, format!("cannot log in to {server}")).with_source(source)
    }

    pub(super) fn overloaded(server: &str, in_flight: usize) -> Self {
        let message = format!("overloaded: {in_flight} calls to {server} are in flight, this call was not sent");
        Self::new(StorageErrorKind::Overloaded, message)
    }

    /// Creates the error of a call that timed out before it was sent. `failure` is the error of the
    /// last attempt to connect.
    pub(super) fn not_connected(server: &str, failure: Option<Self>) -> Self {
        let message = format!("no connection to {server} within the timeout");
        let error = Self::new(StorageErrorKind::Timeout, message).uncounted();
        match failure {
            Some(failure) => error.with_source(failure),
            None => error,
        }
    }

    /// Creates the error of a call that timed out after it was sent.
    pub(super) fn timed_out(server: &str) -> Self {
        Self::new(StorageErrorKind::Timeout, format!("{server} did not answer within the timeout"))
    }

    pub(super) fn connection_lost(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(StorageErrorKind::ConnectionLost, format!("connection to {server} lost")).with_source(source)
    }

    pub(super) fn refused(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(StorageErrorKind::Refused, format!("{server} refused the command")).with_source(source)
    }

    pub(super) fn unexpected_reply(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(StorageErrorKind::UnexpectedReply, format!("unexpected reply from {server}")).with_source(source)
    }

    /// Converts the error of an attempt to connect to `server`. The caller's call was not sent.
    #[cfg(any(feature = "redis", feature = "etcd"))]
    pub(super) fn while_connecting(self, server: &str) -> Self {
        if self.kind() == StorageErrorKind::Unreachable {
            return self;
        }
        match &self.0.source {
            Some(source) => Self::cannot_reach(server).with_shared_source(Arc::clone(source)),
            None if self.is_timeout() => Self::unreachable(server, "timed out"),
            None => Self::unreachable(server, self),
        }
    }
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() { f.write_str(&chain(self)) } else { f.write_str(&self.0.message) }
    }
}

impl fmt::Debug for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StorageError").field(&self.kind()).field(&chain(self)).finish()
    }
}

impl Error for StorageError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
