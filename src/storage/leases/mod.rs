//! Leases: units of a window that a node takes in one round trip and spends locally.

mod lease;
mod route;
mod table;
mod worker;

use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use self::route::{Route, Taken};
use self::table::{Command, LeaseEntry, LeaseResult, LeaseTable};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::key_table::assert_max_keys;
use crate::storage::{
    AnyStorage, Clock, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest, Summary, SystemClock,
};

/// Takes units of a fixed window from the storage in advance, and spends them locally. Use it for a
/// few keys that several nodes hit more often than the server can answer.
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
///     assert!(limiter.hit(&Key::global()).await?.is_admitted());
/// }
/// // Each miss leases 100 units. The other hits need no request.
/// assert_eq!((storage.misses(), storage.local_decisions()), (10, 990));
/// # Ok(())
/// # }
/// ```
///
/// The units that one request takes are a *slice*. The unspent units of a key are its *lease*.
///
/// - The storage counts leased units as spent, so all nodes together never admit more than the
///   limit. Unspent units of a lease are not available to other nodes. Choose a slice of about one
///   percent of the limit.
/// - Slices shrink as the window runs out: a slice is at most one sixteenth of the remaining units,
///   unless the hits that wait for it need more. After a failed request, each request takes the
///   units of a single hit, until one succeeds.
/// - Hits on one key that need a slice wait for the same request. A refund returns the units to the
///   lease.
/// - A lease ends with its window. A clear drops the lease of this node, but other nodes keep
///   theirs.
/// - An admitted hit can report too many remaining units, because other nodes spend units too.
///
/// The policy must be a single [`FixedWindow`](crate::FixedWindow), anchored or aligned, or a single
/// [`CalendarWindow`](crate::CalendarWindow). Other policies fail [validation](Storage::validate). Two kinds of hits are sent to the storage
/// unchanged: those of shadow limits, and those of a policy that was chosen for the request and is
/// not a single window of these kinds.
///
/// At most 10,000 keys have a lease ([`max_keys`](Self::max_keys)). Beyond that, a new lease evicts
/// one that was not used recently. The evicted lease is refunded.
///
/// Make `Leases` the outermost wrapper of a storage. A storage with round trips needs a tokio
/// runtime. Clones share their leases. The guide on [several
/// processes](crate::guide::several_processes#fewer-requests-to-the-storage) has the details and
/// the bounds.
///
/// # Shutdown
///
/// | event | unspent units |
/// |---|---|
/// | [`close`](Self::close) | are refunded |
/// | the last handle is dropped inside a tokio runtime | a task refunds them, if the runtime runs long enough |
/// | the last handle is dropped outside a runtime | are lost until their window ends |
/// | the process ends without any of these | are lost until their window ends |
///
/// # Errors
///
/// If the storage fails, all hits that wait for the request fail with the same [`StorageError`].
///
/// A call fails with the kind [`Cancelled`](crate::storage::StorageErrorKind::Cancelled) if its
/// runtime shuts down, or if it waits for a storage with round trips outside a runtime.
///
/// A hit can wait for two timeouts of the storage: for the request in flight, and for its own. If
/// the storage contains a [`Breaker`](super::Breaker) with a fallback, a hit can wait for a third
/// timeout.
#[derive(Clone)]
pub struct Leases(Arc<LeaseTable>);

/// The default of [`Leases::max_keys`].
const MAX_KEYS: usize = 10_000;

impl Leases {
    /// Wraps `storage`. `slice` is the number of units that one request takes from it.
    ///
    /// A request takes at most a sixteenth of the remaining units, or of the capacity if the
    /// remaining units are not known yet. If the hits that wait for the request need more than this
    /// or more than `slice`, the request takes as many units as they need.
    ///
    /// # Panics
    ///
    /// Panics if `slice` is 0.
    #[track_caller]
    pub fn new(storage: impl Storage, slice: u32) -> Self {
        assert!(slice > 0, "invalid slice 0: a slice must be at least 1, for example 100");
        Self(Arc::new(LeaseTable::new(AnyStorage::new(storage), slice, MAX_KEYS, Arc::new(SystemClock::new()))))
    }

