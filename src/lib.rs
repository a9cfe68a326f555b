//! Rate limiting for HTTP services on tower: axum, hyper and tonic. [`RateLimiter`] provides the
//! same limits without HTTP.
//!
//! ```
//! use axum::{Router, routing::get};
//! use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
//!
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()));
//! ```
//!
//! Each client can send 60 requests per minute. A [`SlidingWindowCounter`] counts them, unless you
//! choose [another strategy](guide::choosing_a_strategy). The response to each limited request
//! reports the remaining requests. Further requests get a 429 with `Retry-After`. The counts are
//! kept in a [`MemoryStorage`], whose size is bounded. To share counts between processes, use Redis
//! or [another storage](storage).
//!
//! Serve the router with `into_make_service_with_connect_info::<SocketAddr>()`, because [`PeerIp`]
//! reads the address of the connection from it. Behind a proxy, use [`ClientIp`].
//!
//! # Guides
//!
//! | task | guide |
//! |---|---|
//! | Choose a strategy | [Choosing a strategy](guide::choosing_a_strategy) |
//! | Sell requests per day or month, in the time zone of each tenant | [Quotas by day and month](guide::quotas_by_day_and_month) |
//! | Find the client, also behind a proxy | [Keys and proxies](guide::keys_and_proxies), [proxies by name](guide::proxies_by_name) |
//! | Set the cost of a request, before or after its response, or meter messages and chunks | [Costs](guide::costs) |
//! | Limit users, tenants and all clients together, leave room for people | [Plans, tenants and all clients](guide::plans_and_tenants) |
//! | Lock out clients that guess passwords | [Protecting a login](guide::protecting_a_login) |
//! | Refuse requests, let them wait, choose header fields | [Headers and refusals](guide::headers_and_refusals) |
//! | Keep to the limits of other servers, as their client | [Limits of other servers](guide::limits_of_other_servers) |
//! | Limit how many requests are in flight at once: streams, uploads, web sockets | [Requests in flight](guide::requests_in_flight) |
//! | Share limits between processes: choose and connect a storage, also over TLS | [Several processes](guide::several_processes) |
//! | Handle failures of Redis and other storages | [Outages](guide::outages) |
//! | Keep the counts in a store of your own | [Write a storage](guide::write_a_storage) |
//! | Test an app that has limits | [Testing your app](guide::testing_your_app) |
//! | Plan memory and servers for a number of clients | [Sizing](guide::sizing) |
//! | Export metrics, set alerts, list the keys in use, read logs and lints | [Monitoring](guide::monitoring) |
//! | Start, check health, rotate logins, change limits, upgrade | [Deploying](guide::deploying) |
//! | Move from `tower_governor` | [Migrating](guide::migrating_from_tower_governor) |
//! | Move from `axum-governor`, `actix-limitation` or a `DashMap` | [Migrating from others](guide::migrating_from_others) |
//! | Look up the order of a layer's steps | [The path of a request](guide#the-path-of-a-request) |
//! | Copy from a whole program | [Examples](guide#examples) |
//!
//! # Terms
//!
//! | word | meaning |
//! |---|---|
//! | [`Quota`] | an amount of units per period, optionally with a burst: `100/minute` |
//! | unit | the measure of quotas and costs; by default, a request costs 1 unit |
//! | [`Strategy`](strategy::Strategy) | the algorithm that decides when a quota's units can be spent |
//! | [`Limit`] | a quota with its strategy |
//! | capacity | the most units of a limit that can be spent at one instant |
//! | [`Policy`] | the limits that apply to one key; a hit is admitted by all of them or by none |
//! | [`Key`] | the identity of a client; a [`KeyExtractor`] takes it from a request |
//! | [`State`](strategy::State) | the data that one limit stores for one key |
//! | log | the part of a [`MovingWindow`]'s state that lists the instants at which units were spent |
//! | cost | the units that one hit spends |
//! | [slot](Slots) | the unit of an [`InFlightLayer`]; by default, a request in flight takes 1 slot of its key |
//! | [`Decision`] | the result of a hit: admitted, admitted after a delay, or refused, with the numbers of each limit |
//! | [`Storage`] | keeps states and applies a policy to them atomically |
//! | [wrapper](storage) | a storage around another storage, such as a cache of refusals |
//! | [shadow limit](Policy#shadow-limits) | a limit that counts requests and refuses none |
//!
//! | operation | effect |
//! |---|---|
//! | hit | spends its cost if all limits admit it, and nothing otherwise |
//! | peek | returns the decision that a hit would get, and spends nothing |
//! | refund | returns the units of an admitted hit |
//! | charge | spends units even if fewer remain, which can leave the key in debt |
//! | settle | corrects the cost of an admitted hit: refunds or charges the difference |
//! | clear | deletes the states of a key |
//!
//! # Features
//!
//! | feature | description |
//! |---|---|
//! | `axum` (default) | [`PeerIp`] reads `ConnectInfo` and `MockConnectInfo`; [`Head::uri`] reads `OriginalUri`; `extract::MatchedPath`; [`Decision`], [`Reservation`], [`Meter`] and [`Permit`] are extractors |
//! | `quanta` (default) | [`SystemClock`](storage::SystemClock) reads the processor's tick counter, which is faster than the system's clock |
//! | `ring` (default) | the cryptography of TLS connections to servers; without it, the program installs a `CryptoProvider` of rustls |
//! | `tracing` (default) | logs refusals, failures of the storage and [lints](Lint) |
//! | `tonic` | [`PeerIp`] reads the connect info of tonic's server |
//! | `calendar` | months, years and time zones in a [`CalendarWindow`], with the zone data of the system |
//! | `calendar-bundled` | time zone data compiled into the program, for systems that have none |
//! | `lookup` | `PolicyLookup`, policies from a database |
//! | `client` | `ClientLimitLayer`, for clients that keep to the limits of other servers |
//! | `metrics` | `metrics_observer`, and metrics of the storages |
//! | `partition-key` | `Headers::partition_key`, which adds a hash of the key to the IETF header fields |
//! | `redis` | `RedisStorage`, for Redis and Valkey |
//! | `redis-cluster`, `redis-sentinel`, `redis-rustls` | `redis+cluster://`, `redis+sentinel://` and `rediss://` URLs |
//! | `redis-connection-manager`, `redis-cluster-async` | `RedisStorage` on a connection of the crate `redis` 1 that a program already has |
//! | `memcached`, `memcached-rustls` | `MemcachedStorage`, and `memcacheds://` URLs |
//! | `etcd`, `etcd-rustls` | `EtcdStorage`, and `etcds://` URLs |
//! | `serde` | [`Quota`], [`Policy`], [`Headers`], [`OnError`] and [`StorageUrl`](storage::StorageUrl) as strings |
//! | `postgres`, `postgres-rustls` | `PostgresStorage`, and `sslmode=require` in its URL |
//! | `deadpool-postgres` | `PostgresStorage::from_pool`, on a pool of the crate `deadpool-postgres` 0.14 |
//! | `sqlite` | `SqliteStorage`, a file that survives restarts; compiles SQLite, which needs a C compiler |
//! | `testing` | property tests for custom strategies and storages |
//!
//! The [examples](guide#examples) have some features of their own, such as `grpc` and `websocket`
//! in the commands of the guides.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "client")]
mod client;
mod decision;
mod error;
pub mod extract;
mod future;
#[cfg(any(doc, doctest))]
pub mod guide;
mod headers;
mod in_flight;
mod key;
mod layer;
mod limiter;
mod lint;
#[cfg(feature = "lookup")]
mod lookup;
mod meter;
mod middleware;
mod observe;
mod policy;
mod quota;
mod rejection;
mod reservation;
#[cfg(feature = "serde")]
mod serde;
mod service;
pub mod storage;
pub mod strategy;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod time;
mod usage;
mod waiting;

