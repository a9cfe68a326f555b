//! Slices of a window, which nodes take in one round trip and spend locally.

mod close;
mod entry;
mod error;
mod job;
mod lease;
mod lease_table;
mod outage;
mod replies;
mod worker;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

pub use self::error::LeaseError;
use self::job::{Answer, Command};
use self::lease_table::{InvalidateOnDrop, LeaseTable, Route};
use crate::error::or_panic;
use crate::storage::key_table::MOST;
use crate::storage::{Clock, Storage, StorageRequest, Summary, SystemClock};
use crate::{ConfigError, Decision, Key, Op, Policy};

/// Takes units of a fixed window from the storage in slices, and spends them locally. Use it for
/// the few keys that several nodes hit more often than a server can answer.
///
/// ```
/// use tower_ratelimit::storage::Leases;
/// use tower_ratelimit::{FixedWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In production, this is the storage of a server.
/// let storage = Leases::new(MemoryStorage::new(), 100);
/// let policy = Policy::new(FixedWindow::new(), Quota::per_minute(100_000));
/// let limiter = RateLimiter::with_storage(policy, storage.clone());
///
/// for _ in 0..1_000 {
///     assert!(limiter.hit(&Key::everybody()).await?.is_admitted());
/// }
/// assert_eq!((storage.misses(), storage.hits()), (10, 990));
/// # Ok(())
/// # }
/// ```
///
/// The storage counts leased units as spent, so all nodes together never admit more than the limit.
/// Units that a node has leased and not spent are not available to other nodes. A slice of one percent
/// of the limit is a good choice. A slice is at most a sixteenth of the units that remain, and ends
/// with its window.
///
/// The policy must be one [`FixedWindow`](crate::FixedWindow), anchored or aligned. Other policies fail
/// [validation](Storage::validate). Shadow limits, and policies chosen per request that are not one
/// fixed window, go to the storage unchanged.
///
/// It leases for at most 10,000 keys ([`max_keys`](Self::max_keys)), and refunds the least recently used
/// lease to make room. Call [`close`](Self::close) at shutdown, or unspent units are lost until their
/// window ends. Dropping the last handle inside a tokio runtime spawns a task that does the same.
/// Outside a runtime, nothing is refunded.
///
/// Put leases around all other storages. A storage that does not answer at once needs a tokio runtime.
/// The guide on [several processes](crate::guide::several_processes#fewer-requests-to-the-storage) has
/// the details and the bounds.
///
/// # Errors
///
/// If the storage fails, all hits that wait for this reply fail with the same [`LeaseError`]. A hit can
/// wait for two timeouts of the storage: one of the request that was in flight, and one of its own. With a
/// fallback inside, it can wait for a third one.
#[derive(Clone)]
pub struct Leases<St: Storage>(Arc<LeaseTable<St>>);

/// The default.
const MAX_KEYS: usize = 10_000;

