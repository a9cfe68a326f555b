//! The cache of looked-up tenants.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::flight::{self, Flight, FlightSender};
use super::{Finding, Found, Lookup, LookupError, PolicyLookup, Tenant};
use crate::extract::Head;

/// The time between look-ups of one id while they fail and an earlier result is cached.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Replaces a time to live whose end would overflow an [`Instant`].
const NEVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// A handle to the cache and to the look-ups in flight.
pub(super) struct LookupCache<I>(Arc<Shared<I>>);

struct Shared<I> {
    lookup: PolicyLookup<I>,
    results: Cache<I, Arc<Cached>>,
    flights: Mutex<HashMap<I, Flight>>,
    permits: Semaphore,
}

/// A successful result.
struct Cached {
    tenant: Arc<Tenant>,
    /// The time from which the next request starts another look-up.
    fresh_until: Instant,
    /// `true` if the last look-up failed. Then requests use this tenant and do not wait for the
    /// next look-up.
    is_stale: bool,
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> LookupCache<I> {
    pub(super) fn new(lookup: PolicyLookup<I>) -> Self {
        Self(Arc::new(Shared {
            results: Cache::new(lookup.settings.max_tenants.max(1)),
            flights: Mutex::default(),
            permits: Semaphore::new(lookup.settings.max_lookups.clamp(1, Semaphore::MAX_PERMITS)),
            lookup,
        }))
    }

    /// Joins the look-up of this id that is in flight, or starts one. Returns the future of this
    /// look-up as `Err`. If a look-up has succeeded since the caller read the cache, returns its
    /// tenant as `Ok` instead.
    #[cold]
    fn join_or_start(&self, id: I) -> Result<Arc<Tenant>, Finding> {
        let Ok(runtime) = Handle::try_current() else {
            return Err(Box::pin(std::future::ready(Err(LookupError::no_runtime()))));
        };
        let mut flights = self.0.flights();
        if let Some(flight) = flights.get(&id) {
            return Err(flight.clone().wait());
        }
        if let Some(cached) = self.0.results.get(&id).filter(|cached| cached.is_fresh()) {
            return Ok(Arc::clone(&cached.tenant));
        }
        let (sender, flight) = flight::start();
        flights.insert(id.clone(), flight.clone());
        drop(flights);
        runtime.spawn(Arc::clone(&self.0).look_up(id, sender));
        Err(flight.wait())
    }
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> Lookup for LookupCache<I> {
    fn find(&self, head: &Head<'_>) -> Found {
        let id = match (self.0.lookup.id)(head) {
            Ok(Some(id)) => id,
            Ok(None) => return Found::Unlimited,
            Err(missing) => return Found::Missing(missing),
        };
        let cached = self.0.results.get(&id);
        match cached {
            Some(cached) if cached.is_fresh() => Found::Tenant(Arc::clone(&cached.tenant)),
            Some(cached) if cached.is_stale => {
                // The look-up runs in a separate task, so dropping this future does not stop it.
                drop(self.join_or_start(id));
                Found::Tenant(Arc::clone(&cached.tenant))
            }
            _ => self.join_or_start(id).map_or_else(Found::Pending, Found::Tenant),
        }
    }
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> Shared<I> {
    /// Looks up one tenant, and sends the result to the requests that wait for it.
    async fn look_up(self: Arc<Self>, id: I, sender: FlightSender) {
        // Removes the flight even if the runtime shuts down.
        let _remove = RemoveOnDrop { shared: &self, id: &id };
        let timeout = self.lookup.settings.timeout;
        let looking_up = async {
            let _permit = self.permits.acquire().await;
            // The look-up has a task of its own, because it may panic. Dropping the set at the
            // timeout aborts this task.
            let mut task = JoinSet::new();
            let (shared, id) = (Arc::clone(&self), id.clone());
            task.spawn(async move { (shared.lookup.look_up)(id).await });
            task.join_next().await
        };
        let result = match tokio::time::timeout(timeout, looking_up).await {
            Ok(Some(Ok(Ok(tenant)))) => Ok(Arc::new(tenant)),
            Ok(Some(Ok(Err(error)))) => Err(LookupError::failed(error)),
            Ok(_) => Err(LookupError::panicked()),
            Err(_) => Err(LookupError::timed_out(timeout)),
        };
        sender.complete(self.keep(&id, result));
    }

    /// Caches a successful result. Replaces an error by the last good result, if there is one.
    fn keep(&self, id: &I, result: Result<Arc<Tenant>, LookupError>) -> Result<Arc<Tenant>, LookupError> {
        let (tenant, ttl, is_stale) = match result {
            Ok(tenant) => (tenant, self.lookup.settings.ttl, false),
            Err(error) => match self.results.get(id) {
                Some(last) => (Arc::clone(&last.tenant), RETRY_AFTER, true),
                None => return Err(error),
            },
        };
        let now = Instant::now();
        let fresh_until = now.checked_add(ttl).unwrap_or_else(|| now + NEVER);
        self.results.insert(id.clone(), Arc::new(Cached { tenant: Arc::clone(&tenant), fresh_until, is_stale }));
        Ok(tenant)
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<I, Flight>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cached {
    fn is_fresh(&self) -> bool {
        Instant::now() < self.fresh_until
    }
}

/// Removes the look-up of an id from the look-ups in flight when it is dropped.
struct RemoveOnDrop<'a, I: Clone + Eq + Hash + Send + Sync + 'static> {
    shared: &'a Shared<I>,
    id: &'a I,
}

impl<I: Clone + Eq + Hash + Send + Sync + 'static> Drop for RemoveOnDrop<'_, I> {
    fn drop(&mut self) {
        self.shared.flights().remove(self.id);
    }
}
