use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::BoxError;
use crate::storage::CasError;
use crate::storage::net::{Kind, LinkError};

/// Why [`MemcachedStorage`](super::MemcachedStorage) could not decide: a server could not be asked, or answered something else.
///
/// It names the server, if it was one. What caused it is its [`source`](Error::source).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let nobody = MemcachedStorage::new("memcached://127.0.0.1:1")?;
/// let error = nobody.ready(Duration::from_millis(50)).await.unwrap_err();
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
        /// Whether what was asked for changes anything.
        changes: bool,
        server: Box<str>,
        source: Option<BoxError>,
    },
    /// No server has failed that is known.
    Cas(CasError),
}

impl MemcachedStorageError {
    /// Of a request that `changes` something, or does not.
    pub(super) fn new(kind: Kind, changes: bool, server: &str, source: Option<BoxError>) -> Self {
        Self(Arc::new(Inner::Server { kind, changes, server: server.into(), source }))
    }

    /// Nothing was sent, since `server` could not be reached.
    pub(super) fn unreached(server: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, false, server, Some(source.into()))
    }

    /// Whether there was no answer within the deadline.
    pub fn is_timeout(&self) -> bool {
        match &*self.0 {
            Inner::Server { kind, .. } => kind.is_timeout(),
            Inner::Cas(error) => error.is_timeout(),
        }
    }

    /// Whether a hit may have been counted all the same: what stores it was sent, and whether it was stored is not known. It is
    /// never sent again, since then it might be counted twice.
    pub fn may_have_counted(&self) -> bool {
        match &*self.0 {
            Inner::Server { kind, changes, .. } => *changes && kind.may_have_counted(),
            Inner::Cas(error) => error.may_have_counted(),
        }
    }
}

/// What the server said, if it was a server.
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
