//! Rate limiting for HTTP services on tower: axum, hyper and tonic. [`RateLimiter`] is the same
//! limiter without HTTP.
//!
//! ```
//! use axum::Router;
//! use axum::routing::get;
//! use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
//!
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()));
//! ```
//!
//! Each client is admitted sixty times a minute. Every response says how many requests are left. The
//! sixty-first is answered with 429 and says when to retry. The counts are in memory, which is bounded.
//! Serve an axum router with `into_make_service_with_connect_info::<SocketAddr>()`: the layer reads
//! the peer's address from it. Behind proxies, [`ClientIp`] finds the client.
//!
//! # Words
//!
//! | word | means |
//! |---|---|
//! | [`Quota`] | how much, per how long, with what burst: `100/minute` |
//! | [`Strategy`](strategy::Strategy) | the rule that spends a quota over time: a pure function |
//! | [`Limit`] | a quota with its strategy |
//! | [`Policy`] | the limits that bind one key, admitted all together or not at all |
//! | [`Key`] | who is asking; a [`KeyExtractor`] takes it from a request |
//! | [`State`](strategy::State) | what one limit remembers of one key |
//! | cost | the units one hit takes, 1 unless said |
//! | [`Decision`] | the answer: admitted, perhaps after a delay, or refused, with each limit's numbers |
//! | [`Storage`] | keeps states and lets a policy decide on them, atomically |
//! | hit, peek, refund, clear | spend; look without spending; give back; forget the key |
//!
//! # Picture
//!
//! ```text
//! request ---> KeyExtractor ---> Key -----.
//!    |                                    +--> Storage: load states, decide, save
//!    '-------> which Policy? -------------'                   |
//!                                                          Decision
//!                                                             |
//!    admitted: (wait for the turn) -> inner service -> response --.
//!    refused:  Rejection -> 429 ----------------------------------+--> header fields
//! ```
//!
//! # Examples
//!
//! Limits stack. The outer one is asked first, and the response tells of the tighter one:
//!
//! ```
//! use axum::Router;
//! use axum::routing::{get, post};
//! use tower_ratelimit::{Global, PeerIp, Policy, Quota, RateLimitLayer};
//!
//! let login: Policy = "moving-window 5/minute".parse()?;
//! let app: Router = Router::new()
//!     .route("/login", post(|| async { "welcome" }).layer(RateLimitLayer::new(login, PeerIp::new())))
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimitLayer::new(Quota::per_second(1_000), Global));
//! # Ok::<(), tower_ratelimit::ConfigError>(())
//! ```
//!
//! Several limits under one key are taken together or not at all, and each tier has its own. Key by
//! the authenticated user: a client that may choose its key gets a new quota with each.
//!
//! ```
//! use tower_ratelimit::extract::Extension;
//! use tower_ratelimit::{Key, KeyExtractor, PeerIp, Policy, Quota, RateLimitLayer, policy_by};
//!
//! /// What an authentication layer, outside of this one, inserts into the extensions.
//! #[derive(Clone)]
//! struct User {
//!     id: u64,
//!     has_paid: bool,
//! }
//!
//! let free = "10/second; moving-window 1000/day".parse::<Policy>()?.with_name("free");
//! let paid = Policy::from(Quota::per_second(200).burst(400)).with_name("paid");
//! let tier = policy_by(move |head| {
//!     let has_paid = head.extensions.get::<User>().is_some_and(|user| user.has_paid);
//!     if has_paid { paid.clone() } else { free.clone() }
//! });
//! let by_user = Extension::by(|user: &User| Key::from(user.id));
//! let layer = RateLimitLayer::new(tier, by_user.or(PeerIp::new()));
//! # Ok::<(), tower_ratelimit::ConfigError>(())
//! ```
//!
//! What a request costs, and what is answered when it is refused, are closures over its [`Head`]:
//!
//! ```
//! use http::Response;
//! use tower_ratelimit::extract::Head;
//! use tower_ratelimit::{PeerIp, Quota, RateLimitLayer, Refused};
//!
//! let layer = RateLimitLayer::new(Quota::per_minute(100), PeerIp::new())
//!     .cost(|head: &Head<'_>| if head.uri().path() == "/export" { 20 } else { 1 })
//!     .rejection(|refused: Refused<'_>, _: &Head<'_>| {
//!         let mut response = Response::new("slow down".to_owned());
//!         *response.status_mut() = refused.status();
//!         response
//!     });
//! ```
//!
//! Behind a load balancer the client is who it says; what need not be limited is skipped; only failures are charged; and
//! clients are told in the fields they read:
//!
//! ```
//! use tower_ratelimit::extract::{AllowList, Head};
//! use tower_ratelimit::{ClientIp, Headers, ProblemRejection, Quota, RateLimitLayer, ResponseHead};
//!
//! let client = ClientIp::behind(["10.0.0.0/8"])?;
//! let layer = RateLimitLayer::new(Quota::per_minute(5), client.clone())
//!     .skip(AllowList::by(client).allow("192.0.2.0/24"))
//!     .skip(|head: &Head<'_>| head.uri().path() == "/health")
//!     .charge_when(|response: &ResponseHead<'_>| response.status == 401)
//!     .headers(Headers::x_rate_limit().reset_in_seconds())
//!     .rejection(ProblemRejection);
//! # Ok::<(), tower_ratelimit::ConfigError>(())
//! ```
//!
//! Without HTTP, the same limiter:
//!
//! ```
//! use tower_ratelimit::{Key, Quota, RateLimiter};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = RateLimiter::new(Quota::per_minute(5));
//! if limiter.hit(&Key::from("alice")).await?.is_refused() {
//!     println!("not now, alice");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Which strategy
//!
//! | strategy | for | in any period of a quota of N | a greedy client around a turn | remembers |
//! |---|---|---|---|---|
//! | [`SlidingWindowCounter`] | the default: "60 per minute" | at most 2N, usually about N | 101 | 16 bytes |
//! | [`TokenBucket`] | APIs whose clients work in bursts of B | at most B + N | 103; 13 with a burst of 10 | 16 bytes |
//! | [`MovingWindow`] | a promise to the letter, small quotas | at most N | 100 | 16 bytes a hit |
//! | [`FixedWindow`] | the simplest; billing by the hour or day, aligned | at most 2N - 1, 2N aligned | 199 | 16 bytes |
//! | [`ElasticWindow`] | locking out a client that keeps trying, until it is quiet for a period | at most N between silences | 99 | 16 bytes |
//! | [`LeakyBucket`] | delaying instead of refusing | one start each P/N, Q waiting | all, one by one | 16 bytes |
//!
//! The column in the middle is a client with `100/minute` that hits once at second 0 and then as often as it can from second
//! 59 to 61: a fixed window lets the end of one minute and the beginning of the next through at once.
//!
//! All of them are exact: instants are whole microseconds, and where a period is no multiple of the amount, fractions of
//! them. None of them charges a refused hit.
//!
//! # What the header fields mean
//!
//! | field | on | says |
//! |---|---|---|
//! | `X-RateLimit-Limit` | every limited response | the most units that can be spent at one instant: the amount, or a bucket's burst |
//! | `X-RateLimit-Remaining` | every limited response | units that can still be spent, after this request |
//! | `X-RateLimit-Reset` | every limited response | when more than that remain: seconds since the unix epoch, rounded up ([or from now](Headers::reset_in_seconds)) |
//! | `Retry-After` | refusals | seconds after which this request would be admitted, at least 1; absent when it never can be |
//! | `Cache-Control` | refusals | `no-store`: the next request may be admitted |
//!
//! Of several limits the one shown is the one that refuses for the longest, else the one with the least remaining. Of
//! stacked layers, the one with fewer remaining.
//!
//! The fields of the IETF's draft (`RateLimit`, `RateLimit-Policy`), and those of an early version of it, can be written too, or
//! instead: see [`Headers`]. What a leaky bucket made wait is told how things stand when its turn has come.
//!
//! # In which order a layer does things
//!
//! 1. [`skip`](RateLimitLayer::skip): whatever it names passes, and nothing else looks at it.
//! 2. The policy is chosen ([`policy_by`]): `None` passes.
//! 3. The key is taken: `None` passes, a missing one is answered with 400, 401 or 500.
//! 4. The [cost](RateLimitLayer::cost) is asked for; 0 passes.
//! 5. The limits decide, all together. What they refuse is answered, and the inner service never sees it.
//! 6. [Shadow limits](Policy#shadow-limits) decide, each for itself, beside a request that was admitted.
//! 7. The inner service is called, after the delay of a leaky bucket.
//! 8. Its response says whether the request [is charged](RateLimitLayer::charge_when), and gets the header fields.
//!
//! A CORS layer belongs outside of this one: then preflights are answered before they are counted, and a refusal carries the
//! fields without which a browser shows its page nothing but an error. Where it has to be inside, `skip` the preflights.
//!
//! # Features
//!
//! - `tracing` (default): events for what an operator must know: refusals at debug, storage trouble and [lints](Lint) at warn.
//! - `quanta` (default): [`storage::SystemClock`] reads the processor's tick counter, which is
//!   faster than the system's clock.
//! - `axum` (default): [`PeerIp`] reads `ConnectInfo` and `MockConnectInfo`, [`Head::uri`] reads
//!   `OriginalUri`, `extract::MatchedPath` is there, and [`Decision`] is an extractor.
//! - `tonic`: [`PeerIp`] reads the connect info of tonic's server. [`GrpcRejection`] is there without it.
//! - `metrics`: `MetricsObserver` counts decisions by policy and outcome.
//! - `partition-key`: `Headers::partition_key` adds the parameter `pk`, a keyed hash of the key, to
//!   the IETF's fields.
//! - `redis`: [`storage::RedisStorage`](storage) keeps the counters on a Redis or Valkey server; `redis-cluster`, `redis-sentinel` and
//!   `redis-rustls` (TLS) are for URLs that need them.
//! - `memcached`: `storage::MemcachedStorage`, for the same on memcached servers.
//! - `etcd`, `etcd-rustls` (TLS): `storage::EtcdStorage`, for counters that processes share and that have to survive a server.
//! - `testing`: the laws as suites of tests, for strategies and [storages](storage::Cas) of your own.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod admission;
mod aftermath;
mod decision;
mod error;
pub mod extract;
mod future;
mod headers;
mod key;
mod layer;
mod limiter;
mod lint;
mod observe;
mod per_request;
mod policy;
mod quota;
mod rejection;
mod rules;
mod service;
pub mod storage;
pub mod strategy;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod time;

