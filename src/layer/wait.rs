use std::time::Duration;

use super::RateLimitLayer;
use crate::Storage;
use crate::middleware::waiting_room::WaitBounds;

/// Waiting instead of refusing.
impl<St: Storage, R> RateLimitLayer<St, R> {
    /// Lets requests wait for up to `max_wait` instead of refusing them. At most `max_waiting`
    /// requests of this layer wait at a time. Defaults to refusing at once.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(Quota::per_second(10), PeerIp::new()).wait(Duration::from_secs(2), 1_000);
    /// ```
    ///
    /// A request is refused at once, as without this option, if
    ///
    /// - its `Retry-After` is longer than `max_wait`,
    /// - it can never be admitted, because its cost exceeds the capacity, or
    /// - `max_waiting` requests wait already.
    ///
    /// Otherwise it waits, and is refused as soon as an attempt shows that it cannot be admitted in
    /// time, or after `max_wait` if it had no turn. The header fields then report the last refusal
    /// of its key, with the waits that are left, or a peek if there is none for its cost.
    ///
    /// Requests of one key wait in the order of
    /// [`RateLimiter::acquire`](crate::RateLimiter::acquire). A new request waits behind them
    /// without a hit. If `max_waiting` requests wait already, or its `max_wait` ends too early, it
    /// makes a hit, which can overtake them. So can requests in other processes. Under such load, a
    /// request with a high [cost](Self::cost) may not be admitted within `max_wait`.
    ///
    /// A waiting request holds no permit of the inner service: it keeps a clone, which is polled
    /// ready after the wait. If the client disconnects before the service is called, nothing is
    /// spent. The delay of a [`LeakyBucket`](crate::LeakyBucket) follows after the wait, and is not
    /// part of it.
    ///
    /// The waiting requests keep their memory and their connections. So choose `max_waiting` for
    /// what the server can hold, and `max_wait` shorter than the timeouts of clients and proxies. A
    /// single client can take all `max_waiting` places of a layer.
    ///
    /// The observer and the log get one event for a request, when its wait is over. A
    /// [shadow](Self::shadow) layer refuses nothing, so nothing waits. If the storage fails while a
    /// request waits, [`OnError`](crate::OnError) applies.
    ///
    /// # Panics
    ///
    /// The future of a request panics if it has to wait outside of a tokio runtime with time
    /// enabled.
    pub fn wait(self, max_wait: Duration, max_waiting: usize) -> Self {
        self.with_config(|config| config.wait = Some(WaitBounds { max_wait, max_waiting }))
    }
}
