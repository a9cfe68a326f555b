//! Leases: slices of a window, which a node takes in one round trip and spends locally.

mod charge;
mod close;
mod entry;
mod future;
mod job;
mod lease;
mod outage;
mod replies;
mod route;
mod shared;
mod worker;

use std::fmt;
use std::sync::Arc;

use self::charge::Taken;
use self::entry::LeaseEntry;
use self::future::{Change, ChangeState, Deciding, OwnedRequest, Progress};
use self::job::Command;
use self::lease::Charged;
use self::route::Route;
use self::shared::{InvalidateOnDrop, LeaseTable};
use crate::storage::key_table::assert_max_keys;
use crate::storage::{Clock, Storage, StorageError, StorageRequest, Summary, SystemClock};
use crate::{ConfigError, Decision, Key, Op, Policy};

/// Leases units of a fixed window from the storage, a slice at a time, and spends them locally. Use
/// it for a few keys that several nodes hit more often than the server can answer.
///
/// ```
/// use tower_ratelimit::storage::Leases;
/// use tower_ratelimit::{FixedWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In production, wrap a storage on a server, such as Redis.
/// let storage = Leases::new(MemoryStorage::new(), 100);
/// let policy = Policy::new(FixedWindow::new(), Quota::per_minute(100_000));
/// let limiter = RateLimiter::with_storage(policy, storage.clone());
///
/// for _ in 0..1_000 {
///     assert!(limiter.hit(&Key::everybody()).await?.is_admitted());
/// }
/// // Each miss leases 100 units. The other hits need no request.
/// assert_eq!((storage.misses(), storage.hits()), (10, 990));
/// # Ok(())
/// # }
/// ```
///
/// The storage counts leased units as spent, so all nodes together never admit more than the limit.
/// Units that a node has leased and not spent are not available to other nodes. Choose a slice of
/// about one percent of the limit. As the window runs out, slices shrink: a slice is at most one
/// sixteenth of the remaining units, unless the hits that wait for it need more. A slice expires
/// with its window.
///
/// The policy must be a single [`FixedWindow`](crate::FixedWindow), anchored or aligned. Other
/// policies fail [validation](Storage::validate). Shadow limits, and policies chosen per request
/// that are not a single fixed window, are sent to the storage unchanged.
///
/// At most 10,000 keys have a lease ([`max_keys`](Self::max_keys)). A new lease beyond that evicts
/// one that was not used recently, and refunds it. Call [`close`](Self::close) at shutdown, or
/// unspent units are lost until their window ends. Dropping the last handle inside a tokio runtime
/// spawns a task that refunds them. Outside a runtime, nothing is refunded.
///
/// Make `Leases` the outermost wrapper of a storage. A storage with round trips needs a tokio
/// runtime. The guide on [several
/// processes](crate::guide::several_processes#fewer-requests-to-the-storage) has the details and
/// the bounds.
///
/// # Errors
///
/// If the storage fails, all hits that wait for the request fail with the same [`StorageError`]. A
/// hit can wait for two timeouts of the storage: for the request in flight, and for its own. If the
/// storage contains a breaker with a fallback, a hit can wait for a third timeout.
#[derive(Clone)]
pub struct Leases<St: Storage>(Arc<LeaseTable<St>>);

/// The default of [`Leases::max_keys`].
const MAX_KEYS: usize = 10_000;

impl<St: Storage> Leases<St> {
    /// Wraps `storage`. A request to it leases `slice` units: fewer if few units remain, and more
    /// if the hits that wait for them need more.
    ///
    /// # Panics
    ///
    /// Panics if `slice` is 0.
    #[track_caller]
    pub fn new(storage: St, slice: u32) -> Self {
        assert!(slice > 0, "invalid slice 0: a slice must be at least 1, for example 100");
        Self(Arc::new(LeaseTable::new(storage, slice, MAX_KEYS, Arc::new(SystemClock::new()))))
    }

    /// Returns a copy with these settings and without leases.
    fn with(self, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(LeaseTable::new(self.0.inner.clone(), self.0.slice, max_keys, clock)))
    }

    /// Sets the maximum number of keys that have a lease at the same time. Defaults to 10,000.
    ///
    /// Call this before the first hit, because the returned storage starts without leases.
    ///
    /// # Panics
    ///
    /// Panics if `max_keys` is 0 or more than 100 million.
    #[must_use]
    #[track_caller]
    pub fn max_keys(self, max_keys: usize) -> Self {
        assert_max_keys(max_keys, "10_000", "to lease nothing, remove the leases");
        let clock = Arc::clone(&self.0.clock);
        self.with(max_keys, clock)
    }

    /// Sets the clock that measures the validity of slices, for example in tests. It need not agree
    /// with the storage's clock. Defaults to [`SystemClock`].
    ///
    /// Call this before the first hit, because the returned storage starts without leases.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let max_keys = self.0.max_keys;
        self.with(max_keys, Arc::new(clock))
    }

    /// Returns the inner storage.
    pub fn inner(&self) -> &St {
        &self.0.inner
    }

    /// Returns the number of hits that were decided locally, without a request to the storage.
    pub fn hits(&self) -> u64 {
        self.0.counters.counted().0
    }

    /// Returns the number of requests for units to the inner storage.
    pub fn misses(&self) -> u64 {
        self.0.counters.counted().1
    }

    /// Returns the number of keys that have a lease whose window has not ended.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if no key has a lease whose window has not ended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refunds the unspent units of all leases to the storage, and takes no more slices. Call it at
    /// shutdown, after the last request.
    ///
    /// It applies to all clones of this handle. Later hits go to the storage, each with its own
    /// cost. Slices in flight are refunded when they arrive. The future waits for them, unless
    /// another runtime requested them. Slices whose windows have ended are dropped.
    ///
    /// Nothing happens before the future is polled. If it is dropped before it is ready, the units
    /// of refunds in flight can be lost. All other units stay leased until `close` is called again
    /// or the last handle is dropped.
    ///
    /// # Errors
    ///
    /// Returns the first error of a refund, after all refunds have been tried. Units whose refund
    /// failed are lost until their window ends.
    pub fn close(&self) -> impl Future<Output = Result<(), StorageError>> + Send + use<St> {
        let shared = Arc::clone(&self.0);
        async move { shared.close().await }
    }

    fn change(&self, route: Route, inside: impl FnOnce(&St) -> St::UpdateFuture) -> Change<St> {
        Change(match route {
            Route::Local(_) => ChangeState::Local,
            Route::Wait(answer) => ChangeState::Wait(answer),
            Route::Inner => ChangeState::Inner(inside(&self.0.inner), None),
        })
    }
}