    /// Returns a handle to the same storage, with these settings and without leases.
    fn with(self, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(LeaseTable::new(self.0.inner.clone(), self.0.slice, max_keys, clock)))
    }

    /// Sets the maximum number of keys that have a lease at the same time. Defaults to 10,000. A
    /// key counts once for each policy.
    ///
    /// The returned storage has no leases, and is independent of clones of this one.
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

    /// Sets the clock that measures the time until a lease ends, for example in tests. Defaults to
    /// [`SystemClock`]. The clock of the inner storage may show another time.
    ///
    /// The returned storage has no leases, and is independent of clones of this one.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let max_keys = self.0.max_keys;
        self.with(max_keys, Arc::new(clock))
    }

    /// Returns the inner storage.
    pub fn get_ref(&self) -> &AnyStorage {
        &self.0.inner
    }

    /// Returns the number of hits that were admitted from a lease, without a request of their own.
    pub fn local_decisions(&self) -> u64 {
        self.0.counters.counted().0
    }

    /// Returns the number of times that units were requested from the inner storage. Several
    /// waiting hits can share one request. Hits, peeks and charges that are sent to the storage
    /// unchanged are not counted.
    pub fn misses(&self) -> u64 {
        self.0.counters.counted().1
    }

    /// Returns the number of keys that have a lease whose window has not ended, even if all its
    /// units are spent. A key counts once for each policy.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Refunds the unspent units of all leases to the storage, and takes no more slices. Call it at
    /// shutdown, after the last request.
    ///
    /// `close` applies to all clones of this handle, from the first poll of the future:
    ///
    /// - Later hits go to the storage, each with its own cost.
    /// - A slice in flight serves the hits that wait for it. The rest is refunded. The future waits
    ///   for that, unless the slice was requested in another runtime.
    /// - A lease whose window has ended is dropped.
    ///
    /// If the future is dropped early, the leases of fewer than 100 keys can be lost until their
    /// windows end. The other leases stay until `close` is called again or the last handle is
    /// dropped.
    ///
    /// # Errors
    ///
    /// Returns the first error of a refund, after all refunds have been tried. Units whose refund
    /// failed are lost until their window ends.
    pub fn close(&self) -> impl Future<Output = Result<(), StorageError>> + Send + use<> {
        let shared = Arc::clone(&self.0);
        async move { shared.close().await }
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

/// Returns `true` for a policy whose hits are served from leases.
fn is_leased(policy: &Policy) -> bool {
    match policy.limits() {
        [limit] if !policy.is_shadow() => limit.is_fixed_window(),
        _ => false,
    }
}

impl Storage for Leases {
    fn decide(&self, mut request: StorageRequest<'_>) -> StorageFuture<Decision> {
        // The slice may pay a part of a charge. Then the storage decides on less.
        let (cost, mut taken) = (request.cost, None);
        if request.op == Op::Charge && cost > 0 && is_leased(request.policy) {
            match self.0.take_for_charge(request.policy, request.key, cost) {
                Some((all, Some(decision))) => {
                    all.keep();
                    return StorageFuture::ok(decision);
                }
                Some((part, None)) => (request.cost, taken) = (cost - part.units(), Some(part)),
                None => {}
            }
        }
        // The part that the slice has paid is put back unless the storage charges the rest.
        let complete = move |decided: Result<Decision, StorageError>| {
            let decision = decided?;
            if decision.is_admitted() {
                taken.into_iter().for_each(Taken::keep);
            }
            Ok(decision.of_cost(cost))
        };
        match self.0.decide(&request, is_leased(request.policy)) {
            Route::Local(decision) => StorageFuture::ok(decision),
            Route::Inner => self.0.inner.decide(request).map(complete),
            Route::Wait(answer) => {
                let (inner, request) = (self.0.inner.clone(), request.owned());
                StorageFuture::new(async move {
                    complete(match answer.await.map_err(|_| cancelled())?? {
                        Some(given) => given.claim().ok_or_else(cancelled),
                        None => inner.decide(request.borrow()).await,
                    })
                })
            }
        }
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

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        match self.0.enqueue(policy, key, Command::Clear) {
            Route::Local(_) => StorageFuture::ok(()),
            Route::Wait(answer) => done(answer),
            Route::Inner => {
                // A lease of this time may be older than the clear.
                let (table, place) = (Arc::clone(&self.0), self.0.place(policy, key));
                self.0.inner.clear(policy, key).finally(move || table.forget(place))
            }
        }
    }

    /// Corrects the cost of a hit, from the lease if possible:
    ///
    /// - If `actual` is less than the cost, refunds the difference to the lease. The refund goes to
    ///   the storage instead if the key has no lease of the same window, or if units of that window
    ///   were charged to the storage.
    /// - If `actual` is more, takes the difference from the lease. If the lease has too few units,
    ///   charges the rest to the storage.
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let Some(units) = actual.checked_sub(decision.cost()) else {
            // A hit by another kind of policy has spent units of other limits, too.
            let put_back = || self.0.put_back(policy, key, decision, decision.cost() - actual);
            return match is_leased(policy).then(put_back).flatten() {
                Some(Route::Local(_)) => StorageFuture::ok(()),
                Some(Route::Wait(answer)) => done(answer),
                Some(Route::Inner) | None => self.0.inner.settle(policy, key, decision, actual),
            };
        };
        let take = || self.0.take_for_charge(policy, key, units).map(|(taken, _)| taken);
        let taken = if decision.is_from_fallback() { None } else { take() };
        let actual = actual - taken.as_ref().map_or(0, Taken::units);
        if actual == decision.cost() {
            taken.into_iter().for_each(Taken::keep);
            return StorageFuture::ok(());
        }
        // If the storage does not charge the rest, the units of the slice are put back.
        self.0.inner.settle(policy, key, decision, actual).map(move |settled| {
            if settled.is_ok() {
                taken.into_iter().for_each(Taken::keep);
            }
            settled
        })
    }

    fn check(&self) -> StorageFuture<()> {
        self.0.inner.check()
    }

    /// Clears the inner storage, and then drops all leases of this node, even if the inner storage
    /// fails.
    fn clear_all(&self) -> StorageFuture<u64> {
        // Leases of this time may be older than the clear.
        let table = Arc::clone(&self.0);
        self.0.inner.clear_all().finally(move || table.table.visit_all(LeaseEntry::forget))
    }

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&self.0.inner)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        check(policy)?;
        self.0.inner.validate(policy)
    }
}

/// Returns the future of a change that the key's worker makes.
fn done(answer: oneshot::Receiver<LeaseResult>) -> StorageFuture<()> {
    StorageFuture::new(async { answer.await.map_err(|_| cancelled())?.map(drop) })
}

fn cancelled() -> StorageError {
    let message = "lease task was cancelled: leases on a storage with round trips need a running tokio runtime";
    StorageError::new(StorageErrorKind::Cancelled, message)
}

/// Prints the inner storage, the settings and the counts, but no keys and no leases.
impl fmt::Debug for Leases {
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
