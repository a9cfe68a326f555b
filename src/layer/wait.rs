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
    /// Otherwise it waits, and is refused as soon as it cannot be admitted in time any more. The
    /// header fields then report the limits of that instant. Requests of one key wait in the order of
    /// [`RateLimiter::acquire`](crate::RateLimiter::acquire).
    ///
    /// A waiting request holds no permit of the inner service: it keeps a clone, which is polled
    /// ready after the wait. If the client disconnects, nothing is spent. The delay of a
    /// [`LeakyBucket`](crate::LeakyBucket) follows after the wait, and is not part of it.
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
