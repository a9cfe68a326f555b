//! Guides: choosing limits, finding clients, sharing limits, and running them in production.
//!
//! | task | guide |
//! |---|---|
//! | Choose a strategy | [Choosing a strategy](choosing_a_strategy) |
//! | Sell requests per day or month, in the time zone of each tenant | [Quotas by day and month](quotas_by_day_and_month) |
//! | Find the client, also behind a proxy | [Keys and proxies](keys_and_proxies) |
//! | Set up nginx, Cloudflare, a cloud's load balancer or another proxy | [Proxies by name](proxies_by_name) |
//! | Set the cost of a request, before or after its response, or meter messages and chunks | [Costs](costs) |
//! | Limit users, tenants and all clients together, leave room for people | [Plans, tenants and all clients](plans_and_tenants) |
//! | Lock out clients that guess passwords | [Protecting a login](protecting_a_login) |
//! | Refuse requests, let them wait, choose header fields | [Headers and refusals](headers_and_refusals) |
//! | Keep to the limits of other servers, as their client | [Limits of other servers](limits_of_other_servers) |
//! | Limit how many requests are in flight at once: streams, uploads, web sockets | [Requests in flight](requests_in_flight) |
//! | Share limits between processes: choose and connect a storage, also over TLS | [Several processes](several_processes) |
//! | Handle failures of Redis and other storages | [Outages](outages) |
//! | Keep the counts in a store of your own | [Write a storage](write_a_storage) |
//! | Test an app that has limits | [Testing your app](testing_your_app) |
//! | Plan memory and servers for a number of clients | [Sizing](sizing) |
//! | Export metrics, set alerts, list the keys in use, read logs and lints | [Monitoring](monitoring) |
//! | Start, check health, rotate logins, change limits, upgrade | [Deploying](deploying) |
//! | Move from `tower_governor` | [Migrating](migrating_from_tower_governor) |
//! | Move from `axum-governor`, `actix-limitation` or a `DashMap` | [Migrating from others](migrating_from_others) |
//!
//! # The path of a request
//!
//! ```text
//! request ---> KeyExtractor ---> Key -----.
//!    |                                    +--> Storage: load states, decide, save
//!    '-------> which Policy? -------------'                   |
//!                                                          Decision
//!                                                             |
//!    admitted: (wait for the delay) -> inner service -> response --.
//!    refused:  Rejection -> 429 -----------------------------------+--> header fields
//! ```
//!
//! A [`RateLimitLayer`] handles a request in this order:
//!
//! 1. [`skip`](crate::RateLimitLayer::skip) and [`allow_list`](crate::RateLimitLayer::allow_list)
//!    select the requests that pass without any other step.
//! 2. The policy is chosen, or read from a [`LivePolicy`](crate::LivePolicy). If
//!    [`policy_by`](crate::policy_by) returns `None`, the request passes. If a `PolicyLookup` has
//!    no cached result, the request waits for the lookup here.
//! 3. The key is extracted. If the extractor returns `None`, the request passes. If the key is
//!    missing, the response is 400, 401 or 500.
//! 4. The [cost](crate::RateLimitLayer::cost) is computed. A request that costs 0 passes, and its
//!    header fields report the state of the limits.
//! 5. All limits of the policy decide together. If one refuses, the response is 429, and the inner
//!    service is not called. With [`wait`](crate::RateLimitLayer::wait), the request may wait here
//!    until it is admitted.
//! 6. [Shadow limits](crate::Policy#shadow-limits) count the request if it was admitted.
//! 7. The inner service is called, after the delay if the limit is a leaky bucket.
//! 8. [`settle`](crate::RateLimitLayer::settle) or
//!    [`charge_when`](crate::RateLimitLayer::charge_when) corrects the cost by the head of the
//!    response, or [`clear_when`](crate::RateLimitLayer::clear_when) clears the key. Then the
//!    header fields are written.
//! 9. With [`settle_later`](crate::RateLimitLayer::settle_later), a
//!    [`Reservation`](crate::Reservation) corrects the cost at any time after step 7 began.
//!
//! A request spends its cost in step 5. The units stay spent if the inner service fails, or if the
//! client hangs up after step 7 began.
//!
//! # Stacked layers
//!
//! The outer layer decides first, and an inner layer decides only on requests that the outer one
//! admits.
//!
//! - The response shows the numbers of the layer with fewer remaining units, and those of a rate rather
//!   than those of requests in flight. A refusal keeps the numbers of the layer that refuses.
//! - The `Retry-After` of an inner layer's refusal is the longer wait of both layers, if the
//!   request spent the outer layer's last units and the outer layer writes header fields.
//! - If an inner layer refuses, the units of the outer layer stay spent. To spend units of all limits
//!   or of none, put them into [one policy](choosing_a_strategy#several-limits), or, if their keys
//!   differ, into [one layer](plans_and_tenants).
//!
//! Put a CORS layer outside of the rate limit. Then preflight requests are answered before they are
//! counted, and refusals carry the fields that let a browser show them to the page. If the CORS
//! layer must be inside, skip `OPTIONS` requests.
//!
//! # Without HTTP
//!
//! [`RateLimiter`] limits jobs, messages, and keys in a body:
//!
//! ```
//! use tower_ratelimit::{Key, LocalLimiter, Quota, RateLimiter};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = RateLimiter::new(Quota::per_minute(5));
//! if limiter.hit(&Key::from("alice")).await?.is_refused() {
//!     println!("not now, alice");
//! }
//! // In memory, no await is needed.
//! let limiter = LocalLimiter::new(Quota::per_minute(5));
//! if limiter.admit(&Key::from("alice")) {
//!     println!("hello, alice");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - A refusal spends nothing from any limit of the policy, and `Retry-After` is the time until the
//!   request would be admitted. There are two exceptions: a refusal extends an [elastic
//!   window](crate::ElasticWindow), and a lockout [by refusals](crate::Lockout::by_refusals) counts it.
//! - Memory is bounded: see [memory](sizing#memory-of-the-process).
//! - A client cannot choose its key, if the key is [`PeerIp`](crate::PeerIp), or
//!   [`ClientIp`](crate::ClientIp) that trusts your proxies only: see
//!   [proxies](keys_and_proxies#behind-a-proxy).
//! - The service that was polled ready is the one that is called, except after a delay or a wait.
//!   Errors and bodies of the inner service are passed on unchanged.
//! - Your service stays up while the storage is down: see [outages].
//! - The crate contains no `unsafe` code.
//!
//! # Examples
//!
//! | example | shows |
//! |---|---|
//! | [`client`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/client.rs) | an HTTP client that keeps to its own limit and to those of servers |
//! | [`custom_extractor`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/custom_extractor.rs) | a key of your own: the tenant in the host name, and the route |
//! | [`custom_storage`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/custom_storage.rs) | a storage of your own with its tests: a map that compares and swaps |
//! | [`custom_strategy`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/custom_strategy.rs) | a strategy of your own with its tests: a penalty box |
//! | [`grpc`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/grpc.rs) | one limit for a tonic server and an HTTP server |
//! | [`hyper`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/hyper.rs) | a hyper server without axum |
//! | [`login`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/login.rs) | a login form that locks accounts and addresses |
//! | [`observe`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/observe/main.rs) | metrics for Prometheus, a dashboard, a shadow limit, and logs |
//! | [`operator`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/operator.rs) | the limits of a client, for an operator: look, lock, clear, list |
//! | [`playground`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/playground/main.rs) | a page that shows the effect of each strategy |
//! | [`proxies`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/proxies.rs) | the client behind a load balancer |
//! | [`redis`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/redis.rs) | a limit that all processes share through Redis |
//! | [`reload`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/reload.rs) | limits in a file that is read again when it changes |
//! | [`server`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/server/main.rs) | a server whose limits are set by flags |
//! | [`stacking`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/stacking.rs) | a strict limit inside a wide one |
//! | [`streams`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/streams.rs) | streams of events and WebSockets, two of each client at once |
//! | [`tenants`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/tenants.rs) | a plan for each user, a quota for each tenant, and a limit for all clients |
//! | [`tiers`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/tiers.rs) | limits by the tier of a user, and by address for guests |
//! | [`tokens`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/tokens.rs) | tokens of a language model, settled at the end of a stream |
//! | [`websocket`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/websocket.rs) | the messages of WebSockets |
//! | [`without_http`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/without_http.rs) | messages that are limited by their sender |
//! | [`unix_socket`](https://github.com/tower-ratelimit/tower-ratelimit/blob/main/examples/unix_socket.rs) | a server on a Unix socket behind nginx |
//!
//! The commands in these guides run in a checkout of the
//! [repository](https://github.com/tower-ratelimit/tower-ratelimit). `cargo run --example server`
//! starts an axum server that admits ten requests per minute, and `--help` lists its flags.
//!
//! [`RateLimitLayer`]: crate::RateLimitLayer
//! [`RateLimiter`]: crate::RateLimiter
#![cfg_attr(
    not(all(
        feature = "axum",
        feature = "client",
        feature = "etcd",
        feature = "lookup",
        feature = "memcached",
        feature = "metrics",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

// Markdown takes the first definition of a name. So rustdoc takes the links from `links.md` and
// checks them, and a forge takes those at the end of each guide. The same holds for the picture.
// `tests/structure/links.rs` compares the two.
//
// The code of a page that needs a feature is tested only with that feature.

pub mod choosing_a_strategy {
    #![doc = include_str!("../pictures/definitions.md")]
    #![doc = include_str!("links.md")]
    //! Compares the strategies and helps to choose one.
    #![doc = include_str!("choosing_a_strategy.md")]
}

pub mod quotas_by_day_and_month {
    #![doc = include_str!("links.md")]
    //! Counts by days, weeks, months and years of the calendar, in any time zone.
    #![cfg_attr(
        any(not(doctest), all(feature = "calendar", feature = "lookup")),
        doc = include_str!("quotas_by_day_and_month.md")
    )]
}

