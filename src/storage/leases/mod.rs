//! Leases: units that a process takes in one round trip and spends locally for a short time.

mod lease;
mod members;
mod route;
mod table;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::lease::with_unspent;
use self::table::{LeaseEntry, LeaseSettings, LeaseTable};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Limit, Op, Policy};
use crate::storage::contract::forward_storage;
use crate::storage::key_table::{assert_max_keys, checked_ttl};
use crate::storage::{AnyStorage, Clock, Storage, StorageError, StorageFuture, StorageRequest, Summary, SystemClock};
use crate::strategy::Status;
use crate::time::micros;

/// Takes units from the storage in advance, and spends them locally for a short time. Use it for
/// keys that several processes hit more often than the server can answer.
///
/// ```
/// use tower_ratelimit::storage::Leases;
/// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In production, wrap a storage on a server, such as Redis.
/// let storage = Leases::new(MemoryStorage::new(), 100);
/// let limiter = RateLimiter::with_storage(Quota::per_minute(100_000), storage.clone());
///
/// for _ in 0..1_000 {
///     assert!(limiter.hit(&Key::global()).await?.is_admitted());
/// }
/// // The first hit takes its own unit. Each later request takes up to 100 units more.
/// assert!(storage.misses() < 20 && storage.local_decisions() > 980);
/// # Ok(())
/// # }
/// ```
///
/// The units that one request takes are a *slice*, and those that are not spent yet are a *lease*.
/// A lease ends after the [`ttl`](Self::ttl), called L here, or with its window if that ends
/// earlier. Then the unspent units are refunded, unless the window has ended.
///
/// # Bounds
///
/// **A process spends a leased unit at most L after the storage has admitted it. So in any span d,
/// all processes together spend at most what the strategy promises for d + L.**
///
/// For N units per period P, this means:
///
/// | strategy | all processes together spend at most |
/// |---|---|
/// | fixed window, aligned window, calendar window | N in each window, because a lease ends with its window |
/// | moving window | N in any span of P - L |
/// | sliding window counter | 2N in any span of P - L |
/// | token bucket with the burst B | B + N·(d + L)/P in any span d |
/// | several limits | the bounds of all limits, with the shortest L of them |
///
/// - The bounds hold for any number of processes, for clocks that differ, for lost replies, and for
///   processes that crash or stop for a while. Each process measures L by its own monotonic clock,
///   and begins before it sends the request.
/// - Refusals always come from the storage. While a process has leased units, another one can be
///   refused too early, for at most L.
/// - An admitted hit reports the units of the lease plus those that remained in the storage. Other
///   processes may have spent some of them. It reports the time at which the storage admitted its
///   slice.
///
/// Elastic windows, leaky buckets and lockouts cannot be leased, because each hit or refusal
/// changes their states. Such policies fail [validation](Storage::validate). If such a policy was
/// chosen for a request, the hit is sent to the storage. So is each hit of a policy that [keeps
/// units](crate::Limit::keep).
///
/// # Slices
///
/// The first hits of a key are sent to the storage. A slice then has as many units as this process
/// will spend in L if it continues as before, but at most
///
/// - the units that [`new`](Self::new) was called with,
/// - a sixteenth of the units that remain in the storage,
/// - for a token bucket, the units that it refills in L.
///
/// Hits that find no lease wait for one request, which takes their own units and a slice. If the
/// storage refuses it, each of them is sent alone. After a failed request, hits are sent alone until
/// one succeeds.
///
/// Charges and settlements use the lease first. A [clear](Storage::clear) drops the lease of this
/// process. Other processes keep their leases, for at most L.
///
/// # Lost units
///
/// Lost units count in the storage although no process spends them, until the strategy forgets them.
///
/// | event | maximum of lost units per key and runtime of a process |
/// |---|---|
/// | an outage that loses replies | one slice, and the costs of the hits that were in flight |
/// | a crash, or the end of the runtime | one slice |
/// | a [clear](Storage::clear) | the slice in flight, and the lease if the clear fails |
/// | the last handle is dropped | none, if the runtime still runs for L |
/// | [`close`](Self::close), if the storage does not fail | none |
///
/// A token bucket refills a slice within L. What it has refilled is not refunded, because a bucket
/// that was full meanwhile would get it twice.
///
/// Make `Leases` the outermost wrapper of a storage. Clones share their leases. The guide on [several
/// processes](crate::guide::several_processes#fewer-requests-to-the-storage) has the details.
///
/// # Errors
///
/// If the storage fails, all hits that wait for the request fail with the same [`StorageError`]. A
/// hit can wait for two timeouts of the storage: one for the request in flight, and one for its own
/// request. If its own request is refused and the hit is sent alone, it can wait for a third.
///
/// A call fails with the kind [`Cancelled`](crate::storage::StorageErrorKind::Cancelled) if its
/// runtime shuts down. Nothing is leased outside of a tokio runtime with time.
#[doc(alias("batching", "prefetch"))]
#[derive(Clone)]
pub struct Leases(Arc<LeaseTable>);

