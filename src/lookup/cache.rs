//! The cache of looked-up tenants, and the lookups in flight.
//!
//! The cache is `quick_cache`, which keeps ids in use during a flood of new ones and needs two
//! crates. `moka` needs about a dozen. It has one shard, because the ids of a full shard would
//! evict each other while other shards have room.

use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, UnitWeighter};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{FindTenant, LookupConfig, LookupError, LookupResult, Tenant, TenantLookup};
use crate::extract::Head;
use crate::storage::runtime_with_time;
use crate::sync::unpoisoned;

/// The time between lookups of one id while they fail and an earlier result is cached.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Replaces a time to live whose end would overflow an [`Instant`].
const NEVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// For each lookup that may run, this many others may wait.
const WAITING_PER_LOOKUP: usize = 16;

/// A handle to the cache and to the lookups in flight.
pub(super) struct LookupCache<I>(Arc<CacheState<I>>);

struct CacheState<I> {
    config: LookupConfig<I>,
    results: Cache<I, Arc<Cached>>,
    /// The lookups that run, and those that wait for a permit. A result is inserted under this
    /// lock, so a forgotten lookup inserts none.
    flights: Mutex<HashMap<I, Flight>>,
    max_flights: usize,
    permits: Semaphore,
}

/// The lock on the lookups in flight.
type Flights<'a, I> = MutexGuard<'a, HashMap<I, Flight>>;

/// A successful result.
struct Cached {
    tenant: Arc<Tenant>,
    /// The time from which the next request starts another lookup.
    fresh_until: Instant,
    /// `true` if the last lookup failed. Then requests use this tenant and do not wait for the
    /// next lookup.
    is_stale: bool,
}

impl<I> Clone for LookupCache<I> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> LookupCache<I> {
    pub(super) fn new(config: LookupConfig<I>) -> Self {
        let max_lookups = config.settings.max_lookups.clamp(1, Semaphore::MAX_PERMITS);
        Self(Arc::new(CacheState {
            results: cache(config.settings.max_tenants.max(1)),
            flights: Mutex::default(),
            max_flights: max_lookups.saturating_mul(1 + WAITING_PER_LOOKUP),
            permits: Semaphore::new(max_lookups),
            config,
        }))
    }

    pub(super) fn forget(&self, id: &I) {
        let mut flights = self.0.flights();
        let removed = (flights.remove(id), self.0.results.remove(id));
        // A value is dropped after the lock is released, because its `Drop` may use the lookup.
        drop(flights);
        drop(removed);
    }

    pub(super) fn clear(&self) {
        let mut flights = self.0.flights();
        let removed = (mem::take(&mut *flights), self.0.results.drain().collect::<Vec<_>>());
        drop(flights);
        drop(removed);
    }

    /// Joins the lookup of this id that is in flight, or starts one.
    #[cold]
    fn join_or_start(&self, id: I) -> TenantLookup {
        let Some(runtime) = runtime_with_time() else { return TenantLookup::Ready(Err(LookupError::no_runtime())) };
        let flight = match self.0.flight(&runtime, &id) {
            Ok(flight) => flight,
            Err(known) => return TenantLookup::Ready(known),
        };
        let (shared, limit) = (Arc::clone(&self.0), self.0.config.settings.timeout);
        // A timer of this runtime, because that of the lookup may not run.
        let result = timeout(limit, Arc::clone(&self.0).wait(runtime, id.clone(), flight));
        TenantLookup::Pending(Box::pin(async move {
            result.await.unwrap_or_else(|_| shared.keep(shared.flights(), &id, Err(LookupError::timed_out(limit))))
        }))
    }
}