impl<St: Storage> Leases<St> {
    /// Wraps a storage, and takes `slice` units per request.
    ///
    /// # Panics
    ///
    /// Panics if `slice` is 0. [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(storage: St, slice: u32) -> Self {
        or_panic(Self::try_new(storage, slice))
    }

    /// As [`new`](Self::new), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `slice` is 0.
    pub fn try_new(storage: St, slice: u32) -> Result<Self, ConfigError> {
        if slice == 0 {
            return Err(ConfigError::new(
                "a slice must be at least 1, for example 100: to take every unit by itself, leave the leases out",
            ));
        }
        Ok(Self(Arc::new(LeaseTable::new(storage, slice, MAX_KEYS, Arc::new(SystemClock::new())))))
    }

    /// The same with no leases.
    fn with(self, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(LeaseTable::new(self.0.inner.clone(), self.0.slice, max_keys, clock)))
    }

    /// Sets the largest number of keys with a lease. Defaults to 10,000. Call it before the first
    /// hit: the returned handle starts without leases.
    ///
    /// # Panics
    ///
    /// Panics if `max_keys` is 0 or more than 100 million. [`try_max_keys`](Self::try_max_keys)
    /// returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn max_keys(self, max_keys: usize) -> Self {
        or_panic(self.try_max_keys(max_keys))
    }

    /// As [`max_keys`](Self::max_keys), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `max_keys` is 0 or more than 100 million.
    pub fn try_max_keys(self, max_keys: usize) -> Result<Self, ConfigError> {
        if max_keys == 0 || max_keys > MOST {
            return Err(ConfigError::new(
                "max_keys must be at least 1 and at most 100 million, for example 10_000: where no key is to have a lease, leave the leases out",
            ));
        }
        let clock = Arc::clone(&self.0.clock);
        Ok(self.with(max_keys, clock))
    }

    /// Sets the clock that measures how long a slice is valid; for tests. It need not agree with
    /// the storage's clock.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let max_keys = self.0.max_keys;
        self.with(max_keys, Arc::new(clock))
    }

    /// Returns the storage inside.
    pub fn inner(&self) -> &St {
        &self.0.inner
    }

    /// Returns the number of hits that were decided without a request of their own.
    pub fn hits(&self) -> u64 {
        self.0.counters.counted().0
    }

    /// Returns the number of requests for units.
    pub fn misses(&self) -> u64 {
        self.0.counters.counted().1
    }

    /// Returns the number of keys that have a lease of an open window.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if no windows are leased.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refunds the unspent units of all slices to the storage, and takes no more slices. Call it at
    /// shutdown, after the last request.
    ///
    /// It applies to all clones of this handle. Hits that come later go to the storage directly,
    /// each with its own cost. Slices in flight are refunded when they arrive. The future waits for
    /// them, unless another runtime asked for them. Slices whose windows have ended are dropped.
    ///
    /// Nothing happens before the future is polled. If it is dropped before it is ready, units that
    /// it was refunding can be lost. The others stay until `close` is called again or the last
    /// handle is dropped.
    ///
    /// # Errors
    ///
    /// Returns the first error of a refund, after all refunds have been tried. Units whose refund
    /// failed are lost until their window ends.
    pub fn close(&self) -> impl Future<Output = Result<(), LeaseError>> + Send + use<St> {
        let shared = Arc::clone(&self.0);
        async move { shared.close().await }
    }

    fn done(&self, turn: Route<St>, inside: impl FnOnce(&St) -> St::UpdateFuture) -> Change<St> {
        Change(match turn {
            Route::Here(_) => Doing::Here,
            Route::Wait(answer) => Doing::Wait(answer),
            Route::Inside => Doing::Inside(inside(&self.0.inner), None),
        })
    }
}

/// Whether slices can be taken of it: one fixed window. What is only tried out has none.
fn check(policy: &Policy) -> Result<(), ConfigError> {
    if policy.is_shadow() || is_leased(policy) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "leases are slices of one fixed window, and {policy} is something else: write for example \
         \"fixed-window 10000/minute\", or leave the leases out"
    )))
}

fn is_leased(policy: &Policy) -> bool {
    match policy.limits() {
        [limit] if !policy.is_shadow() => matches!(limit.strategy().name(), "fixed-window" | "fixed-window-aligned"),
        _ => false,
    }
}

impl<St: Storage> Storage for Leases<St> {
    type Error = LeaseError;
    type DecideFuture = Deciding<St>;
    type UpdateFuture = Change<St>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        Deciding(match self.0.decide(&ask, is_leased(ask.policy)) {
            Route::Here(decision) => Progress::Here(Some(decision)),
            Route::Wait(answer) => Progress::Wait(answer, Question::new(&self.0, &ask)),
            Route::Inside => Progress::Inside(self.0.inner.decide(ask)),
        })
    }

    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        if ask.op == Op::Peek || ask.cost == 0 {
            return false;
        }
        if let Some(decision) = self.0.take(&ask) {
            if let Some(shown) = shown {
                *shown = Summary { at: decision.at(), limit: *decision.shown() };
            }
            return true;
        }
        let is_leased = is_leased(ask.policy) && !self.0.is_closed();
        !is_leased && !self.0.knows(ask.policy, ask.key) && self.0.inner.try_admit(ask, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let mut change = self.done(self.0.have_done(policy, key, Command::Clear), |inner| inner.clear(policy, key));
        if let Doing::Inside(_, doubt) = &mut change.0 {
            *doubt = Some(InvalidateOnDrop::new(&self.0, policy, key));
        }
        change
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        if decision.is_refused() || decision.cost() == 0 {
            return Change(Doing::Here);
        }
        let turn = self.0.put_back(policy, key, decision).unwrap_or(Route::Inside);
        self.done(turn, |inner| inner.refund(policy, key, decision))
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.0.inner.clients_to_fill(policy)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        check(policy)?;
        self.0.inner.validate(policy)
    }
}

