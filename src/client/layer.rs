//! The layer's options.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tower_layer::Layer;

use super::gate::{Gate, GateState};
use super::service::{ClientLimit, CopyRequest, NoRetry};
use crate::extract::KeyExtractor;
use crate::limiter::RateLimiter;

/// A layer for HTTP clients that keeps to the limits of other servers.
///
/// The layer reads the limits in responses. If the next request to a host would be refused, the
/// layer pauses the host: further requests wait for the end of the pause instead of being sent.
/// Requests can also wait for a [limit of the client](Self::limit).
///
/// ```
/// # async fn send(http: reqwest::Client) -> Result<(), tower_ratelimit::BoxError> {
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_ratelimit::{ClientLimitLayer, Quota, RateLimiter};
///
/// let client = ServiceBuilder::new()
///     .layer(ClientLimitLayer::new().limit(RateLimiter::new(Quota::per_second(10).burst(1))))
///     .service(service_fn(move |request: http::Request<String>| {
///         let http = http.clone();
///         async move { http.execute(request.try_into()?).await.map(http::Response::from) }
///     }));
///
/// let request = http::Request::get("http://api.example.com/").body(String::new())?;
/// println!("{}", client.oneshot(request).await?.status());
/// # Ok(())
/// # }
/// ```
///
/// # Fields
///
/// A refusal is a response with 403, 429 or 503, or a gRPC response without messages and with the
/// status 8 or 14. The first field of the table that states a wait sets the pause:
///
/// | field | read in | length of the pause |
/// |---|---|---|
/// | `grpc-retry-pushback-ms` | refusals | its value in milliseconds |
/// | `grpc-status-details-bin` | refusals | the delay of its `RetryInfo` |
/// | `Retry-After-Ms` | refusals | its value in milliseconds |
/// | `Retry-After` | refusals | its value: seconds, also with a fraction, or a date |
/// | `RateLimit` of drafts 7 to 11, and each field with `ratelimit` or `rate-limit` and `remaining` in its name, such as `X-RateLimit-Remaining-Tokens` | all responses | the longest time until the reset of a limit of which nothing remains |
///
/// The reset of a field with `remaining` in its name is in the field with `reset-after` or `reset`
/// in place of `remaining`. It is a number of seconds, an instant in seconds or milliseconds since
/// the Unix epoch, a duration such as `6m0s`, or a date. `RateLimit-Policy` does not affect the
/// pause. Instants are compared with the `Date` of the response, so the clock of the client may be
/// wrong.
///
/// The numbers in responses from a cache, which have an `Age`, are ignored. A field that cannot be read is
/// ignored. The first one is logged at DEBUG (feature `tracing`), except for those of gRPC.
///
/// # Bounds
///
/// - A pause is never shortened, and lasts at most a day.
/// - At most 10,000 hosts are paused. With more, the pause that ends first is forgotten.
/// - A request waits for at most [`max_wait`](Self::max_wait), and only if fewer than
///   [`max_waiting`](Self::max_waiting) wait. Otherwise it fails with a
///   [`ClientLimitError`](crate::ClientLimitError), and is not sent.
///
/// At the end of a pause, all waiting requests are sent at the same time, unless the client has a
/// limit of its own. Services and clones of a layer share their state.
///
/// # Panics
///
/// The response future panics if the request has to wait outside of a tokio runtime with time enabled.
#[derive(Clone)]
#[must_use = "a layer does nothing unless it is applied to a service"]
pub struct ClientLimitLayer<R = NoRetry> {
    gate: Gate,
    retry: R,
}

impl ClientLimitLayer {
    /// Creates a layer without a limit of its own. Requests have the key of their host and port.
    /// Requests without a host share one key.
    pub fn new() -> Self {
        let max_waiting = 1_000;
        let state = GateState::new(max_waiting);
        let gate = Gate { key: None, limiter: None, max_wait: Duration::from_secs(30), max_waiting, state };
        Self { gate, retry: NoRetry }
    }
}