/// Creates a cache of exactly this many ids.
///
/// With more than one shard, the ids of a full shard would evict each other while others have room.
fn cache<I: Eq + Hash>(max_tenants: usize) -> Cache<I, Arc<Cached>> {
    let mut options = OptionsBuilder::new();
    options.shards(1).estimated_items_capacity(max_tenants).weight_capacity(max_tenants as u64);
    let options = options.build().expect("both capacities are set");
    Cache::with_options(options, UnitWeighter, DefaultHashBuilder::default(), DefaultLifecycle::default())
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> FindTenant for LookupCache<I> {
    fn find(&self, head: &Head<'_>) -> TenantLookup {
        let id = match (self.0.config.id)(head) {
            Ok(Some(id)) => id,
            Ok(None) => return TenantLookup::Ready(Ok(Arc::clone(&self.0.config.anonymous))),
            Err(missing) => return TenantLookup::Ready(Ok(Arc::new(missing.into()))),
        };
        let cached = self.0.results.get(&id);
        match cached {
            Some(cached) if cached.is_fresh() => TenantLookup::Ready(Ok(Arc::clone(&cached.tenant))),
            Some(cached) if cached.is_stale => {
                // The lookup runs in a separate task, so dropping this future does not stop it.
                drop(self.join_or_start(id));
                TenantLookup::Ready(Ok(Arc::clone(&cached.tenant)))
            }
            _ => self.join_or_start(id),
        }
    }
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> CacheState<I> {
    /// Joins the lookup of this id that is in flight, or starts one. Returns an error with the
    /// result if it is known already: if a lookup has succeeded since the caller read the cache,
    /// or if too many lookups are in flight.
    fn flight(self: &Arc<Self>, runtime: &Handle, id: &I) -> Result<Flight, LookupResult> {
        let mut flights = self.flights();
        let known = flights.get(id);
        if let Some(flight) = known.filter(|flight| !flight.is_overdue()) {
            return Ok(flight.clone());
        }
        if let Some(cached) = self.results.get(id).filter(|cached| cached.is_fresh()) {
            return Err(Ok(Arc::clone(&cached.tenant)));
        }
        let in_flight = flights.len();
        if known.is_none() && in_flight >= self.max_flights {
            return Err(self.keep(flights, id, Err(LookupError::too_many(in_flight))));
        }
        let (sender, result) = watch::channel(None);
        let flight = Flight { result, ends: Instant::now().checked_add(self.config.settings.timeout) };
        flights.insert(id.clone(), flight.clone());
        drop(flights);
        let task = Task { shared: Arc::clone(self), id: id.clone(), flight: flight.clone(), sender };
        runtime.spawn(task.look_up());
        Ok(flight)
    }

    /// Waits for the result of a lookup. If its runtime ends, starts another lookup, once.
    async fn wait(self: Arc<Self>, runtime: Handle, id: I, flight: Flight) -> LookupResult {
        if let Some(result) = flight.result().await {
            return result;
        }
        match self.flight(&runtime, &id) {
            Ok(restarted) => restarted.result().await.unwrap_or_else(|| Err(LookupError::panicked())),
            Err(known) => known,
        }
    }

    /// Caches a successful result. Replaces an error by the last good result, if there is one.
    fn keep(&self, flights: Flights<'_, I>, id: &I, result: LookupResult) -> LookupResult {
        let (tenant, ttl, is_stale) = match &result {
            Ok(tenant) => (Arc::clone(tenant), self.config.settings.ttl, false),
            Err(_) => match self.results.get(id) {
                Some(last) if last.is_fresh() => {
                    drop(flights);
                    return Ok(Arc::clone(&last.tenant));
                }
                Some(last) => (Arc::clone(&last.tenant), RETRY_AFTER, true),
                None => return result,
            },
        };
        let now = Instant::now();
        let fresh_until = now.checked_add(ttl).unwrap_or_else(|| now + NEVER);
        let cached = Arc::new(Cached { tenant: Arc::clone(&tenant), fresh_until, is_stale });
        let mut removed = Default::default();
        self.results.insert_with_lifecycle(id.clone(), cached, &mut removed);
        // As in `forget`. An error is a value of the program, too.
        drop(flights);
        drop((removed, result));
        Ok(tenant)
    }

    fn flights(&self) -> Flights<'_, I> {
        unpoisoned(self.flights.lock())
    }
}

impl Cached {
    fn is_fresh(&self) -> bool {
        Instant::now() < self.fresh_until
    }
}

/// A lookup in flight. Dropping it removes it from the others, even if the runtime shuts down
/// before its task runs.
struct Task<I: Clone + Eq + Hash + Send + Sync + 'static> {
    shared: Arc<CacheState<I>>,
    id: I,
    flight: Flight,
    // Dropped after the flight is removed, so that a request that waits for it does not join it
    // again.
    sender: watch::Sender<Option<LookupResult>>,
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> Task<I> {
    /// Looks up the tenant, and sends the result to the requests that wait for it.
    async fn look_up(self) {
        let limit = self.shared.config.settings.timeout;
        let looking_up = async {
            let _permit = self.shared.permits.acquire().await;
            // The lookup has a task of its own, because it may panic. Dropping the set at the
            // timeout aborts this task.
            let mut task = JoinSet::new();
            let (shared, id) = (Arc::clone(&self.shared), self.id.clone());
            task.spawn(async move { (shared.config.look_up)(id).await });
            task.join_next().await
        };
        let result = match timeout(limit, looking_up).await {
            Ok(Some(Ok(Ok(tenant)))) => Ok(Arc::new(tenant)),
            Ok(Some(Ok(Err(error)))) => Err(LookupError::failed(error)),
            Ok(_) => Err(LookupError::panicked()),
            Err(_) => Err(LookupError::timed_out(limit)),
        };
        let flights = self.shared.flights();
        // A lookup that was forgotten, or replaced because it is overdue, may have an older tenant.
        let is_older = result.is_ok() && !self.is_current(&flights);
        let result = if is_older {
            drop(flights);
            result
        } else {
            self.shared.keep(flights, &self.id, result)
        };
        self.sender.send_replace(Some(result));
    }

    fn is_current(&self, flights: &Flights<'_, I>) -> bool {
        flights.get(&self.id).is_some_and(|flight| flight.is(&self.flight))
    }
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> Drop for Task<I> {
    fn drop(&mut self) {
        let mut flights = self.shared.flights();
        if self.is_current(&flights) {
            flights.remove(&self.id);
        }
    }
}

/// The handle of a request that waits for a lookup in flight.
#[derive(Clone)]
struct Flight {
    /// `None` until the lookup has completed.
    result: watch::Receiver<Option<LookupResult>>,
    /// The instant of its timeout. `None` for never.
    ends: Option<Instant>,
}

impl Flight {
    /// Returns `true` after the timeout. The task of the lookup has then failed to end it, because
    /// its runtime does not run.
    fn is_overdue(&self) -> bool {
        self.ends.is_some_and(|ends| ends <= Instant::now())
    }

    fn is(&self, other: &Self) -> bool {
        self.result.same_channel(&other.result)
    }

    /// Waits for the result. Returns `None` if the task of the lookup ended early, because its
    /// runtime has ended.
    async fn result(mut self) -> Option<LookupResult> {
        self.result.wait_for(Option::is_some).await.ok()?.clone()
    }
}