/// The default of [`Leases::max_keys`].
const MAX_KEYS: usize = 10_000;

impl Leases {
    /// Wraps `storage`. A lease has at most `slice` units.
    ///
    /// # Panics
    ///
    /// Panics if `slice` is 0.
    #[track_caller]
    pub fn new(storage: impl Storage, slice: u32) -> Self {
        assert!(slice > 0, "invalid slice 0: a slice must be at least 1, for example 100");
        let clock = Arc::new(SystemClock::new());
        let settings = LeaseSettings { slice, max_keys: MAX_KEYS, ttl: None, only: None, clock };
        Self(Arc::new(LeaseTable::new(AnyStorage::new(storage), settings)))
    }

    /// Returns a handle to the same storage, with these settings and without leases.
    fn with(self, change: impl FnOnce(&mut LeaseSettings)) -> Self {
        let mut settings = self.0.settings.clone();
        change(&mut settings);
        Self(Arc::new(LeaseTable::new(self.0.inner.clone(), settings)))
    }

    /// Sets the maximum time to live of a lease. Defaults to a twentieth of the shortest period of
    /// the policy, but at most 1 second.
    ///
    /// A longer time saves requests, and weakens the [bounds](Self#bounds). The returned storage has
    /// no leases, and is independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `ttl` is less than a millisecond or more than a day.
    #[must_use]
    #[track_caller]
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|settings| settings.ttl = Some(checked_ttl(ttl)))
    }

    /// Sets the maximum number of keys that can have a lease at the same time. Defaults to 10,000. A
    /// key counts once for each policy. The hits of further keys are sent to the storage.
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
        self.with(|settings| settings.max_keys = max_keys)
    }

    /// Leases only the units of the policy with this name. The storage decides on other policies.
    /// Defaults to all policies.
    ///
    /// Use it for the limit of all clients among [several keys](crate::RateLimitLayer::and), whose
    /// key is hit by every request. Such a request takes the units of this policy first, from a
    /// lease in most cases. Then the storage decides on the other keys together. If it refuses, the
    /// units return to the lease. They are refunded to the storage if they came from there, or if
    /// the lease has ended.
    ///
    /// ```
    /// use tower_ratelimit::extract::Header;
    /// use tower_ratelimit::storage::Leases;
    /// use tower_ratelimit::{Global, MemoryStorage, OnError, Policy, Quota, RateLimitLayer};
    ///
    /// let per_user = Policy::from(Quota::per_minute(100)).with_name("user");
    /// let for_all = Policy::from(Quota::per_minute(1_000_000)).with_name("all");
    /// // In production, wrap a storage on a server, such as Redis.
    /// let storage = Leases::new(MemoryStorage::new(), 1_000).only("all");
    /// let layer = RateLimitLayer::new(per_user, Header::new("x-user"))
    ///     .and(for_all, Global::new())
    ///     .storage(storage, OnError::Admit);
    /// ```
    ///
    /// Without this method, leases do not decide on several keys.
    ///
    /// | aspect | behavior with several keys |
    /// |---|---|
    /// | limits | the leased policy has the [bounds](Self#bounds) of leases, and a token bucket can admit more if late refunds overlap; the others are exact |
    /// | units of a refused request | taken from the lease for about one round trip. Meanwhile they can be the reason that another request is refused |
    /// | a request that is dropped | units that were taken from a lease return; those of the other policies may stay spent, and those of the leased policy if there was no lease |
    /// | round trips | one for the other policies; one more if the lease is used up, also if the leased policy refuses |
    /// | a refusal by the leased policy | the others spend nothing, and an elastic window or a lockout by refusals does not count it. Around a [`RefusalCache`](super::RefusalCache) they are not asked, so lists of header fields leave them out |
    /// | a decision of the storage that fails | the units return, and the request gets the error; a refusal stays a refusal |
    ///
    /// Wrap a storage that decides on one key, such as memcached, in
    /// [`InOrder`](super::InOrder) first, also if there is only one other key. A layer does not know
    /// the policies of [`policy_by`](crate::policy_by) when it is built, so the storage must support
    /// several. With one other key, `InOrder` adds no call of the storage.
    ///
    /// The returned storage has no leases, and is independent of clones of this one.
    #[must_use]
    pub fn only(self, policy_name: impl Into<Arc<str>>) -> Self {
        self.with(|settings| settings.only = Some(policy_name.into()))
    }

    /// Sets the clock that measures the time until a lease ends, for example in tests. Defaults to
    /// [`SystemClock`]. The clock of the inner storage may show another time.
    ///
    /// The returned storage has no leases, and is independent of clones of this one.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        self.with(|settings| settings.clock = Arc::new(clock))
    }

    /// Returns the inner storage.
    pub fn get_ref(&self) -> &AnyStorage {
        &self.0.inner
    }

    /// Returns the number of hits that were admitted from a lease, without a request of their own.
    pub fn local_decisions(&self) -> u64 {
        self.0.counters.counted().0
    }

    /// Returns the number of requests for units to the inner storage: one for each hit that is sent
    /// alone, and one for each slice. Several waiting hits can share the request for a slice.
    pub fn misses(&self) -> u64 {
        self.0.counters.counted().1
    }

    /// Returns the number of keys that have a lease that has not ended, even if all its units are
    /// spent. A key counts once for each policy.
    pub fn len(&self) -> usize {
        let now = self.0.now();
        self.0.table.count(|entry| entry.lease.as_ref().is_some_and(|lease| lease.time_left(now).is_some()))
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
    /// - A slice in flight serves the hits that wait for it. The future waits for it and refunds the
    ///   rest, unless the slice was requested in another runtime. Then the rest is refunded when its
    ///   lease ends.
    ///
    /// If the future is dropped early, the leases of fewer than 100 keys can be lost. The other
    /// leases are refunded when they end, or by another call.
    ///
    /// # Errors
    ///
    /// Returns the first error of a refund, after all refunds have been tried. Units whose refund
    /// failed are lost until the strategy forgets them.
    pub fn close(&self) -> impl Future<Output = Result<(), StorageError>> + Send + use<> {
        let shared = Arc::clone(&self.0);
        async move { shared.close().await }
    }
}

