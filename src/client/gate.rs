//! The waits of requests: for the end of their host's pause, and for the client's own limit.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use http::header::HOST;
use http::{HeaderName, Response};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until};

use super::error::{ClientLimitError, NotSent};
use super::fields::Advice;
use super::pauses::Pauses;
use crate::extract::{Head, KeyExtractor};
use crate::key::Key;
use crate::limiter::RateLimiter;
use crate::waiting::later;

/// The options of a layer, and the state that its services share.
#[derive(Clone)]
pub(super) struct Gate {
    /// `None` for the host.
    pub(super) key: Option<Arc<dyn KeyExtractor>>,
    pub(super) limiter: Option<RateLimiter>,
    pub(super) max_wait: Duration,
    pub(super) max_waiting: usize,
    pub(super) state: Arc<GateState>,
}

pub(super) struct GateState {
    pauses: Pauses,
    places: Semaphore,
    has_logged: AtomicBool,
}

impl GateState {
    pub(super) fn new(max_waiting: usize) -> Arc<Self> {
        let places = Semaphore::new(max_waiting.min(Semaphore::MAX_PERMITS));
        Arc::new(Self { pauses: Pauses::default(), places, has_logged: AtomicBool::new(false) })
    }
}

impl Gate {
    /// Returns the key of a request, or `None` if it is neither limited nor paused.
    pub(super) fn key_of(&self, head: &Head<'_>) -> Result<Option<Key>, ClientLimitError> {
        match &self.key {
            Some(key) => key.extract(head).map_err(|error| ClientLimitError(NotSent::Key(error))),
            None => Ok(Some(host(head))),
        }
    }

    /// Returns the end of the longest wait of a request that begins to wait now.
    pub(super) fn deadline(&self) -> Instant {
        later(Instant::now(), self.max_wait)
    }

    /// Waits until a request may be sent. If that takes time, calls `begin_wait`, and returns the place
    /// of the request among those that wait.
    pub(super) async fn pass(
        &self,
        key: &Key,
        deadline: Instant,
        begin_wait: impl FnOnce(),
    ) -> Result<Option<SemaphorePermit<'_>>, ClientLimitError> {
        let mut turn = pin!(self.turn(key, deadline));
        if let Poll::Ready(passed) = poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx))).await {
            return passed.map(|()| None);
        }
        begin_wait();
        let place = self.place().ok_or(ClientLimitError(NotSent::TooManyWaiting(self.max_waiting)))?;
        turn.await.map(|()| Some(place))
    }

    /// Returns a place among the requests that wait, if one is free.
    pub(super) fn place(&self) -> Option<SemaphorePermit<'_>> {
        self.state.places.try_acquire().ok()
    }

    pub(super) fn is_paused(&self, key: &Key) -> bool {
        self.state.pauses.end(key).is_some()
    }

    /// Waits for the end of the pause of a key, if it is paused.
    pub(super) async fn pause_over(&self, key: &Key, deadline: Instant) -> Result<(), ClientLimitError> {
        // Another response may extend the pause meanwhile.
        while let Some(end) = self.state.pauses.end(key) {
            if end > deadline {
                let wait = end.saturating_duration_since(Instant::now());
                return Err(ClientLimitError(NotSent::Paused { wait, max_wait: self.max_wait }));
            }
            sleep_until(end).await;
        }
        Ok(())
    }

    /// Waits for the end of a pause, and then for the client's own limit. In the other order, a request
    /// would spend a unit long before it is sent.
    pub(super) async fn turn(&self, key: &Key, deadline: Instant) -> Result<(), ClientLimitError> {
        let max_wait = self.max_wait;
        loop {
            self.pause_over(key, deadline).await?;
            let Some(limiter) = &self.limiter else { return Ok(()) };
            let left = deadline.saturating_duration_since(Instant::now());
            let failed = |error| ClientLimitError(NotSent::Storage(error));
            let hit = limiter.acquire(key, left).await.map_err(failed)?;
            if hit.is_refused() {
                let wait = hit.retry_after();
                return Err(ClientLimitError(NotSent::Limited { wait, max_wait }));
            }
            if !self.is_paused(key) {
                let _ = hit.keep();
                return Ok(());
            }
            // A pause has begun meanwhile.
            hit.refund().await.map_err(failed)?;
        }
    }

    /// Begins the pause that a response asks for. Returns `true` if a request that begins to wait now
    /// can be sent after it.
    pub(super) fn record<B>(&self, key: &Key, response: &Response<B>) -> bool {
        let Advice { pause, unreadable } = Advice::of(response, SystemTime::now());
        if let Some(field) = unreadable
            && !self.state.has_logged.swap(true, Ordering::Relaxed)
        {
            log_unreadable(&field);
        }
        let Some(pause) = pause else { return false };
        self.state.pauses.begin(key, pause) <= self.deadline()
    }
}

#[cfg(feature = "tracing")]
fn log_unreadable(field: &HeaderName) {
    tracing::debug!(%field, "rate limit field of a response ignored: it cannot be read");
}

#[cfg(not(feature = "tracing"))]
fn log_unreadable(_: &HeaderName) {}

/// Returns the host and the port of the request, without the user of its URL. Host names ignore case.
/// Requests without a host, such as those of a tonic client to its channel, share one key.
fn host(head: &Head<'_>) -> Key {
    // Not the original target: a proxy's requests have one, which names the proxy.
    let uri = head.routed_uri();
    let Some(name) = uri.host() else {
        return head
            .headers
            .get(HOST)
            .map_or_else(Key::global, |host| Key::from(&*host.as_bytes().to_ascii_lowercase()));
    };
    let default = if uri.scheme_str() == Some("http") { 80 } else { 443 };
    Key::from(format!("{}:{}", name.to_ascii_lowercase(), uri.port_u16().unwrap_or(default)))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn requests_to_one_host_and_port_have_one_key() {
        for (uri, key) in [
            ("http://alice:secret@API.example.com/", "api.example.com:80"),
            ("https://api.example.com/v1", "api.example.com:443"),
            ("http://api.example.com:8080/", "api.example.com:8080"),
        ] {
            assert_eq!(host(&Head::from_request(&Request::get(uri).body(()).unwrap())), Key::from(key));
        }
        let relative =
            |request: http::request::Builder| host(&Head::from_request(&request.uri("/v1").body(()).unwrap()));
        assert_eq!(relative(Request::builder().header("host", "API.example.com")), Key::from("api.example.com"));
        assert_eq!(relative(Request::builder()), Key::global());
    }
}
