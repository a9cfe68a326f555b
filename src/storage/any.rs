//! A storage that is chosen at run time.

use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{MemoryStorage, Storage, StorageError, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Policy};

/// A storage that is chosen at run time: any [`Storage`], with its type erased.
///
/// [`new`](Self::new) wraps any storage. Parsing creates one from a URL:
///
/// | URL | storage | feature |
/// |---|---|---|
/// | `memory://` | [`MemoryStorage`] | |
/// | `redis://host`, `rediss://`, `redis+unix://`, the same with `valkey` | `RedisStorage` | `redis`, TLS `redis-rustls` |
/// | `redis+cluster://host,host` | `RedisStorage` | `redis-cluster` |
/// | `redis+sentinel://host,host/service` | `RedisStorage` | `redis-sentinel` |
/// | `memcached://host,host`, `memcached+unix://` | `MemcachedStorage` | `memcached` |
/// | `etcd://host,host`, `etcds://`, `etcd+tls://` | `EtcdStorage` | `etcd`, TLS `etcd-rustls` |
/// | `postgres://user@host/database`, `postgresql://` | `PostgresStorage` | `postgres`, TLS `postgres-rustls` |
/// | `sqlite:path` | `SqliteStorage` | `sqlite` |
///
/// Clones share the inner storage. Each parsed `memory://` is a new storage with its own states.
///
/// # Futures
///
/// | method | polls the inner future | allocates |
/// |---|---|---|
/// | [`decide`](Storage::decide), [`clear`](Storage::clear), [`settle`](Storage::settle) | once, before it returns | only if the future is not ready at that poll |
/// | [`check`](Storage::check), [`clear_all`](Storage::clear_all) | when its own future is polled | always |
///
/// The futures of a [`MemoryStorage`] are ready at the first poll. If the inner storage needs
/// tokio, call the methods inside the runtime that awaits the returned futures.
///
/// # Errors
///
/// Parsing fails if
///
/// - the URL is invalid, or its scheme is unknown,
/// - the URL needs a feature that is not enabled,
/// - a file that the URL names cannot be used.
///
/// Calls return the error of the inner storage, converted by [`StorageError::from_boxed`].
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::{AnyStorage, RefusalCache};
/// use tower_ratelimit::{OnError, PeerIp, Quota, RateLimitLayer};
///
/// /// The type of `limit` is the same with and without a cache.
/// struct App {
///     limit: RateLimitLayer<AnyStorage>,
/// }
///
/// let caches_refusals = true;
/// let mut storage: AnyStorage = "memory://".parse()?;
/// if caches_refusals {
///     storage = AnyStorage::new(RefusalCache::new(storage));
/// }
/// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// let app = App { limit };
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct AnyStorage(Arc<dyn DynStorage>);

impl AnyStorage {
    /// Wraps `storage`, and erases its type.
    pub fn new(storage: impl Storage) -> Self {
        Self(Arc::new(storage))
    }
}

impl From<MemoryStorage> for AnyStorage {
    fn from(storage: MemoryStorage) -> Self {
        Self::new(storage)
    }
}

impl FromStr for AnyStorage {
    type Err = ConfigError;

    fn from_str(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let family = scheme.split('+').next().unwrap_or(scheme);
        match family.to_ascii_lowercase().as_str() {
            "memory" if rest == "//" => Ok(MemoryStorage::new().into()),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "valkey" | "valkeys" => super::RedisStorage::new(url).map(Self::new),
            #[cfg(not(feature = "redis"))]
            "redis" | "rediss" | "valkey" | "valkeys" => Err(missing(scheme, "redis")),
            #[cfg(feature = "memcached")]
            "memcached" => super::MemcachedStorage::new(url).map(Self::new),
            #[cfg(not(feature = "memcached"))]
            "memcached" => Err(missing(scheme, "memcached")),
            #[cfg(feature = "etcd")]
            "etcd" | "etcds" => super::EtcdStorage::new(url).map(Self::new),
            #[cfg(not(feature = "etcd"))]
            "etcd" | "etcds" => Err(missing(scheme, "etcd")),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => super::PostgresStorage::new(url).map(Self::new),
            #[cfg(not(feature = "postgres"))]
            "postgres" | "postgresql" => Err(missing(scheme, "postgres")),
            #[cfg(feature = "sqlite")]
            "sqlite" => super::SqliteStorage::new(url).map(Self::new),
            #[cfg(not(feature = "sqlite"))]
            "sqlite" => Err(missing(scheme, "sqlite")),
            // The error shows only the scheme, because the URL may contain a password.
            _ => Err(ConfigError::new(format!(
                "cannot read the storage URL: unknown scheme {scheme:?}; write memory://, redis://localhost, \
                 memcached://localhost, etcd://localhost, postgres://user@localhost/database or sqlite:limits.db"
            ))),
        }
    }
}