pub use self::decision::{Decision, Way};
pub use self::error::{BoxError, ConfigError};
#[doc(no_inline)]
pub use self::extract::{ClientIp, Global, Head, Header, KeyExtractor, Missing, PeerIp};
pub use self::future::ResponseFuture;
pub use self::headers::Headers;
pub use self::key::Key;
pub use self::layer::RateLimitLayer;
pub use self::limiter::RateLimiter;
pub use self::lint::Lint;
#[cfg(feature = "metrics")]
pub use self::observe::MetricsObserver;
pub use self::observe::{Event, Observer, What};
pub use self::per_request::{ChosenPolicy, IntoCost, IntoPolicies, Policies, ResponseHead, Skip, policy_by};
pub use self::policy::{IntoPolicy, Limit, Op, Policy, PolicyBuilder};
pub use self::quota::Quota;
pub use self::rejection::{
    EmptyRejection, GrpcRejection, ProblemRejection, Refusal, Refused, Rejection, TextRejection, rejection_by,
};
pub use self::rules::OnError;
pub use self::service::{CloneService, RateLimit};
#[cfg(feature = "etcd")]
#[doc(no_inline)]
pub use self::storage::EtcdStorage;
#[cfg(feature = "memcached")]
#[doc(no_inline)]
pub use self::storage::MemcachedStorage;
#[cfg(feature = "redis")]
#[doc(no_inline)]
pub use self::storage::RedisStorage;
#[doc(no_inline)]
pub use self::storage::{MemoryStorage, Storage};
#[doc(no_inline)]
pub use self::strategy::{ElasticWindow, FixedWindow, LeakyBucket, MovingWindow, SlidingWindowCounter, TokenBucket};
pub use self::time::Timestamp;
