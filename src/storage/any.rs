//! A storage that is chosen at run time, and its URL.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, RwLock};

use super::contract::{forward_storage, layers};
use super::{MemoryStorage, SlotStore, Storage, StorageFuture, StorageRequest, Summary, names};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::Policy;
use crate::sync::unpoisoned;

/// The schemes of this crate's storages, without `+` and the part after it.
const SCHEMES: &str = "memory redis rediss valkey valkeys memcached memcacheds etcd etcds postgres postgresql sqlite";

type OpenStorage = dyn Fn(&str) -> Result<AnyStorage, ConfigError> + Send + Sync;

/// The schemes of storages in other crates.
static REGISTERED: RwLock<BTreeMap<String, Arc<OpenStorage>>> = RwLock::new(BTreeMap::new());

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
/// | `memcached://host,host`, `memcacheds://`, `memcached+unix://` | `MemcachedStorage` | `memcached`, TLS `memcached-rustls` |
/// | `etcd://host,host`, `etcds://`, `etcd+tls://` | `EtcdStorage` | `etcd`, TLS `etcd-rustls` |
/// | `postgres://user@host/database`, `postgresql://` | `PostgresStorage` | `postgres`, TLS `postgres-rustls` |
/// | `sqlite:path` | `SqliteStorage` | `sqlite` |
/// | a scheme that the program has [registered](Self::register) | a storage of another crate | |
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
    /// Creates a handle to `storage`. An `AnyStorage` or an `Arc<dyn Storage>` is not wrapped
    /// again.
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

    fn get(&self) -> &dyn Storage {
        match &self.0 {
            Handle::Memory(memory) => memory,
            Handle::Other(other) => &**other,
        }
    }

    /// Returns `true` if the states of `other` certainly are in another storage. Two storages of one
    /// type on servers are not distinguished, because their clones have nothing in common that the
    /// trait shows.
    pub(crate) fn certainly_differs_from(&self, other: &Self) -> bool {
        let innermost = |storage| layers(storage).last().map(|storage| storage as &dyn Any);
        let (Some(this), Some(other)) = (innermost(self), innermost(other)) else { return false };
        match (this.downcast_ref::<MemoryStorage>(), other.downcast_ref()) {
            (Some(this), Some(other)) => !this.is_same(other),
            _ => this.type_id() != other.type_id(),
        }
    }

    /// Opens URLs with this scheme by `open`, in the whole program. `open` gets the whole URL.
    /// Parsing passes on its error.
    ///
    /// Call this at the start of the program. The scheme may be followed by `+` and a variant, as in
    /// `dynamodb+http://`. Registering a scheme again replaces its function.
    ///
    /// The guide on [writing a storage](crate::guide::write_a_storage#its-own-url) has the details.
    ///
    /// ```
    /// use tower_ratelimit::storage::AnyStorage;
    /// use tower_ratelimit::{ConfigError, MemoryStorage};
    ///
    /// AnyStorage::register("small", |url| match url {
    ///     "small://" => MemoryStorage::builder().max_bytes(1 << 20).build(),
    ///     _ => Err(ConfigError::new("the URL has options; write small://")),
    /// });
    /// let storage: AnyStorage = "small://".parse()?;
    /// assert!("small://?timeout=1s".parse::<AnyStorage>().is_err());
    /// # Ok::<(), ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `scheme` is not a word of lowercase letters and digits that begins with a letter,
    /// or if it is one of this crate's schemes.
    #[track_caller]
    pub fn register<St: Storage>(scheme: &str, open: impl Fn(&str) -> Result<St, ConfigError> + Send + Sync + 'static) {
        let is_word = scheme.starts_with(|c: char| c.is_ascii_lowercase())
            && scheme.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        assert!(is_word, "invalid scheme {scheme:?}: write lowercase letters and digits, for example \"dynamodb\"");
        assert!(
            SCHEMES.split(' ').all(|own| own != scheme),
            "the scheme {scheme:?} belongs to tower-ratelimit: choose another one"
        );
        let open = Arc::new(move |url: &str| open(url).map(Self::new));
        unpoisoned(REGISTERED.write()).insert(scheme.to_owned(), open);
    }

    /// Returns the storage if its type is `St`, or `None`. The inner storage of a wrapper is not
    /// searched.
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
            "memcached" | "memcacheds" => super::MemcachedStorage::new(url).map(Self::new),
            #[cfg(not(feature = "memcached"))]
            "memcached" | "memcacheds" => Err(missing(scheme, "memcached")),
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
            family => {
                let registered = unpoisoned(REGISTERED.read()).get(family).map(Arc::clone);
                // The error shows only the scheme, because the URL may contain a password.
                let unknown = || {
                    let problem = if is_scheme(scheme) {
                        format!("unknown scheme {scheme:?}")
                    } else {
                        "the scheme is missing".to_owned()
                    };
                    ConfigError::new(format!(
                        "cannot read the storage URL: {problem}; write memory://, redis://localhost, \
                         memcached://localhost, etcd://localhost, postgres://user@localhost/database or \
                         sqlite:limits.db, or register the scheme by AnyStorage::register"
                    ))
                };
                (registered.ok_or_else(unknown)?)(url)
            }
        }
    }
}

