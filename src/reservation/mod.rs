//! Reservations: hits whose cost is settled later.

mod future;
mod hits;
mod limited_key;
mod reservations;
mod settle;
mod shadow;

use std::fmt;
use std::iter::once;
use std::ops::Deref;
use std::sync::Arc;

use tokio::runtime::Handle;

pub use self::future::SettleFuture;
use self::future::in_runtime;
pub(crate) use self::future::run_or_spawn;
pub(crate) use self::hits::{HitsOfResponse, RequestHits, SharedHits, SpentHit};
pub(crate) use self::limited_key::{LimitedKey, ObservedKey};
pub use self::reservations::Reservations;
pub(crate) use self::settle::{Correction, StartedLock};
pub(crate) use self::shadow::ShadowCheck;
use crate::decision::{Decision, shown_position};
use crate::policy::Policy;
use crate::storage::StorageFuture;

/// A hit whose cost is corrected when it is known.
///
/// [`RateLimiter::reserve`](crate::RateLimiter::reserve) returns it, and a layer with
/// [`settle_later`](crate::RateLimitLayer::settle_later) passes it to the handler. It dereferences
/// to the [`Decision`] on the hit, which may be a refusal.
///
/// Each method that ends a reservation takes it by value, so a hit is settled at most once:
///
/// | end | effect |
/// |---|---|
/// | [`settle`](Self::settle) | refunds or charges the difference to the actual cost |
/// | [`refund`](Self::refund) | refunds the hit |
/// | [`clear`](Self::clear) | clears the key |
/// | [`counter`](Self::counter) | settles the units that were counted, when the counter is dropped |
/// | [`keep`](Self::keep), or a drop | the hit keeps its estimated cost |
///
/// A reservation contains the policy of its hit, so a change of a
/// [`LivePolicy`](crate::LivePolicy) does not affect it. It settles in the storage that decided the
/// hit: the primary storage of a [`Breaker`](crate::storage::Breaker) or its fallback.
///
/// ```
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::storage::StorageError> {
/// let limiter = RateLimiter::new(Quota::per_hour(1_000));
/// let alice = Key::from("alice");
///
/// let answer = limiter.reserve(&alice, 256).await?;
/// assert!(answer.is_admitted());
/// answer.settle(300).await?;
/// assert_eq!(limiter.peek(&alice).await?.remaining(), 700);
/// # Ok(())
/// # }
/// ```
///
/// A reservation cannot be settled twice:
///
/// ```compile_fail,E0382
/// # use tower_ratelimit::{Key, LocalLimiter, Quota};
/// # let limiter = LocalLimiter::new(Quota::per_hour(1_000));
/// let hit = limiter.reserve(&Key::from("alice"), 256);
/// hit.settle(300);
/// hit.refund();
/// ```
#[must_use = "a reservation may be a refusal"]
pub struct Reservation {
    decision: Decision,
    reserved_by: ReservedBy,
}

enum ReservedBy {
    Limiter(Box<LimiterHit>),
    Layer(Arc<SharedHits>),
}

struct LimiterHit {
    limited: LimitedKey,
    /// The hits on the other keys that were decided together.
    others: Vec<(LimitedKey, Decision)>,
    /// The runtime of the hit. The reservation may be settled in a thread outside of it.
    runtime: Option<Handle>,
}

impl Reservation {
    pub(crate) fn of_limiter(decision: Decision, limited: LimitedKey) -> Self {
        Self::of_limiters(vec![limited], vec![decision])
    }

    /// Creates the reservation of hits on several keys, of which there is at least one.
    pub(crate) fn of_limiters(mut limited: Vec<LimitedKey>, mut decisions: Vec<Decision>) -> Self {
        let (shown, runtime) = (shown_position(&decisions), Handle::try_current().ok());
        let (own, decision) = (limited.remove(shown), decisions.remove(shown));
        let others = limited.into_iter().zip(decisions).collect();
        Self { decision, reserved_by: ReservedBy::Limiter(Box::new(LimiterHit { limited: own, others, runtime })) }
    }

    pub(crate) fn of_layer(decision: Decision, hits: Arc<SharedHits>) -> Self {
        Self { decision, reserved_by: ReservedBy::Layer(hits) }
    }

    /// Returns the policy that decided the hit. For several keys, this is the policy of the
    /// decision to which the reservation dereferences.
    pub fn policy(&self) -> &Policy {
        match &self.reserved_by {
            ReservedBy::Limiter(hit) => &hit.limited.policy,
            ReservedBy::Layer(hits) => &hits.policies()[0],
        }
    }

    /// Returns the policies of the hit, of which the first one made the decision.
    fn policies(&self) -> Vec<Policy> {
        match &self.reserved_by {
            ReservedBy::Layer(hits) => hits.policies().to_vec(),
            ReservedBy::Limiter(hit) => vec![hit.limited.policy.clone()],
        }
    }

    /// Corrects the cost of the hit to `actual` units. Use it for requests whose cost is known only
    /// after they were admitted.
    ///
    /// | units that the hit has spent | effect |
    /// |---|---|
    /// | fewer than `actual` | the difference is [charged](crate::RateLimiter::charge) now |
    /// | `actual` | none |
    /// | more than `actual` | the difference is refunded |
    /// | none, because it was refused or its cost is 0 | none |
    ///
    /// The storage is called immediately, even if the [`SettleFuture`] is not awaited.
    ///
    /// A limit does not refund units that have become available again by themselves:
    ///
    /// - A window gets the units back only if it still contains the hit.
    /// - A token bucket gets back only the units that have not been refilled since the hit.
    /// - A leaky bucket gets units back only if no later hit is in its queue.
    ///
    /// After a [`clear`](crate::RateLimiter::clear), earlier hits are normally not refunded. A
    /// limit recognizes the state of the hit by a short form of the state's start time. If the
    /// state after the `clear` has the same short form, it gets the units. This happens in the same
    /// period of an aligned sliding window, and with 1 of 32,749 states of a token bucket. It is
    /// improbable with the other strategies.
    ///
    /// If a [full](Decision::is_storage_full) memory storage does not contain the key any more, the
    /// difference is not charged, and no error is returned.
    ///
    /// The reservation of a layer also settles the [shadow limits](Policy#shadow-limits), and the
    /// layer reports the result as an [`Event`](crate::Event). The header fields of the response
    /// report the settled state if the reservation is settled before the head of the response is
    /// ready, and the storage is immediately ready.
    ///
    /// ```
    /// use tower_ratelimit::{Key, LocalLimiter, Quota};
    ///
    /// let limiter = LocalLimiter::new(Quota::per_hour(100));
    /// let alice = Key::from("alice");
    /// // A memory storage is ready immediately, so there is nothing to await.
    /// limiter.reserve(&alice, 20).settle(50);
    /// assert_eq!(limiter.peek(&alice).remaining(), 50);
    /// ```
    ///
    /// # Errors
    ///
    /// The future returns the storage's error if the storage fails. The memory storage never fails.
    pub fn settle(self, actual: u32) -> SettleFuture {
        self.correct(Correction::Cost(actual))
    }

    fn correct(self, correction: Correction) -> SettleFuture {
        match self.reserved_by {
            ReservedBy::Limiter(hit) => {
                let LimiterHit { limited, others, runtime } = *hit;
                let all = once((limited, self.decision)).chain(others);
                let settle = |(limited, decision): (LimitedKey, Decision)| limited.settle(decision, correction);
                let settlements = in_runtime(runtime.as_ref(), || all.map(settle).collect());
                SettleFuture::all(settlements, runtime.as_ref())
            }
            ReservedBy::Layer(hits) => hits.settle(Some(correction)),
        }
    }

    /// Refunds the hit. This is [`settle`](Self::settle) with an actual cost of 0.
    ///
    /// ```
    /// use tower_ratelimit::{Key, LocalLimiter, Quota};
    ///
    /// let limiter = LocalLimiter::new(Quota::per_minute(2));
    /// let alice = Key::from("alice");
    /// limiter.reserve(&alice, 1).refund();
    /// assert_eq!(limiter.peek(&alice).remaining(), 2);
    /// ```
    pub fn refund(self) -> SettleFuture {
        self.settle(0)
    }

    /// Clears the key, for example after a successful login. All hits of the key under this policy
    /// are forgotten, also those of other requests, and the locks of a [`Lockout`](crate::Lockout)
    /// with their level. Also clears those [shadow limits](Policy#shadow-limits) of a layer that
    /// have admitted the request.
    ///
    /// Clears the key even if the hit was refused. The reservation of several keys clears all of
    /// them. The reservation of a layer does not clear a key for which the request costs 0.
    ///
    /// ```
    /// use tower_ratelimit::{Key, LocalLimiter, Quota};
    ///
    /// let limiter = LocalLimiter::new(Quota::per_minute(5));
    /// let alice = Key::from("alice");
    /// limiter.hit(&alice);
    /// limiter.reserve(&alice, 1).clear();
    /// assert_eq!(limiter.peek(&alice).remaining(), 5);
    /// ```
    pub fn clear(self) -> SettleFuture {
        self.correct(Correction::Clear)
    }

    /// Keeps the estimated cost, and returns the decision.
    ///
    /// A drop of the reservation keeps the cost too, but a layer then reports
    /// [`EventKind::Unsettled`](crate::EventKind::Unsettled).
    pub fn keep(self) -> Decision {
        if let ReservedBy::Layer(hits) = self.reserved_by {
            drop(hits.settle(None));
        }
        self.decision
    }

    /// Returns a counter of the units that the hit actually costs, which starts at 0. The hit is
    /// settled when the counter is dropped.
    pub fn counter(self) -> Counter {
        Counter { reservation: Some(self), units: 0 }
    }
}

impl Deref for Reservation {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        &self.decision
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("policy", &self.policy())
            .field("decision", &self.decision)
            .finish_non_exhaustive()
    }
}

