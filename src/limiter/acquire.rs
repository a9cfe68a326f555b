//! Waiting for a hit to be admitted.
//!
//! If a strategy delays hits, `acquire` peeks before each hit. A refund frees only the last slot of
//! a leaky bucket, so hits that are refunded a round trip later would fill it with slots that no
//! call uses.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::RateLimiter;
use crate::key::Key;
use crate::reservation::Reservation;
use crate::storage::StorageError;
use crate::waiting::{HitResult, WaitQueues, Waiter, later};

impl RateLimiter {
    /// Spends one unit of `key` like [`hit`](Self::hit), but waits for up to `max_wait` instead of
    /// refusing. The future does nothing until it is polled.
    ///
    /// Returns the hit as soon as it is admitted and its [`delay`](crate::Decision::delay) is over.
    /// The [`Reservation`] dereferences to the decision, and can refund the hit. Returns a refusal
    /// as soon as an attempt shows that waiting cannot succeed within `max_wait`:
    ///
    /// - Its [`retry_after`](crate::Decision::retry_after) is longer than the time that is left.
    /// - It has no `retry_after`, because its cost can never be admitted.
    /// - The delay of a [leaky bucket](crate::LeakyBucket) is longer than the time that is left.
    ///   For a policy with a leaky bucket, `acquire` peeks before each hit, so an attempt costs two
    ///   storage calls.
    ///
    /// A call behind others in the [queue](#order) makes no attempt. It may therefore wait for the
    /// whole `max_wait` before it is refused, even if a call ahead of it is known to wait longer.
    ///
    /// With a `max_wait` of zero, the call makes one attempt. A `max_wait` of more than 30 years
    /// counts as 30 years.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Key, Quota, RateLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimiter::new(Quota::per_second(2).burst(1));
    /// let host = Key::from("api.example.com");
    /// for _ in 0..3 {
    ///     // The second and the third call wait for 500 ms each.
    ///     assert!(limiter.acquire(&host, Duration::from_secs(5)).await?.is_admitted());
    /// }
    /// assert!(limiter.acquire(&host, Duration::from_millis(1)).await?.is_refused());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Order
    ///
    /// Each key has a queue for the calls that wait. Clones of a limiter share their queues. An
    /// attempt is a hit on the storage.
    ///
    /// - If no call waits for the key, a new call makes an attempt. If it is refused, the call
    ///   joins the queue.
    /// - If other calls wait for the key, a new call joins the end of the queue without an attempt,
    ///   so it cannot overtake them.
    /// - After a refusal, only the first call of the queue makes attempts. Before each of them it
    ///   sleeps for the `retry_after` of the last refusal, plus jitter of up to 10 % and at most
    ///   one second. The jitter never extends the sleep beyond `max_wait`.
    /// - After an admission, as many calls make attempts at the same time as units are left, up to
    ///   32. So a new window causes about one storage call for each call that it admits.
    ///
    /// Cheap calls wait until an expensive call ahead of them is admitted or leaves the queue.
    ///
    /// Some hits do not join the queue, so they can take a free unit before the queue does:
    ///
    /// - calls of [`hit`](Self::hit),
    /// - calls in other processes,
    /// - calls whose `max_wait` ends before the `retry_after` of the queue's last refusal.
    ///
    /// A call that is still behind others at the end of `max_wait` leaves the queue at most 10 ms
    /// later. It returns the queue's last refusal for the same cost, with its times counted from
    /// now. If there is none, it returns the result of a peek. If the peek finds free units, for
    /// which calls ahead wait, the call returns a refusal with a `retry_after` of one microsecond.
    ///
    /// If the storage fails, the call whose attempt failed returns the error. The other calls stay
    /// in the queue, and each round of failures lets twice as many calls make attempts at the same
    /// time, up to 32.
    ///
    /// Each attempt uses the current policy of a [`LivePolicy`](crate::LivePolicy). A sleeping call
    /// does not notice a change before its next attempt.
    ///
    /// # Cancellation
    ///
    /// The effect of dropping the future depends on its progress:
    ///
    /// | progress | effect of a drop |
    /// |---|---|
    /// | the call waits in the queue | it leaves the queue, and nothing is spent |
    /// | a hit is in flight on a remote storage | the hit continues in a task of the tokio runtime, which refunds it if it was admitted. The next call makes its attempt after that |
    /// | an admitted hit waits for the delay of a leaky bucket | the hit is refunded, unless a later hit is in the queue of the bucket |
    ///
    /// A storage whose futures never complete holds up the queue of the key. The storages of this
    /// crate have a timeout.
    ///
    /// # Calls that nothing polls
    ///
    /// A future that was polled, and is then neither polled nor dropped, keeps its place in the
    /// queue but does not block it. An example is a branch of `select!` that the caller keeps. If
    /// such a call does not act within 200 ms when it is due, its turn passes on to the next call.
    /// Any number of such calls delays the calls behind them by at most 400 ms per turn.
    ///
    /// - A call is due when it gets a turn, when the sleep before its attempt ends, and when the
    ///   storage replies to its attempt. While the reply is outstanding, it keeps its turn.
    /// - If the call is polled again, it is ahead of later calls that have no turn yet, and takes
    ///   the next free turn. An attempt that was in flight returns its decision. The hit counts
    ///   once.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    ///
    /// # Panics
    ///
    /// The future panics if it has to wait outside of a tokio runtime with time enabled.
    pub fn acquire(
        &self,
        key: &Key,
        max_wait: Duration,
    ) -> impl Future<Output = Result<Reservation, StorageError>> + Send + use<> {
        self.acquire_with_cost(key, 1, max_wait)
    }