/// Returns `true` if the text can be a scheme. Other text must not be shown, because it may be a
/// connection string with a password, such as `host=db password=..`.
fn is_scheme(text: &str) -> bool {
    text.trim().chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
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
        self.get().fmt(f)
    }
}

impl Storage for AnyStorage {
    #[inline]
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        match &self.0 {
            Handle::Memory(memory) => memory.decide(request),
            Handle::Other(other) => other.decide(request),
        }
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        match &self.0 {
            Handle::Memory(memory) => memory.try_admit(request, summary),
            Handle::Other(other) => other.try_admit(request, summary),
        }
    }

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(self.get())
    }

    forward_storage!(self => self.get(); decide_all, clear, settle, check, clear_all, keys, validate,
        validate_members, needs_outer_key, slots);
}

/// The URL of a storage, for a field of a configuration struct. Parsing validates it.
///
/// [`AnyStorage`] lists the URLs. `Debug` and `Display` write only the scheme, because the URL may
/// contain a password. With the feature `serde`, it is serialized as a string that includes the
/// password.
///
/// ```
/// use tower_ratelimit::storage::StorageUrl;
///
/// let url: StorageUrl = "memory://".parse()?;
/// let storage = url.open()?;
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StorageUrl(Box<str>);

impl StorageUrl {
    /// Creates a storage for the URL. A storage on a server connects on first use.
    ///
    /// Each call creates a new storage. Clone the result to share its connections, or the states of
    /// `memory://`.
    ///
    /// # Errors
    ///
    /// Returns an error if a file that the URL names can no longer be used, for example a
    /// certificate.
    pub fn open(&self) -> Result<AnyStorage, ConfigError> {
        self.0.parse()
    }

    /// Returns this URL with one more option. This method percent-encodes `value`, so pass it as plain
    /// text. Pass a [`Duration`](std::time::Duration) as `format_args!("{timeout:?}")`.
    ///
    /// ```
    /// # #[cfg(feature = "etcd")] {
    /// use std::time::Duration;
    /// use tower_ratelimit::storage::{EtcdStorage, StorageUrl};
    ///
    /// let timeout = Duration::from_millis(50);
    /// let url: StorageUrl = "etcd://localhost?prefix=shop".parse()?;
    /// let storage = EtcdStorage::new(url.with("timeout", format_args!("{timeout:?}"))?.as_str())?;
    /// # }
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not know the option or rejects the value, or if the URL
    /// contains the option already.
    pub fn with(&self, option: &str, value: impl fmt::Display) -> Result<Self, ConfigError> {
        let separator = if self.0.contains('?') { '&' } else { '?' };
        format!("{}{separator}{option}={}", self.0, names::encoded(&value.to_string())).parse()
    }

    /// Returns the whole URL, including a password.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Parses the URLs of [`AnyStorage`], and returns its errors.
///
/// To validate the URL, parsing creates the storage and drops it. It does not connect to a server,
/// and opens no database, but it reads the certificates that the URL names.
impl FromStr for StorageUrl {
    type Err = ConfigError;

    fn from_str(url: &str) -> Result<Self, ConfigError> {
        url.parse::<AnyStorage>()?;
        Ok(Self(url.into()))
    }
}

impl fmt::Display for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.0.split(':').next().unwrap_or_default();
        let slashes = if self.0.contains("://") { "//" } else { "" };
        write!(f, "{scheme}:{slashes}...")
    }
}

impl fmt::Debug for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StorageUrl({self})")
    }
}