/// Returns an error for a policy that is neither a single fixed window nor a shadow policy.
fn check(policy: &Policy) -> Result<(), ConfigError> {
    if policy.is_shadow() || is_leased(policy) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "cannot lease units of {policy}: use a single fixed window, for example \"fixed-window 10000/minute\", \
         or remove the leases"
    )))
}

fn is_leased(policy: &Policy) -> bool {
    match policy.limits() {
        [limit] if !policy.is_shadow() => matches!(limit.strategy().name(), "fixed-window" | "fixed-window-aligned"),
        _ => false,
    }
}

impl<St: Storage> Storage for Leases<St> {
    type Error = StorageError;
    type DecideFuture = Deciding<St>;
    type UpdateFuture = Change<St>;

    fn decide(&self, mut request: StorageRequest<'_>) -> Self::DecideFuture {
        let (cost, mut taken) = (request.cost, None);
        if request.op == Op::Charge && cost > 0 && is_leased(request.policy) {
            match self.0.charge(&request) {
                (Charged::Fully(decision), _) => return Deciding::new(Progress::Local(Some(decision)), cost, None),
                (Charged::Partly(rest), part) => (request.cost, taken) = (rest, part),
            }
        }
        let progress = match self.0.decide(&request, is_leased(request.policy)) {
            Route::Local(decision) => Progress::Local(Some(decision)),
            Route::Wait(answer) => Progress::Wait(answer, OwnedRequest::new(&self.0, &request)),
            Route::Inner => Progress::Inner(self.0.inner.decide(request)),
        };
        Deciding::new(progress, cost, taken)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        if request.op != Op::Hit || request.cost == 0 {
            return false;
        }
        if let Some(decision) = self.0.take(&request) {
            if let Some(shown) = shown {
                *shown = Summary { at: decision.at(), limit: *decision.shown() };
            }
            return true;
        }
        let is_leased = is_leased(request.policy) && !self.0.is_closed();
        !is_leased && !self.0.knows(request.policy, request.key) && self.0.inner.try_admit(request, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let mut change = self.change(self.0.enqueue(policy, key, Command::Clear), |inner| inner.clear(policy, key));
        if let ChangeState::Inner(_, guard) = &mut change.0 {
            *guard = Some(InvalidateOnDrop::new(&self.0, policy, key));
        }
        change
    }

    /// Refunds units to the slice if the hit is of the same window, and to the storage otherwise.
    /// Takes units that the hit cost in addition from the slice. If the slice has too few, charges
    /// the rest to the storage.
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        if !decision.has_spent() || actual == decision.cost() {
            return Change(ChangeState::Local);
        }
        let Some(units) = actual.checked_sub(decision.cost()) else {
            // A hit by another kind of policy has spent units of other limits, too.
            let put_back = || self.0.put_back(policy, key, decision, decision.cost() - actual);
            let route = is_leased(policy).then(put_back).flatten().unwrap_or(Route::Inner);
            return self.change(route, |inner| inner.settle(policy, key, decision, actual));
        };
        let taken = if decision.is_from_fallback() { None } else { self.0.take_for_charge(policy, key, units) };
        let actual = actual - taken.as_ref().map_or(0, Taken::units);
        if actual == decision.cost() {
            taken.into_iter().for_each(Taken::keep);
            return Change(ChangeState::Local);
        }
        Change(ChangeState::Charge(self.0.inner.settle(policy, key, decision, actual), taken))
    }

    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.0.inner.check()
    }

    /// Clears the inner storage, and drops all leases.
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        let forget = ForgetOnDrop(Arc::clone(&self.0));
        let cleared = self.0.inner.clear_all();
        async move {
            let cleared = cleared.await;
            drop(forget);
            cleared
        }
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.0.inner.clients_to_fill(policy)
    }

    fn contains_breaker(&self) -> bool {
        self.0.inner.contains_breaker()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        check(policy)?;
        self.0.inner.validate(policy)
    }
}

/// Prints the settings and counts, without keys and leases.
impl<St: Storage> fmt::Debug for Leases<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hits, misses) = self.0.counters.counted();
        f.debug_struct("Leases")
            .field("inner", &self.0.inner)
            .field("slice", &self.0.slice)
            .field("max_keys", &self.0.max_keys)
            .field("len", &self.len())
            .field("hits", &hits)
            .field("misses", &misses)
            .finish_non_exhaustive()
    }
}

/// Forgets all leases when it is dropped. A [`clear_all`](Storage::clear_all) holds it until the
/// clear completes or is dropped, because the leases may be older than the clear.
struct ForgetOnDrop<St: Storage>(Arc<LeaseTable<St>>);

impl<St: Storage> Drop for ForgetOnDrop<St> {
    fn drop(&mut self) {
        self.0.table.visit_all(LeaseEntry::forget);
    }
}