impl LeaseSettings {
    /// Returns `true` if a lease can decide on the request. It does not show whether the units that
    /// a limit keeps remain in the storage.
    fn can_lease(&self, request: &StorageRequest<'_>) -> bool {
        let is_possible = |limit: &Limit| is_leasable(limit) && limit.kept() == 0;
        request.cost > 0 && self.selects(request.policy) && request.policy.limits().iter().all(is_possible)
    }
}

/// Returns `true` if units of the limit can be spent without its state.
fn is_leasable(limit: &Limit) -> bool {
    !limit.counts_refusals() && !limit.strategy().delays() && !limit.locks()
}

impl Storage for Leases {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if !self.0.settings.can_lease(&request) {
            return self.0.inner.decide(request);
        }
        let (shared, StorageRequest { policy, key, cost, .. }) = (Arc::clone(&self.0), request);
        match request.op {
            Op::Hit => match shared.take(&request) {
                Some(decision) => StorageFuture::ok(decision),
                None => StorageFuture::new(shared.decide(request.owned())),
            },
            Op::Peek => {
                let (place, policy) = (shared.place(policy, key), policy.clone());
                shared.inner.decide(request).map(move |decided| {
                    let now = shared.now();
                    let unspent = shared.with_entry(place, |entry| entry.lease_at(&policy, now).map(|it| it.unspent));
                    Ok(seen(decided?, unspent.flatten().unwrap_or(0)))
                })
            }
            Op::Charge => {
                let (inner, owned) = (shared.inner.clone(), request.owned());
                let charge_storage = move |rest| {
                    inner.decide(StorageRequest { cost: rest, ..owned.borrow() }).map(move |it| Ok(it?.of_cost(cost)))
                };
                let charge = (policy.clone(), key.clone(), cost);
                StorageFuture::new(shared.charge(charge, |charged| charged, charge_storage, Decision::is_admitted))
            }
        }
    }

    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let Err(error) = StorageRequest::check_members(members) {
            return StorageFuture::ready(Err(error));
        }
        members::decide_all(self, members)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        if !self.0.settings.can_lease(&request) {
            return self.0.inner.try_admit(request, shown);
        }
        let Some(decision) = self.0.take(&request) else { return false };
        if let Some(shown) = shown {
            *shown = Summary { at: decision.wall_at(), limit: *decision.shown() };
        }
        true
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let (shared, place) = (Arc::clone(&self.0), self.0.place(policy, key));
        let forget = move || {
            shared.with_entry(place, LeaseEntry::forget);
        };
        forget();
        // A slice that arrives meanwhile may be older than the clear.
        self.0.inner.clear(policy, key).finally(forget)
    }

    /// Corrects the cost of a hit, in the lease if possible:
    ///
    /// - If `actual` is less than the cost, refunds the difference to the lease from which the hit
    ///   was spent, or to the storage if that lease has ended.
    /// - If `actual` is more, charges the difference.
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        let (shared, inner, cost) = (Arc::clone(&self.0), self.0.inner.clone(), decision.cost());
        match actual.checked_sub(cost) {
            _ if !decision.has_spent() => StorageFuture::ok(()),
            Some(0) => StorageFuture::ok(()),
            None if shared.put_back(policy, key, decision, cost - actual) => StorageFuture::ok(()),
            Some(more) if !decision.is_from_fallback() => {
                let (hit, of) = (decision.clone(), (policy.clone(), key.clone()));
                let charge_storage = move |rest| inner.settle(&of.0, &of.1, &hit, cost + rest);
                let charge = (policy.clone(), key.clone(), more);
                StorageFuture::new(shared.charge(charge, drop, charge_storage, |()| true))
            }
            _ => inner.settle(policy, key, decision, actual),
        }
    }

    fn check(&self) -> StorageFuture<()> {
        self.0.inner.check()
    }

    /// Clears the inner storage, and then drops all leases of this process, even if the inner
    /// storage fails.
    fn clear_all(&self) -> StorageFuture<u64> {
        // Leases of this time may be older than the clear.
        let shared = Arc::clone(&self.0);
        self.0.inner.clear_all().finally(move || shared.table.visit_all(LeaseEntry::forget))
    }

    forward_storage!(self => self.0.inner; keys);

    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&self.0.inner)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        match policy.limits().iter().find(|limit| self.0.settings.selects(policy) && !is_leasable(limit)) {
            Some(limit) => Err(ConfigError::new(format!(
                "cannot lease units of \"{limit}\", because each hit or refusal changes its state: use a fixed, moving \
                 or sliding window or a token bucket, or remove the leases"
            ))),
            None => self.0.inner.validate(policy),
        }
    }

    /// Checks that the inner storage decides together on the policies that are not leased.
    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        if self.0.settings.only.is_none() {
            return Err(members::leases_one_key());
        }
        let others: Vec<_> = policies.iter().filter(|policy| !self.0.settings.selects(policy)).cloned().collect();
        if others.is_empty() { Ok(()) } else { self.0.inner.validate_members(&others) }
    }

    /// Returns `false` for the leased policy, whose units are taken by themselves.
    fn needs_outer_key(&self, policy: Option<&str>) -> bool {
        let only = self.0.settings.only.as_deref();
        (only.is_none() || only != policy) && self.0.inner.needs_outer_key(policy)
    }
}

/// Returns the view of a process with leased units on the decision of a peek: a hit can spend them.
fn seen(mut peek: Decision, unspent: u32) -> Decision {
    let is_undecided = peek.is_from_fallback() || peek.is_contended() || peek.is_storage_full();
    if unspent == 0 || is_undecided {
        return peek;
    }
    let cost = peek.cost();
    for status in peek.statuses_mut() {
        let retry = status.retry_after().map(micros);
        *status = with_unspent(status, unspent);
        if cost > status.remaining() {
            *status = Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), retry);
        }
    }
    peek.conclude(peek.at());
    peek
}

/// Prints the inner storage, the settings and the counts, but no keys and no leases.
impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("inner", &self.0.inner)
            .field("settings", &self.0.settings)
            .field("len", &self.len())
            .field("local_decisions", &self.local_decisions())
            .field("misses", &self.misses())
            .finish_non_exhaustive()
    }
}
