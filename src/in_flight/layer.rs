//! The layer and its options.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use tower_layer::Layer;

use super::admission::{SlotOptions, SlotState};
use super::service::InFlight;
use super::slots::SlotsSource;
use crate::error::{ConfigError, or_panic};
use crate::extract::{AllowList, Head, KeyExtractor};
use crate::headers::Headers;
use crate::lint::Lint;
use crate::middleware::common::{Shared, common_options};
use crate::middleware::config::{LayerConfig, LayerMember};
use crate::middleware::{IntoCost, OnError};
use crate::observe::Event;
use crate::rejection::{RejectReason, TextRejection};
use crate::storage::{AnyStorage, LONGEST_TIME_TO_LIVE, Storage, StorageError};
use crate::waiting::WaitBounds;

/// Limits the number of requests of each key that are in flight at the same time.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_ratelimit::{InFlightLayer, PeerIp};
///
/// let limit = InFlightLayer::new(20, PeerIp::new());
/// let app: Router = Router::new().route("/events", get(|| async { "a stream" })).layer(limit);
/// ```
///
/// A request takes a slot of its key before the inner service is called, and gives it back when the
/// body of its response has ended. Exactly one of these events ends the request:
///
/// - The body has returned its last frame or an error, or was dropped. A client that disconnects causes
///   the drop.
/// - The response has no body: it is empty, answers a `HEAD` request, or has the status 204 or 304. The
///   refusal of a [`RateLimitLayer`](crate::RateLimitLayer) inside counts as a response without a body.
/// - The inner service has returned an error or has panicked, or the response future was dropped.
///
/// A [`Permit`](crate::Permit) holds the slot longer, for an upgraded connection or a spawned job.
///
/// A request without a free slot never reaches the inner service. Its response is a 429 with
/// `Retry-After: 1`. If the key is [`Global`](crate::Global), it is a 503, because the service is
/// overloaded, and the client has not exceeded a limit of its own. `X-RateLimit-Limit` and
/// `X-RateLimit-Remaining` report the slots. There is no `X-RateLimit-Reset`, because the end of a
/// request is not known.
///
/// All services of a layer and of its clones share their counts. A method such as
/// [`headers`](Self::headers) returns a layer with the same counts. The counts are kept in memory, and
/// only for keys with requests in flight. A [storage](Self::storage) shares them with other processes.
///
/// The [policy](Event::policy) of an [event](Self::observer) has the name of the [`Slots`](crate::Slots).
/// Its only limit has the text `in-flight 20` for 20 slots.
///
/// The guide on [requests in flight](crate::guide::requests_in_flight) explains streams, uploads,
/// web sockets, and the combination with a [`RateLimitLayer`](crate::RateLimitLayer).
///
/// # Errors
///
/// The error type is that of the inner service. The layer itself never returns an error, but responds
/// with a status, like a [`RateLimitLayer`](crate::RateLimitLayer#errors).
#[doc(alias("bulkhead", "concurrency limit", "ConcurrencyLimitLayer"))]
#[must_use = "a layer limits nothing until it is put around a service"]
pub struct InFlightLayer<R = TextRejection> {
    shared: Arc<Shared<SlotState, R>>,
}

impl InFlightLayer {
    /// Creates a layer that counts in memory.
    ///
    /// `key` extracts the key of the client from a request. `slots` is one of these:
    ///
    /// | type | slots of a key |
    /// |---|---|
    /// | `u32` or [`Slots`](crate::Slots) | the same for all requests |
    /// | [`LiveSlots`](crate::LiveSlots) | the same for all requests, but the number can change later |
    /// | the result of [`slots_by`](crate::slots_by) | chosen by a closure for each request |
    pub fn new(slots: impl Into<SlotsSource>, key: impl KeyExtractor) -> Self {
        let config = LayerConfig::new(LayerMember { policies: slots.into().0, key: Arc::new(key), cost: None });
        Self { shared: Shared::new(SlotState::new(SlotOptions::new(config)), Arc::new(TextRejection::new())) }
    }
}

