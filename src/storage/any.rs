//! A storage that is chosen by a URL.

use std::fmt;
use std::future::Ready;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};

use super::{MemoryStorage, Storage, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Policy};

/// A storage that is chosen by a URL, for example from the configuration.
///
/// | URL | storage | feature |
/// |---|---|---|
/// | `memory://` | [`MemoryStorage`] | |
/// | `redis://host`, `rediss://`, `redis+unix://`, the same with `valkey` | `RedisStorage` | `redis`, TLS `redis-rustls` |
/// | `redis+cluster://host,host` | `RedisStorage` | `redis-cluster` |
/// | `redis+sentinel://host,host/service` | `RedisStorage` | `redis-sentinel` |
/// | `memcached://host,host`, `memcached+unix://` | `MemcachedStorage` | `memcached` |
/// | `etcd://host,host`, `etcds://` | `EtcdStorage` | `etcd`, TLS `etcd-rustls` |
///
/// With `memory://`, a decision neither allocates nor waits.
///
/// # Errors
///
/// Parsing fails if the URL is invalid, if its scheme is unknown, or if the scheme needs a feature
/// that is not enabled.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::AnyStorage;
/// use tower_ratelimit::{OnError, PeerIp, Quota, RateLimitLayer};
///
/// let storage: AnyStorage = "memory://".parse()?;
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct AnyStorage(Any);

#[derive(Clone)]
enum Any {
    Memory(MemoryStorage),
    #[cfg(feature = "redis")]
    Redis(super::RedisStorage),
    #[cfg(feature = "memcached")]
    Memcached(super::MemcachedStorage),
    #[cfg(feature = "etcd")]
    Etcd(super::EtcdStorage),
}

impl From<MemoryStorage> for AnyStorage {
    fn from(storage: MemoryStorage) -> Self {
        Self(Any::Memory(storage))
    }
}

#[cfg(feature = "redis")]
impl From<super::RedisStorage> for AnyStorage {
    fn from(storage: super::RedisStorage) -> Self {
        Self(Any::Redis(storage))
    }
}

#[cfg(feature = "memcached")]
impl From<super::MemcachedStorage> for AnyStorage {
    fn from(storage: super::MemcachedStorage) -> Self {
        Self(Any::Memcached(storage))
    }
}

#[cfg(feature = "etcd")]
impl From<super::EtcdStorage> for AnyStorage {
    fn from(storage: super::EtcdStorage) -> Self {
        Self(Any::Etcd(storage))
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
            "redis" | "rediss" | "valkey" | "valkeys" => super::RedisStorage::new(url).map(Self::from),
            #[cfg(not(feature = "redis"))]
            "redis" | "rediss" | "valkey" | "valkeys" => Err(missing(scheme, "redis")),
            #[cfg(feature = "memcached")]
            "memcached" => super::MemcachedStorage::new(url).map(Self::from),
            #[cfg(not(feature = "memcached"))]
            "memcached" => Err(missing(scheme, "memcached")),
            #[cfg(feature = "etcd")]
            "etcd" | "etcds" => super::EtcdStorage::new(url).map(Self::from),
            #[cfg(not(feature = "etcd"))]
            "etcd" | "etcds" => Err(missing(scheme, "etcd")),
            // The error shows only the scheme, because the URL may contain a password.
            _ => Err(ConfigError::new(format!(
                "cannot read the storage URL: unknown scheme {scheme:?}; write memory://, redis://localhost, \
                 memcached://localhost or etcd://localhost"
            ))),
        }
    }
}

#[cfg(not(all(feature = "redis", feature = "memcached", feature = "etcd")))]
fn missing(scheme: &str, feature: &str) -> ConfigError {
    ConfigError::new(format!(
        "the URL scheme {scheme:?} needs the feature {feature:?} of tower-ratelimit, which is not enabled; \
         enable it, or use memory://"
    ))
}