#[cfg(not(all(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite")))]
fn missing(scheme: &str, feature: &str) -> ConfigError {
    ConfigError::new(format!(
        "the URL scheme {scheme:?} needs the feature {feature:?} of tower-ratelimit, which is not enabled; \
         enable it, or use memory://"
    ))
}

impl fmt::Debug for AnyStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Storage for AnyStorage {
    type Error = StorageError;
    type DecideFuture = AnyFuture<Decision>;
    type UpdateFuture = AnyFuture<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        self.0.decide(request)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        self.0.try_admit(request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.0.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        self.0.settle(policy, key, decision, actual)
    }

    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.0.check()
    }

    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        self.0.clear_all()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.validate(policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.0.clients_to_fill(policy)
    }

    fn contains_breaker(&self) -> bool {
        self.0.contains_breaker()
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send>>;

/// A [`Storage`] without associated types, so that it can be a trait object.
trait DynStorage: fmt::Debug + Send + Sync {
    fn decide(&self, request: StorageRequest<'_>) -> AnyFuture<Decision>;
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool;
    fn clear(&self, policy: &Policy, key: &Key) -> AnyFuture<()>;
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> AnyFuture<()>;
    fn check(&self) -> BoxFuture<()>;
    fn clear_all(&self) -> BoxFuture<u64>;
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError>;
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64>;
    fn contains_breaker(&self) -> bool;
}

impl<St: Storage> DynStorage for St {
    fn decide(&self, request: StorageRequest<'_>) -> AnyFuture<Decision> {
        AnyFuture::new(Storage::decide(self, request))
    }

    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        Storage::try_admit(self, request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> AnyFuture<()> {
        AnyFuture::new(Storage::clear(self, policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> AnyFuture<()> {
        AnyFuture::new(Storage::settle(self, policy, key, decision, actual))
    }

    fn check(&self) -> BoxFuture<()> {
        Box::pin(Storage::check(self))
    }

    fn clear_all(&self) -> BoxFuture<u64> {
        Box::pin(Storage::clear_all(self))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        Storage::validate(self, policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        Storage::clients_to_fill(self, policy)
    }

    fn contains_breaker(&self) -> bool {
        Storage::contains_breaker(self)
    }
}

/// The future that [`decide`](Storage::decide), [`clear`](Storage::clear) and
/// [`settle`](Storage::settle) of an [`AnyStorage`] return.
#[must_use = "futures do nothing unless they are polled"]
pub struct AnyFuture<T>(State<T>);

enum State<T> {
    /// `None` after the result was returned.
    Ready(Option<Result<T, StorageError>>),
    Pending(BoxFuture<T>),
}

impl<T: Unpin + 'static> AnyFuture<T> {
    fn new<E: Into<BoxError>>(mut future: impl Future<Output = Result<T, E>> + Send + Unpin + 'static) -> Self {
        let mut context = Context::from_waker(Waker::noop());
        Self(match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(result) => State::Ready(Some(result.map_err(StorageError::from_boxed))),
            Poll::Pending => State::Pending(Box::pin(async { future.await.map_err(StorageError::from_boxed) })),
        })
    }
}

impl<T: Unpin> Future for AnyFuture<T> {
    type Output = Result<T, StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Ready(result) => Poll::Ready(result.take().expect("`AnyFuture` polled after completion")),
            State::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for AnyFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyFuture").finish_non_exhaustive()
    }
}