/// Slots, waiting and refusals.
impl<R> InFlightLayer<R> {
    /// Sets the number of slots that each request takes. Defaults to 1.
    ///
    /// The closure returns a `u32`, or a `Result<u32, KeyError>`, as that of
    /// [`RateLimitLayer::cost`](crate::RateLimitLayer::cost). A request that costs 0 passes and takes no
    /// slot. A request that costs more than all slots is always refused, without `Retry-After`.
    ///
    /// For example, a slot can stand for a megabyte of memory that an upload needs:
    ///
    /// ```
    /// use tower_ratelimit::{InFlightLayer, KeyError, PeerIp};
    ///
    /// let megabytes = InFlightLayer::new(256, PeerIp::new()).cost(|head| {
    ///     let length = head.headers.get("content-length").and_then(|length| length.to_str().ok()?.parse::<u32>().ok());
    ///     length.map(|bytes| bytes.div_ceil(1_000_000)).ok_or_else(|| KeyError::client("Content-Length is missing"))
    /// });
    /// ```
    pub fn cost<F, T>(self, cost: F) -> Self
    where
        F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
        T: IntoCost,
    {
        self.with_config(|config| config.first.cost = Some(Arc::new(move |head: &Head<'_>| cost(head).into_cost())))
    }

    /// Lets requests wait for up to `max_wait` instead of refusing them. At most `max_waiting` requests of
    /// this layer wait at the same time. Defaults to refusing immediately.
    ///
    /// - The requests of a key get their slots in the order of arrival. A new request does not overtake
    ///   those that wait, even if it needs fewer slots than the first of them.
    /// - The layer has `max_waiting` places. A request gets a place only while its key has fewer
    ///   waiting requests than there are free places. So one key can take half of the places, and
    ///   two keys a third each. The key of [`Global`](crate::Global) can take all of them.
    /// - A request is refused if it gets no place, or no slots within `max_wait`. A request that
    ///   needs more slots than its key has is refused immediately.
    /// - A request that waits holds no permit of the inner service. When it has its slots, the
    ///   layer waits until a clone of the inner service is ready, and calls the clone.
    /// - If the client of a waiting request disconnects, the request leaves the queue.
    /// - In a [shadow](Self::shadow) layer, no request waits.
    /// - With a [storage](Self::storage), a request first waits for the reply of the storage. If
    ///   the storage has no slots for the request, the request takes a place, and `max_wait`
    ///   begins. The order of arrival holds within a process, which asks the storage again every
    ///   100 ms. So small requests of other processes can overtake a large one. A process passes
    ///   its slots on to its own waiting requests, so it keeps them as long as requests wait in it,
    ///   and a process that has none may get none. If the storage fails meanwhile,
    ///   [`OnError`](crate::OnError) decides on all requests of the key that wait in this process.
    ///
    /// A change of [`LiveSlots`](crate::LiveSlots) applies to waiting requests when a request of
    /// their key arrives or ends. A waiting request that needs more slots than there are after the
    /// change is refused.
    ///
    /// The observer and the log get one decision for each request, when its wait is over.
    ///
    /// # Panics
    ///
    /// The response future panics if the request has to wait outside of a tokio runtime with time enabled.
    pub fn wait(self, max_wait: Duration, max_waiting: usize) -> Self {
        self.with_config(|config| config.wait = Some(WaitBounds { max_wait, max_waiting }))
    }

    /// Sets the time that `Retry-After` of a refusal reports, in whole seconds, rounded up, at
    /// least 1. Defaults to 1 second.
    ///
    /// The layer does not know when a request in flight will end. For long streams, choose a longer time.
    pub fn retry_after(self, retry_after: Duration) -> Self {
        self.with_options(|options| options.retry_after = retry_after)
    }

    /// Sets the [`Rejection`](crate::Rejection), as
    /// [`RateLimitLayer::rejection`](crate::RateLimitLayer::rejection) does. Defaults to
    /// [`TextRejection`].
    pub fn rejection<T>(self, rejection: T) -> InFlightLayer<T> {
        InFlightLayer { shared: Shared::new(SlotState::new(self.shared.options.clone()), Arc::new(rejection)) }
    }

    /// Returns the number of slots that all keys use in this process at this moment.
    pub fn in_use(&self) -> u64 {
        self.shared.options.table.in_use()
    }

    fn with_config(self, change: impl FnOnce(&mut LayerConfig)) -> Self {
        self.with_options(|options| options.config = options.config.clone().with(change))
    }

    fn with_options(self, change: impl FnOnce(&mut SlotOptions)) -> Self {
        let mut options = self.shared.options.clone();
        change(&mut options);
        Self { shared: Shared::new(SlotState::new(options), Arc::clone(&self.shared.rejection)) }
    }
}

/// Slots that several processes share.
impl<R> InFlightLayer<R> {
    /// Shares the slots with the layers of other processes through `storage`, and sets the action
    /// of the layer if the storage fails. Defaults to counting in memory, which never fails. Call
    /// this method before the layer is used, because the returned layer begins to count anew.
    ///
    /// ```
    /// # #[cfg(feature = "redis")]
    /// # fn shared() -> Result<(), tower_ratelimit::ConfigError> {
    /// use tower_ratelimit::{InFlightLayer, OnError, PeerIp, RedisStorage};
    ///
    /// let redis = RedisStorage::new("redis://cache/")?;
    /// let streams = InFlightLayer::new(4, PeerIp::new()).storage(redis, OnError::Admit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Layers share the slots of equal keys if their [`Slots`](crate::Slots) have equal names. All of them
    /// together never use more slots than there are, as long as each process renews its slots in time:
    ///
    /// - A process renews them every third of the [time to live](Self::time_to_live). So a stream keeps
    ///   its slot for hours. A task does this in the tokio runtime of a request, and moves to that of
    ///   another request if the runtime ends. If there is none, the next request starts the task again.
    ///   While nothing polls that runtime, slots are only renewed by new requests for their keys.
    /// - The slots of a process that was killed are free after the time to live. So are those of a process
    ///   that has ended without [`close`](Self::close).
    /// - A process that was paused for longer claims its slots again, because its requests still
    ///   run. If others have taken these slots meanwhile, no request is admitted until enough
    ///   requests have ended. A process that holds free slots from an earlier claim can use them
    ///   until it claims again.
    /// - A request can be refused although a slot is free, because the process that has just given
    ///   it back has not informed the storage yet. On storages other than Redis, this also happens
    ///   if other processes changed the key before every attempt.
    ///
    /// A request waits for a round trip of the storage before the inner service is called, also in
    /// a [shadow](Self::shadow) layer. A request that the layer admits although the storage failed
    /// takes no slot. The storage must be a `RedisStorage`, `MemcachedStorage`, `EtcdStorage`,
    /// `PostgresStorage`, a [`Cas`](crate::storage::Cas), or an
    /// [`AnyStorage`](crate::storage::AnyStorage) with one of them.
    ///
    /// # Panics
    ///
    /// Panics if the storage shares no slots. [`try_storage`](Self::try_storage) returns an error instead.
    #[track_caller]
    pub fn storage(self, storage: impl Storage, on_error: OnError) -> Self {
        or_panic(self.try_storage(storage, on_error))
    }

    /// Like [`storage`](Self::storage), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage shares no slots: a [`MemoryStorage`](crate::MemoryStorage), a
    /// `SqliteStorage`, or a wrapper such as a [`Breaker`](crate::storage::Breaker).
    pub fn try_storage(self, storage: impl Storage, on_error: OnError) -> Result<Self, ConfigError> {
        let store = AnyStorage::new(storage).slots().ok_or_else(|| {
            ConfigError::new(
                "this storage shares no slots of requests in flight: use Redis, memcached, etcd or PostgreSQL \
                 without a wrapper, or no storage to count in memory",
            )
        })?;
        Ok(self.with_options(|options| options.share(Some(store))).with_config(|config| config.on_error = on_error))
    }

    /// Sets the time after which the slots of a process that was killed are free. Defaults to 30
    /// seconds. Has an effect only with a [storage](Self::storage). Call this method before the
    /// layer is used, because the returned layer begins to count anew.
    ///
    /// A process renews its slots every third of this time. It renews those of 64 keys at the same
    /// time, the oldest first. A key takes two round trips, or one on Redis. So the renewal of all
    /// keys takes the number of keys × 2 × the latency / 64, and half of it on Redis. For example,
    /// 10,000 keys take 0.3 seconds at a latency of 1 ms. The renewal must take less than two
    /// thirds of the time to live. Otherwise, other processes get slots that are in use. For a key
    /// whose server does not answer, the timeout of the storage counts instead of the latency.
    ///
    /// A request that waits for a claim fails after this time. The timeout of the storage ends a claim
    /// earlier, unless it is longer or nothing polls the runtime in which the claim was made.
    ///
    /// The clocks of the processes must differ by less than two thirds of the time to live. This
    /// does not apply to Redis, memcached and PostgreSQL, which use the clock of the server.
    ///
    /// # Panics
    ///
    /// Panics if the time is less than a second or more than an hour.
    #[track_caller]
    pub fn time_to_live(self, time_to_live: Duration) -> Self {
        assert!(
            (Duration::from_secs(1)..=LONGEST_TIME_TO_LIVE).contains(&time_to_live),
            "the time to live of slots must be at least a second and at most an hour, for example 30 seconds"
        );
        self.with_options(|options| options.live_for(time_to_live))
    }

    /// Gives all slots of this layer back to the [storage](Self::storage), so that other processes can use
    /// them at once. Call it at shutdown, after the last request. Without a storage, does nothing.
    ///
    /// `close` applies to all clones and services of the layer, from the first poll of the future:
    ///
    /// - Slots in use are given back, too, for example those of a WebSocket that outlives the server.
    /// - Later requests, and those that wait, are treated as if the storage had failed: see
    ///   [`OnError`](crate::OnError).
    ///
    /// # Errors
    ///
    /// Returns the first error of the storage. The slots that are not given back are free after the
    /// [time to live](Self::time_to_live).
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tokio::net::TcpListener;
    /// use tower_ratelimit::{Global, InFlightLayer};
    ///
    /// async fn serve(
    ///     listener: TcpListener,
    ///     limit: InFlightLayer,
    ///     stop: impl Future<Output = ()> + Send + 'static,
    /// ) -> Result<(), Box<dyn std::error::Error>> {
    ///     let app: Router = Router::new().route("/events", get(|| async { "a stream" })).layer(limit.clone());
    ///     axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    ///     limit.close().await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn close(&self) -> impl Future<Output = Result<(), StorageError>> + Send + use<R> {
        self.shared.options.close()
    }
}

/// Shadow mode.
impl<R> InFlightLayer<R> {
    /// Runs the layer in shadow mode: it counts, and reports to its [observer](Self::observer) and the
    /// log, but forwards every request. Defaults to off.
    ///
    /// A request that it would have refused takes no slot. Responses get no header fields from this layer.
    pub fn shadow(self) -> Self {
        self.with_config(|config| config.shadow = true)
    }
}

common_options!(InFlightLayer, "InFlightLayer, PeerIp", "InFlightLayer::new(20, PeerIp::new())");

impl<S, R> Layer<S> for InFlightLayer<R> {
    type Service = InFlight<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        self.shared.start();
        InFlight::new(inner, Arc::clone(&self.shared))
    }
}

impl<R> fmt::Debug for InFlightLayer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightLayer")
            .field("slots", &self.shared.options.config.first.policies)
            .field("in_use", &self.in_use())
            .finish_non_exhaustive()
    }
}
