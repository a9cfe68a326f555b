use std::time::Duration;

use super::RateLimitLayer;
use crate::Storage;
use crate::middleware::waiting_room::WaitBounds;

/// Waiting instead of refusing.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Lets requests wait for up to `max_wait` instead of refusing them. At most `max_waiting`
    /// requests of this layer wait at the same time. Defaults to refusing immediately.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).wait(Duration::from_secs(2), 1_000);
    /// ```
    ///
    /// A request whose hit was refused waits, unless one of these conditions holds. Then it is
    /// refused immediately, as without this option:
    ///
    /// - The time until it can be admitted is longer than `max_wait`.
    /// - It can never be admitted, because its cost exceeds the capacity.
    /// - `max_waiting` requests already wait.
    ///
    /// If requests of the same key already wait, a new request waits behind them without a hit. The
    /// order is that of [`RateLimiter::acquire`](crate::RateLimiter::acquire). The new request
    /// makes a hit, which can overtake the others, if `max_waiting` requests already wait, or if
    /// the last refusal of the key lasts for longer than `max_wait`. Requests in other processes
    /// can overtake too. So a request with a high [cost](Self::cost) may not be admitted within
    /// `max_wait`.
    ///
    /// A waiting request is refused as soon as an attempt shows that it cannot be admitted in time,
    /// or after `max_wait` if it had no turn. The header fields then show the latest refusal of the
    /// same key and cost, with times counted from now. If there is none, they show the result of a
    /// peek.
    ///
    /// A waiting request holds no permit of the inner service: it keeps a clone, which is polled
    /// ready after the wait. If the client disconnects before the inner service is called, a hit
    /// that was already admitted is refunded. The delay of a [`LeakyBucket`](crate::LeakyBucket)
    /// follows after the wait, and is not part of it.
    ///
    /// Waiting requests keep their memory and their connections. Choose `max_waiting` so that the
    /// server can hold as many, and `max_wait` shorter than the timeouts of clients and proxies. A
    /// single client can take all `max_waiting` places of a layer.
    ///
    /// The observer and the log get one event for a request, when its wait is over. In a
    /// [shadow](Self::shadow) layer no request waits. If the storage fails while a request waits,
    /// [`OnError`](crate::OnError) applies.
    ///
    /// # Panics
    ///
    /// The future of a request panics if it has to wait outside of a tokio runtime with time
    /// enabled.
    pub fn wait(self, max_wait: Duration, max_waiting: usize) -> Self {
        self.with_config(|config| config.wait = Some(WaitBounds { max_wait, max_waiting }))
    }
}