#[cfg(feature = "client")]
pub use self::client::{ClientLimit, ClientLimitError, ClientLimitFuture, ClientLimitLayer, CopyRequest, NoRetry};
pub use self::decision::{Decision, DecisionSource};
pub use self::error::{BoxError, ConfigError};
#[doc(no_inline)]
pub use self::extract::{ClientIp, Global, Head, Header, KeyError, KeyExtractor, PeerIp};
pub use self::future::ResponseFuture;
pub use self::headers::Headers;
pub use self::in_flight::{
    InFlight, InFlightBody, InFlightFuture, InFlightLayer, LiveSlots, Permit, Slots, SlotsSource, slots_by,
};
pub use self::key::Key;
pub use self::layer::RateLimitLayer;
pub use self::limiter::{LocalLimiter, RateLimiter};
pub use self::lint::Lint;
#[cfg(feature = "lookup")]
pub use self::lookup::{IntoId, LookupError, PolicyLookup, Tenant};
pub use self::meter::Meter;
pub use self::middleware::OnError;
pub use self::middleware::{ChosenPolicy, IntoCost, IntoPolicySource, PolicySource, ResponseHead, policy_by};
#[cfg(feature = "metrics")]
pub use self::observe::metrics_observer;
pub use self::observe::{Event, EventKind};
pub use self::policy::{IntoPolicy, Limit, LivePolicy, Op, Policy, PolicyBuilder};
pub use self::quota::Quota;
pub use self::rejection::{
    EmptyRejection, GrpcRejection, LimitExceeded, ProblemRejection, RejectReason, Rejection, TextRejection,
};
pub use self::reservation::{Counter, Reservation, Reservations, SettleFuture};
pub use self::service::{CloneService, RateLimit};
#[cfg(feature = "etcd")]
#[doc(no_inline)]
pub use self::storage::EtcdStorage;
#[cfg(feature = "memcached")]
#[doc(no_inline)]
pub use self::storage::MemcachedStorage;
#[cfg(feature = "postgres")]
#[doc(no_inline)]
pub use self::storage::PostgresStorage;
#[cfg(feature = "redis")]
#[doc(no_inline)]
pub use self::storage::RedisStorage;
#[cfg(feature = "sqlite")]
#[doc(no_inline)]
pub use self::storage::SqliteStorage;
#[doc(no_inline)]
pub use self::storage::{MemoryStorage, Storage};
#[doc(no_inline)]
pub use self::strategy::{
    CalendarWindow, ElasticWindow, FixedWindow, LeakyBucket, Lockout, MovingWindow, SlidingWindowCounter, TokenBucket,
};
pub use self::time::Timestamp;
#[cfg(feature = "axum")]
pub use self::usage::UsageHandler;
pub use self::usage::{Usage, UsageError};