pub mod keys_and_proxies {
    #![doc = include_str!("links.md")]
    //! Finds the client: by address, behind proxies, or by login.
    #![cfg_attr(any(not(doctest), feature = "lookup"), doc = include_str!("keys_and_proxies.md"))]
}

pub mod proxies_by_name {
    #![doc = include_str!("links.md")]
    //! Lists proxies and cloud services: the field, the networks to trust, and the code to write.
    #![doc = include_str!("proxies_by_name.md")]
}

pub mod costs {
    #![doc = include_str!("links.md")]
    //! Sets the cost of a request, before or after its response.
    #![doc = include_str!("costs.md")]
}

pub mod plans_and_tenants {
    #![doc = include_str!("links.md")]
    //! Limits users, tenants and all clients in one decision.
    #![cfg_attr(any(not(doctest), feature = "lookup"), doc = include_str!("plans_and_tenants.md"))]
}

pub mod protecting_a_login {
    #![doc = include_str!("links.md")]
    //! Protects a login form against brute force, credential stuffing and password spraying.
    #![doc = include_str!("protecting_a_login.md")]
}

pub mod headers_and_refusals {
    #![doc = include_str!("links.md")]
    //! Describes header fields, responses to refused requests, and waiting instead of refusing.
    #![doc = include_str!("headers_and_refusals.md")]
}