impl AnyStorage {
    /// Deletes all keys with the prefix of this storage, and returns their number. A memory storage
    /// has no prefix, so all of its keys are deleted.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage fails. Always fails on memcached, which cannot list its
    /// keys.
    #[allow(clippy::unused_async, reason = "without servers there is nothing to wait for")]
    pub async fn reset(&self) -> Result<u64, BoxError> {
        match &self.0 {
            Any::Memory(storage) => Ok(storage.reset()),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => Ok(storage.reset().await?),
            #[cfg(feature = "memcached")]
            Any::Memcached(_) => Err("memcached cannot list its keys; use another prefix, or empty the servers with \
                                      flush_all"
                .into()),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => Ok(storage.reset().await?),
        }
    }
}

impl Storage for AnyStorage {
    type Error = BoxError;
    type DecideFuture = AnyFuture<Decision>;
    type UpdateFuture = AnyFuture<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        match &self.0 {
            Any::Memory(storage) => AnyFuture(Inner::Memory(storage.decide(request))),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => AnyFuture(Inner::Redis(storage.decide(request))),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => AnyFuture(Inner::Memcached(storage.decide(request))),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => AnyFuture(Inner::Etcd(storage.decide(request))),
        }
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        match &self.0 {
            Any::Memory(storage) => storage.try_admit(request, summary),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => storage.try_admit(request, summary),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => storage.try_admit(request, summary),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => storage.try_admit(request, summary),
        }
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        match &self.0 {
            Any::Memory(storage) => AnyFuture(Inner::Memory(storage.clear(policy, key))),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => AnyFuture(Inner::Redis(storage.clear(policy, key))),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => AnyFuture(Inner::Memcached(storage.clear(policy, key))),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => AnyFuture(Inner::Etcd(storage.clear(policy, key))),
        }
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        match &self.0 {
            Any::Memory(storage) => AnyFuture(Inner::Memory(storage.settle(policy, key, decision, actual))),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => AnyFuture(Inner::Redis(storage.settle(policy, key, decision, actual))),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => AnyFuture(Inner::Memcached(storage.settle(policy, key, decision, actual))),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => AnyFuture(Inner::Etcd(storage.settle(policy, key, decision, actual))),
        }
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        match &self.0 {
            Any::Memory(storage) => storage.clients_to_fill(policy),
            #[cfg(any(feature = "redis", feature = "memcached", feature = "etcd"))]
            _ => None,
        }
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        match &self.0 {
            Any::Memory(storage) => storage.validate(policy),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => storage.validate(policy),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => storage.validate(policy),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => storage.validate(policy),
        }
    }
}

/// The future of an [`AnyStorage`].
#[must_use = "futures do nothing unless they are polled"]
pub struct AnyFuture<T>(Inner<T>);

enum Inner<T> {
    Memory(Ready<Result<T, std::convert::Infallible>>),
    #[cfg(feature = "redis")]
    Redis(Pin<Box<dyn Future<Output = Result<T, super::RedisStorageError>> + Send>>),
    #[cfg(feature = "memcached")]
    Memcached(Pin<Box<dyn Future<Output = Result<T, super::MemcachedStorageError>> + Send>>),
    #[cfg(feature = "etcd")]
    Etcd(Pin<Box<dyn Future<Output = Result<T, super::EtcdStorageError>> + Send>>),
}

impl<T> Future for AnyFuture<T>
where
    Ready<Result<T, std::convert::Infallible>>: Unpin,
{
    type Output = Result<T, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Inner::Memory(future) => Pin::new(future).poll(cx).map(|result| result.map_err(|never| match never {})),
            #[cfg(feature = "redis")]
            Inner::Redis(future) => future.as_mut().poll(cx).map_err(BoxError::from),
            #[cfg(feature = "memcached")]
            Inner::Memcached(future) => future.as_mut().poll(cx).map_err(BoxError::from),
            #[cfg(feature = "etcd")]
            Inner::Etcd(future) => future.as_mut().poll(cx).map_err(BoxError::from),
        }
    }
}

impl fmt::Debug for AnyStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Any::Memory(storage) => storage.fmt(f),
            #[cfg(feature = "redis")]
            Any::Redis(storage) => storage.fmt(f),
            #[cfg(feature = "memcached")]
            Any::Memcached(storage) => storage.fmt(f),
            #[cfg(feature = "etcd")]
            Any::Etcd(storage) => storage.fmt(f),
        }
    }
}

impl<T> fmt::Debug for AnyFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyFuture").finish_non_exhaustive()
    }
}
