//! Storages: the trait, the memory storage, shared storages, and wrappers around them.
//!
//! | storage | use | feature |
//! |---|---|---|
//! | [`MemoryStorage`] | one process; the default | |
//! | `RedisStorage` | several processes, on Redis or Valkey | `redis` |
//! | `MemcachedStorage` | several processes, on memcached | `memcached` |
//! | `EtcdStorage` | several processes, on etcd | `etcd` |
//! | `PostgresStorage` | several processes, on PostgreSQL | `postgres` |
//! | `SqliteStorage` | the processes of one machine; survives restarts | `sqlite` |
//! | [`Cas`] | your own store, by two methods of [`CasStorage`] | |
//! | [`AnyStorage`] | a storage that is chosen at run time, for example by a URL | |
//!
//! Every storage supports every strategy, except that memcached, etcd and PostgreSQL reject [long
//! logs](crate::guide::several_processes#long-logs), and [`Leases`] reject strategies whose states
//! change with each hit or refusal.
//!
//! A wrapper is a storage around another storage. This table lists them from the inside out:
//!
//! | wrapper | purpose |
//! |---|---|
//! | [`Breaker`] | a circuit breaker, with an optional fallback |
//! | [`RefusalCache`] | refusals without a round trip |
//! | [`InOrder`] | [several keys](crate::RateLimitLayer::and) on a storage that decides on one key at a time |
//! | [`Leases`] | hits without a round trip |
//!
//! The page of each storage lists its options, its keys and its faults. The guide on [several
//! processes](crate::guide::several_processes) helps to choose one, and the guide on
//! [outages](crate::guide::outages) describes a storage that fails.
//!
//! # For authors of storages
//!
//! A store with compare-and-swap implements [`CasStorage`]. Any other storage implements
//! [`Storage`], whose methods take a [`StorageRequest`] and return a [`StorageFuture`] with a
//! decision or a [`StorageError`]. [`Storage::try_admit`], which fills in a [`Summary`], is an
//! optional fast path for hits that are admitted or refused at once. `testing::StorageLaws` and
//! `testing::CasLaws` (feature `testing`) test both traits.

mod any;
mod bounds;
mod breaker;
mod cas;
mod clock;
mod contract;
#[cfg(any(feature = "redis", feature = "etcd"))]
mod credentials;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod future;
mod in_order;
mod key_table;
mod keys;
mod leases;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite"))]
mod listing;
#[cfg(feature = "memcached")]
mod memcached;
mod memory;
mod metrics;
mod names;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres"))]
mod net;
#[cfg(feature = "postgres")]
mod postgres;
mod queues;
mod recent_map;
#[cfg(feature = "redis")]
mod redis;
mod refusal_cache;
mod runtime;
mod slots;
#[cfg(feature = "sqlite")]
mod sqlite;
mod text;
mod ticket;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres"))]
mod tls;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd", feature = "postgres", feature = "sqlite"))]
mod url;

pub use self::any::{AnyStorage, StorageUrl};
#[cfg(feature = "metrics")]
pub(crate) use self::breaker::PATHS;
pub use self::breaker::{Breaker, Circuit, CircuitState, Phase};
pub use self::cas::{Cas, CasStorage, Loaded, Swapped};
pub use self::clock::{Clock, ManualClock, SystemClock, TokioClock};
pub(crate) use self::contract::{MAX_MEMBERS, layers};
pub use self::contract::{Storage, StorageRequest, Summary};
#[cfg(any(feature = "redis", feature = "etcd"))]
pub use self::credentials::Credentials;
pub use self::error::{StorageError, StorageErrorKind};
#[cfg(feature = "etcd")]
pub use self::etcd::EtcdStorage;
pub use self::future::StorageFuture;
pub use self::in_order::InOrder;
pub(crate) use self::key_table::{Bucket, KeyTable, TableKey};
pub use self::keys::{KeyPage, KeysRequest};
pub use self::leases::Leases;
#[cfg(feature = "memcached")]
pub use self::memcached::MemcachedStorage;
pub use self::memory::{MemoryStats, MemoryStorage, MemoryStorageBuilder, OnFull};
#[cfg(feature = "metrics")]
pub(crate) use self::metrics::{IN_FLIGHT, LATENCY};
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStorage;
#[cfg(feature = "redis")]
pub use self::redis::RedisStorage;
pub use self::refusal_cache::RefusalCache;
pub(crate) use self::runtime::runtime_with_time;
#[cfg(feature = "testing")]
pub(crate) use self::slots::Ledger;
pub(crate) use self::slots::{Claim, Granted, LONGEST_TIME_TO_LIVE, SlotStore};
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteStorage;
#[cfg(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
))]
pub use self::tls::TlsConfig;
pub use crate::policy::Member;