/// Counts the actual cost of a hit while it is spent, for example the tokens of a streamed answer.
/// Returned by [`Reservation::counter`].
///
/// [`finish`](Self::finish) settles the hit. So does a drop: at the end of a stream that owns the
/// counter, when the client disconnects, and when the task panics. The count starts at 0, so a drop
/// before the first [`add`](Self::add) refunds the hit.
///
/// If the storage is not immediately ready, a task of the current tokio runtime continues the
/// settlement, or else a task of the runtime in which the hit was made. If there is neither, the
/// settlement is cancelled, and the failure is logged (feature `tracing`). The hit then keeps its
/// estimated cost, unless the storage has already executed the settlement.
///
/// ```
/// use axum::Router;
/// use axum::body::{Body, Bytes};
/// use axum::routing::post;
/// use futures_util::{StreamExt, stream};
/// use tower_ratelimit::{Global, Policy, Reservation, RateLimitLayer};
///
/// let tokens: Policy = "token-bucket 10000/minute burst 20000".parse()?;
/// let limit = RateLimitLayer::new(tokens, Global::new()).cost(|_| 500).settle_later();
/// let complete = |reservation: Reservation, prompt: String| async move {
///     let mut tokens = reservation.counter();
///     let words: Vec<String> = prompt.split(' ').map(str::to_owned).collect();
///     // The stream owns the counter, so both end together.
///     Body::from_stream(stream::iter(words).map(move |word| {
///         tokens.add(1);
///         Ok::<_, std::io::Error>(Bytes::from(word))
///     }))
/// };
/// let app: Router = Router::new().route("/", post(complete)).layer(limit);
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Debug)]
#[must_use = "a counter that is dropped settles its hit"]
pub struct Counter {
    /// `None` after the settlement.
    reservation: Option<Reservation>,
    units: u32,
}

impl Counter {
    /// Adds units to the actual cost. The sum saturates at 2^32 - 1.
    pub fn add(&mut self, units: u32) {
        self.units = self.units.saturating_add(units);
    }

    /// Returns the units that were counted.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Settles the hit at the units that were counted, like [`Reservation::settle`].
    pub fn finish(mut self) -> SettleFuture {
        self.settle()
    }

    /// Settles the hit at the first call.
    fn settle(&mut self) -> SettleFuture {
        match self.reservation.take() {
            Some(reservation) => reservation.settle(self.units),
            None => SettleFuture::without_report(StorageFuture::ok(())),
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        drop(self.settle());
    }
}