/// Shows what is counted.
impl<St: Storage> fmt::Debug for Leases<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (answered, asked) = self.0.counters.counted();
        f.debug_struct("Leases")
            .field("inner", &self.0.inner)
            .field("slice", &self.0.slice)
            .field("max_keys", &self.0.max_keys)
            .field("held", &self.len())
            .field("answered", &answered)
            .field("asked", &asked)
            .finish_non_exhaustive()
    }
}

/// An answer of [`Leases`], on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Deciding<St: Storage>(Progress<St>);

#[allow(clippy::large_enum_variant, reason = "it is polled where it is made; boxing would cost a hit an allocation")]
enum Progress<St: Storage> {
    Here(Option<Decision>),
    Wait(oneshot::Receiver<Answer<St>>, Question<St>),
    Inside(St::DecideFuture),
}

/// What a caller wants to know, who may have to ask by itself.
struct Question<St: Storage> {
    shared: Arc<LeaseTable<St>>,
    policy: Policy,
    key: Key,
    op: Op,
    cost: u32,
}

impl<St: Storage> Question<St> {
    fn new(shared: &Arc<LeaseTable<St>>, ask: &StorageRequest<'_>) -> Self {
        let (shared, policy, key) = (Arc::clone(shared), ask.policy.clone(), ask.key.clone());
        Self { shared, policy, key, op: ask.op, cost: ask.cost }
    }

    fn ask(&self) -> St::DecideFuture {
        self.shared.inner.decide(StorageRequest::new(&self.policy, &self.key, self.op, self.cost))
    }
}

impl<St: Storage> Future for Deciding<St> {
    type Output = Result<Decision, LeaseError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let asked = match &mut self.0 {
                Progress::Here(decision) => {
                    return Poll::Ready(Ok(decision.take().expect("polled after it has answered")));
                }
                Progress::Inside(decided) => return Pin::new(decided).poll(cx).map_err(LeaseError::storage),
                Progress::Wait(answer, question) => match ready!(Pin::new(answer).poll(cx)) {
                    Ok(Ok(Some(given))) => return Poll::Ready(given.claim().ok_or_else(LeaseError::ended)),
                    Ok(Ok(None)) => question.ask(),
                    Ok(Err(error)) => return Poll::Ready(Err(error)),
                    Err(_) => return Poll::Ready(Err(LeaseError::ended())),
                },
            };
            self.0 = Progress::Inside(asked);
        }
    }
}

/// A change through [`Leases`], on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Change<St: Storage>(Doing<St>);

enum Doing<St: Storage> {
    Here,
    Wait(oneshot::Receiver<Answer<St>>),
    /// And what is dropped when a clear is over that others did not wait for.
    Inside(St::UpdateFuture, Option<InvalidateOnDrop<St>>),
}

impl<St: Storage> Future for Change<St> {
    type Output = Result<(), LeaseError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match &mut self.0 {
            Doing::Here => Ok(()),
            Doing::Inside(done, doubt) => {
                let done = ready!(Pin::new(done).poll(cx));
                drop(doubt.take());
                done.map_err(LeaseError::storage)
            }
            Doing::Wait(answer) => match ready!(Pin::new(answer).poll(cx)) {
                Ok(answer) => answer.map(drop),
                Err(_) => Err(LeaseError::ended()),
            },
        })
    }
}

impl<St: Storage> fmt::Debug for Deciding<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deciding").finish_non_exhaustive()
    }
}

impl<St: Storage> fmt::Debug for Change<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").finish_non_exhaustive()
    }
}
