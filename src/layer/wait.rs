use std::time::Duration;

use super::RateLimitLayer;
use crate::middleware::waiting_room::WaitBounds;

/// Waiting instead of refusing.
impl<R> RateLimitLayer<R> {
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
    /// Choose `max_wait` shorter than the timeouts of clients and proxies. Waiting requests keep
    /// their memory and their connections, so choose `max_waiting` as the number of them that the
    /// server can hold. A single client can use up the `max_waiting` of the whole layer.
    ///
    /// # Which requests wait
    ///
    /// A request whose hit was refused waits, unless one of these conditions holds. Then it is
    /// refused immediately, as without this option:
    ///
    /// - The time until it can be admitted is longer than `max_wait`.
    /// - It can never be admitted, because its cost exceeds the capacity.
    /// - `max_waiting` requests already wait.
    ///
    /// In a [shadow](Self::shadow) layer, no request waits.
    ///
    /// # Order
    ///
    /// Waiting requests of the same policy and key are admitted in the order of
    /// [`RateLimiter::acquire`](crate::RateLimiter::acquire). A new request waits behind them
    /// without a hit. In these cases it makes a hit instead, which can overtake them:
    ///
    /// - `max_waiting` requests already wait.
    /// - The last refusal of a waiting request shows that the new one cannot be admitted within
    ///   `max_wait`.
    ///
    /// A request that [nothing polls](crate::RateLimiter::acquire) does not
    /// block the others.
    ///
    /// Requests in other processes can overtake too. So a request with a high [cost](Self::cost)
    /// may not be admitted within `max_wait`.
    ///
    /// # The end of the wait
    ///
    /// - An admitted request waits until a clone of the inner service is ready, and then calls the
    ///   clone. While a request waits, it holds no permit of the inner service. The delay of a
    ///   [`LeakyBucket`](crate::LeakyBucket) follows after the wait, and is not part of `max_wait`.
    /// - A request is refused as soon as a hit of its own shows that it cannot be admitted in time.
    ///   If requests ahead of it still wait, it is refused after `max_wait`. The header fields show
    ///   the latest refusal of the same key and cost, with times counted from now. If there is
    ///   none, they show the result of a peek.
    /// - If the client disconnects before the inner service is called, a hit that was already
    ///   admitted is refunded. If it disconnects during its first hit, before it waits, the units
    ///   can stay spent.
    /// - If the storage fails, [`OnError`](crate::OnError) applies.
    ///
    /// The observer and the log get one decision for each request, when its wait is over.
    ///
    /// # Panics
    ///
    /// The response future panics if the request has to wait outside of a tokio runtime with time
    /// enabled.
    pub fn wait(self, max_wait: Duration, max_waiting: usize) -> Self {
        self.with_config(|config| config.wait = Some(WaitBounds { max_wait, max_waiting }))
    }
}
