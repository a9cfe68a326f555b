//! A storage that is chosen at run time.

use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{MemoryStorage, Storage, StorageFuture, StorageRequest, Summary};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::Policy;

/// Calls `$call` on the storage of a handle.
macro_rules! delegate {
    ($handle:expr, $storage:ident => $call:expr) => {
        match &$handle.0 {
            Handle::Memory($storage) => $call,
            Handle::Other($storage) => $call,
        }
    };
}

/// A storage that is chosen at run time: a handle to any [`Storage`].
///
/// [`new`](Self::new) takes any storage. Parsing creates one from a URL:
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
/// # Errors
///
/// Parsing fails if
///
/// - the URL is invalid, or its scheme is unknown,
/// - the URL needs a feature that is not enabled,
/// - a file that the URL names cannot be used.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::{AnyStorage, RefusalCache};
/// use tower_ratelimit::{OnError, PeerIp, Quota, RateLimitLayer};
///
/// let mut layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new());
/// if let Ok(url) = std::env::var("STORAGE") {
///     let storage: AnyStorage = url.parse()?;
///     layer = layer.storage(RefusalCache::new(storage), OnError::Admit);
/// }
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct AnyStorage(Handle);

/// Calls of a memory storage need no virtual call.
#[derive(Clone)]
enum Handle {
    Memory(MemoryStorage),
    Other(Arc<dyn Storage>),
}

impl AnyStorage {
    /// Creates a handle to `storage`. An `AnyStorage` or an `Arc<dyn Storage>` is not wrapped again.
    pub fn new(storage: impl Storage) -> Self {
        let any = &storage as &dyn Any;
        if let Some(this) = any.downcast_ref::<Self>() {
            return this.clone();
        }
        if let Some(memory) = any.downcast_ref::<MemoryStorage>() {
            return memory.clone().into();
        }
        if let Some(shared) = any.downcast_ref::<Arc<dyn Storage>>() {
            return Arc::clone(shared).into();
        }
        Self(Handle::Other(Arc::new(storage)))
    }

    /// Returns the storage if its type is `St`.
    ///
    /// ```
    /// use tower_ratelimit::MemoryStorage;
    /// use tower_ratelimit::storage::AnyStorage;
    ///
    /// let storage: AnyStorage = "memory://".parse()?;
    /// assert_eq!(storage.downcast_ref::<MemoryStorage>().map(|memory| memory.stats().keys), Some(0));
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    pub fn downcast_ref<St: Storage>(&self) -> Option<&St> {
        self.wrapped().and_then(|storage| (storage as &dyn Any).downcast_ref())
    }
}

impl From<MemoryStorage> for AnyStorage {
    fn from(storage: MemoryStorage) -> Self {
        Self(Handle::Memory(storage))
    }
}

impl From<Arc<dyn Storage>> for AnyStorage {
    fn from(storage: Arc<dyn Storage>) -> Self {
        let any: &dyn Any = &*storage;
        if let Some(this) = any.downcast_ref::<Self>() {
            return this.clone();
        }
        match any.downcast_ref::<MemoryStorage>() {
            Some(memory) => memory.clone().into(),
            None => Self(Handle::Other(storage)),
        }
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
        delegate!(self, storage => storage.fmt(f))
    }
}

impl Storage for AnyStorage {
    #[inline]
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        delegate!(self, storage => storage.decide(request))
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        delegate!(self, storage => storage.try_admit(request, summary))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        delegate!(self, storage => storage.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        delegate!(self, storage => storage.settle(policy, key, decision, actual))
    }

    fn check(&self) -> StorageFuture<()> {
        delegate!(self, storage => storage.check())
    }

    fn clear_all(&self) -> StorageFuture<u64> {
        delegate!(self, storage => storage.clear_all())
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        delegate!(self, storage => storage.validate(policy))
    }

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(match &self.0 {
            Handle::Memory(memory) => memory,
            Handle::Other(other) => &**other,
        })
    }
}