    /// Like [`acquire`](Self::acquire), but for `cost` units. Spends all of them or none.
    ///
    /// A cost of 0 is admitted immediately and spends nothing.
    ///
    /// The queue protects an expensive call from cheaper ones of the same limiter and its clones.
    /// Hits in other processes, and calls of [`hit`](Self::hit), can still take each unit as soon
    /// as it is free. Then an expensive call may not be admitted within `max_wait`.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails. The memory storage never fails.
    ///
    /// # Panics
    ///
    /// The future panics if it has to wait outside of a tokio runtime with time enabled.
    pub fn acquire_with_cost(
        &self,
        key: &Key,
        cost: u32,
        max_wait: Duration,
    ) -> impl Future<Output = Result<Reservation, StorageError>> + Send + use<> {
        let queues = Arc::clone(&self.queues);
        let (storage, policy, key) = (self.storage.clone(), self.policy.clone(), key.clone());
        acquire(Waiter { storage, policy, key, cost, delayed_until: None, reporter: None }, queues, max_wait)
    }
}

/// Makes the hit of `waiter`, and waits until it is admitted and its delay is over.
pub(crate) async fn acquire(
    waiter: Waiter,
    queues: Arc<WaitQueues>,
    max_wait: Duration,
) -> Result<Reservation, StorageError> {
    let deadline = later(Instant::now(), max_wait);
    let waiter = Waiter { delayed_until: Some(deadline), ..waiter };
    let HitResult { policy, decided } = waiter.hit(&queues, deadline).await;
    let (decision, limited) = (decided?, waiter.limited(policy));
    let (delay, left) = (decision.delay(), deadline.saturating_duration_since(Instant::now()));
    if delay > left {
        // A peek has spent nothing to refund.
        limited.clone().refund(decision.clone(), None, ());
        return Ok(Reservation::of_limiter(decision.refuse_delay(left), limited));
    }
    let mut delayed = DelayedHit(Some(Reservation::of_limiter(decision, limited)));
    if !delay.is_zero() {
        sleep(delay).await;
    }
    Ok(delayed.0.take().expect("taken only once"))
}

/// An admitted hit that waits for its delay. Dropping it refunds the hit.
struct DelayedHit(Option<Reservation>);

impl Drop for DelayedHit {
    fn drop(&mut self) {
        if let Some(reservation) = self.0.take() {
            drop(reservation.refund());
        }
    }
}