impl Default for ClientLimitLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<R> ClientLimitLayer<R> {
    /// Lets each request [wait](RateLimiter::acquire) for one unit of its key. Defaults to no limit.
    ///
    /// If the limiter does not admit a request within [`max_wait`](Self::max_wait), or if its
    /// storage fails, the request fails and is not sent.
    pub fn limit(self, limiter: RateLimiter) -> Self {
        self.with(|gate| gate.limiter = Some(limiter))
    }

    /// Sets the keys that are limited and paused. Defaults to the host and port. Use it if a server
    /// limits each token or each path by itself. A request whose key is `None` is sent immediately.
    /// If the extractor returns an error, the request fails and is not sent.
    ///
    /// ```
    /// use tower_ratelimit::{ClientLimitLayer, Header};
    ///
    /// let layer = ClientLimitLayer::new().key(Header::new("authorization"));
    /// ```
    pub fn key(self, key: impl KeyExtractor) -> Self {
        self.with(|gate| gate.key = Some(Arc::new(key)))
    }

    /// Sets the longest time for which a request waits before it is sent. Defaults to 30 seconds. The
    /// copy that [`retry_once`](Self::retry_once) sends can wait for this time again.
    ///
    /// If the pause of its host is longer, a request fails immediately. A request that queues behind
    /// others for the client's own [limit](Self::limit) may wait for the whole time before it fails. The
    /// error is a [`ClientLimitError`](crate::ClientLimitError).
    pub fn max_wait(self, max_wait: Duration) -> Self {
        self.with(|gate| gate.max_wait = max_wait)
    }

    /// Sets the maximum number of requests that wait at the same time, over all hosts. Defaults to
    /// 1,000. Further requests that would have to wait fail with a
    /// [`ClientLimitError`](crate::ClientLimitError), and are not sent.
    ///
    /// Call this method before the layer is used, because the returned layer has no pauses yet.
    ///
    /// With a [limiter](Self::limit) whose storage is on a server, a request also counts while the
    /// storage decides. With such a limiter and a maximum of 0, every request fails.
    pub fn max_waiting(self, max_waiting: usize) -> Self {
        self.with(|gate| (gate.max_waiting, gate.state) = (max_waiting, GateState::new(max_waiting)))
    }

    /// Sends a request once more if the response is 429 and states a wait that is longer than zero and at
    /// most [`max_wait`](Self::max_wait). Defaults to never. For other responses and more attempts, use
    /// `tower::retry` around this layer.
    ///
    /// `copy` returns a copy of the request, or `None` if it must not be sent again. It is called
    /// before the request is sent, so the copy takes memory until the response arrives. If [too
    /// many](Self::max_waiting) requests wait already, the first response is returned. If the copy
    /// cannot be sent within `max_wait`, the request fails with a
    /// [`ClientLimitError`](crate::ClientLimitError), and the first response is lost.
    ///
    /// ```
    /// use http::Request;
    /// use tower_ratelimit::ClientLimitLayer;
    ///
    /// let layer = ClientLimitLayer::new().retry_once(|request: &Request<String>| Some(request.clone()));
    /// ```
    pub fn retry_once<B, F>(self, copy: F) -> ClientLimitLayer<F>
    where
        F: Fn(&Request<B>) -> Option<Request<B>>,
        F: CopyRequest<B>,
    {
        ClientLimitLayer { gate: self.gate, retry: copy }
    }

    fn with(mut self, change: impl FnOnce(&mut Gate)) -> Self {
        change(&mut self.gate);
        self
    }
}

impl<S, R: Clone> Layer<S> for ClientLimitLayer<R> {
    type Service = ClientLimit<S, R>;

    fn layer(&self, inner: S) -> Self::Service {
        ClientLimit::new(inner, Arc::new(self.gate.clone()), self.retry.clone())
    }
}

impl<R> fmt::Debug for ClientLimitLayer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientLimitLayer")
            .field("limit", &self.gate.limiter)
            .field("max_wait", &self.gate.max_wait)
            .field("max_waiting", &self.gate.max_waiting)
            .finish_non_exhaustive()
    }
}
