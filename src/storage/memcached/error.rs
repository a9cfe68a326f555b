use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::BoxError;
use crate::storage::CasError;
use crate::storage::net::{Kind, LinkError};

/// The error of a [`MemcachedStorage`](super::MemcachedStorage).
///
/// If a server failed, the message names the server, and [`source`](Error::source) returns the
/// cause.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// // No server listens on this port.
/// let storage = MemcachedStorage::new("memcached://127.0.0.1:1")?;
/// let error = storage.ready(Duration::from_millis(50)).await.unwrap_err();
/// assert!(error.to_string().starts_with("cannot reach 127.0.0.1:1: "), "{error}");
/// assert!(!error.may_have_counted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemcachedStorageError(Arc<Inner>);

enum Inner {
    Server {
        kind: Kind,
        /// `true` if the request changes an item.
        changes: bool,
        server: Box<str>,
        source: Option<BoxError>,
    },
    /// An error without a failed server.
    Cas(CasError),
}

impl MemcachedStorageError {
    /// Creates the error of a request to `server`. `changes` is `true` if the request changes an
    /// item.
    pub(super) fn new(kind: Kind, changes: bool, server: &str, source: Option<BoxError>) -> Self {
        Self(Arc::new(Inner::Server { kind, changes, server: server.into(), source }))
    }

    /// Creates the error of a request that was not sent, because `server` cannot be reached.
    pub(super) fn unreached(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, false, server, Some(source.into()))
    }

    /// Returns `true` if a server did not reply in time.
    pub fn is_timeout(&self) -> bool {
        match &*self.0 {
            Inner::Server { kind, .. } => kind.is_timeout(),
            Inner::Cas(error) => error.is_timeout(),
        }
    }

    /// Returns `true` if the server may have executed the call, for example counted the hit.
    ///
    /// The new state was sent, but the server did not confirm it. It is not sent again, because it
    /// could count twice.
    pub fn may_have_counted(&self) -> bool {
        match &*self.0 {
            Inner::Server { kind, changes, .. } => *changes && kind.may_have_counted(),
            Inner::Cas(error) => error.may_have_counted(),
        }
    }
}

/// Returns the error of the server, if a server failed.
impl From<CasError> for MemcachedStorageError {
    fn from(error: CasError) -> Self {
        let server = error.source().and_then(<dyn Error>::downcast_ref::<Self>).cloned();
        server.unwrap_or_else(|| Self(Arc::new(Inner::Cas(error))))
    }
}

impl LinkError for MemcachedStorageError {
    fn late(server: &str) -> Self {
        Self::new(Kind::Late { sent: false }, false, server, None)
    }

    fn overloaded(server: &str, in_flight: usize) -> Self {
        Self::new(Kind::Overloaded { in_flight }, false, server, None)
    }

    fn is_timeout(&self) -> bool {
        self.is_timeout()
    }
}

impl fmt::Display for MemcachedStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Inner::Server { kind, server, source, .. } => {
                kind.write(server, f)?;
                source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))
            }
            Inner::Cas(error) => error.fmt(f),
        }
    }
}

impl fmt::Debug for MemcachedStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemcachedStorageError").field(&self.to_string()).finish()
    }
}

impl Error for MemcachedStorageError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &*self.0 {
            Inner::Server { source, .. } => source.as_ref().map(|source| &**source as _),
            Inner::Cas(error) => error.source(),
        }
    }
}