pub mod requests_in_flight {
    #![doc = include_str!("links.md")]
    //! Limits how many requests of a client are in flight at once, until their responses have ended.
    #![doc = include_str!("requests_in_flight.md")]
}

pub mod limits_of_other_servers {
    #![doc = include_str!("links.md")]
    //! Keeps a client to the limits that other servers report, and to its own.
    #![cfg_attr(
        any(not(doctest), feature = "client"),
        doc = include_str!("limits_of_other_servers.md")
    )]
}

pub mod several_processes {
    #![doc = include_str!("links.md")]
    //! Shares limits between processes: storages, connections, clocks, and wrappers that save
    //! calls.
    #![doc = include_str!("several_processes.md")]
}

pub mod outages {
    #![doc = include_str!("links.md")]
    //! Describes outages of a storage: the requests that fail, the duration, and the counts that
    //! are lost.
    #![doc = include_str!("outages.md")]
}

pub mod write_a_storage {
    #![doc = include_str!("links.md")]
    //! Keeps the counts in a store of your own: the methods, the test suite, and the URL.
    #![doc = include_str!("write_a_storage.md")]
}

pub mod testing_your_app {
    #![doc = include_str!("links.md")]
    //! Tests an app that has limits, with a clock that the test moves.
    #![doc = include_str!("testing_your_app.md")]
}

pub mod sizing {
    #![doc = include_str!("links.md")]
    //! Estimates memory, time, servers and network for a number of clients.
    #![doc = include_str!("sizing.md")]
}

pub mod monitoring {
    #![doc = include_str!("links.md")]
    //! Describes metrics, a dashboard with alerts, observers, logs and lints.
    #![doc = include_str!("monitoring.md")]
}

pub mod deploying {
    #![doc = include_str!("links.md")]
    //! Describes the start of a program, health checks, logins that rotate, and changes of limits,
    //! counts and formats.
    #![doc = include_str!("deploying.md")]
}

pub mod migrating_from_tower_governor {
    #![doc = include_str!("links.md")]
    //! Translates each recipe of `tower_governor` to this crate.
    #![doc = include_str!("migrating_from_tower_governor.md")]
}

pub mod migrating_from_others {
    #![doc = include_str!("links.md")]
    //! Translates `axum-governor`, `actix-limitation` and a hand-written map of addresses to this
    //! crate.
    #![doc = include_str!("migrating_from_others.md")]
}
