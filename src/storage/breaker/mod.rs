//! A circuit breaker around a storage, with an optional fallback.

mod circuit;
mod error;
mod fallback;
mod future;
mod state;
mod telemetry;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

pub use self::circuit::Circuit;
use self::circuit::Patience;
pub use self::error::BreakerError;
use self::fallback::Fallback;
pub use self::fallback::NoFallback;
use self::future::{Changing, Deciding};
pub use self::state::{CircuitState, Phase};
#[cfg(feature = "metrics")]
pub(crate) use self::telemetry::PATHS;
use crate::error::or_panic;
use crate::storage::{Storage, StorageRequest, Summary};
use crate::{ConfigError, Decision, DecisionSource, Key, Policy};

/// A circuit breaker: stops calling a storage that keeps failing, the primary, and can fall back to
/// another one.
///
/// ```
/// use tower_ratelimit::storage::Breaker;
/// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
///
/// # let redis = MemoryStorage::new();
/// // Three replicas of this program share `redis`. During an outage, each admits a third of the quota.
/// let storage = Breaker::new(redis).fallback(MemoryStorage::new(), 3);
/// let circuit = storage.circuit().clone();
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// assert_eq!(circuit.state().failures, 0);
/// ```
///
/// The breaker opens after 5 consecutive failures ([`failures`](Self::failures)). It then probes the
/// primary with one hit after 100 milliseconds, and up to every second while probes fail
/// ([`probe_after`](Self::probe_after)). The first probe that the primary answers closes it.
///
/// While it is open, the fallback decides by a [share](Policy::divide) of each policy. Without a fallback,
/// decisions fail at once, and [`OnError`](crate::OnError) decides. Clones share one state.
///
/// The primary needs a timeout. The storages of this crate have one, and
/// [`Timeout`](super::Timeout) adds one to others.
///
/// The guide on [outages](crate::guide::outages#the-circuit-breaker) has the details and the bounds.
///
/// # Errors
///
/// Decisions, refunds and clears fail with [`BreakerError`] if neither storage has answered. A refund
/// fails if the primary made the decision and the breaker is open. A clear fails if the primary was not
/// cleared.
#[derive(Clone, Debug)]
pub struct Breaker<P, F = NoFallback>(Arc<Parts<P, F>>);

#[derive(Debug)]
struct Parts<P, F> {
    primary: P,
    fallback: Option<Fallback<F>>,
    circuit: Circuit,
}

/// The defaults.
const PATIENCE: Patience =
    Patience { failures: 5, shortest: Duration::from_millis(100), longest: Duration::from_secs(1) };

impl<P: Storage> Breaker<P> {
    /// Wraps `primary`.
    pub fn new(primary: P) -> Self {
        Self::with(primary, None, PATIENCE)
    }
}

impl<P: Storage, F: Storage> Breaker<P, F> {
    fn with(primary: P, fallback: Option<Fallback<F>>, patience: Patience) -> Self {
        Self(Arc::new(Parts { primary, fallback, circuit: Circuit::new(patience) }))
    }

    /// Sets the storage that decides while the primary fails, with quotas divided by `replicas`, the
    /// number of processes that share the primary. Use a storage that cannot fail, such as memory.
    ///
    /// Returns a new breaker, which is closed.
    ///
    /// # Panics
    ///
    /// Panics if `replicas` is 0. [`try_fallback`](Self::try_fallback) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn fallback<G: Storage>(self, fallback: G, replicas: u32) -> Breaker<P, G> {
        or_panic(self.try_fallback(fallback, replicas))
    }

    /// As [`fallback`](Self::fallback), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `replicas` is 0.
    pub fn try_fallback<G: Storage>(self, fallback: G, replicas: u32) -> Result<Breaker<P, G>, ConfigError> {
        let replicas = NonZeroU32::new(replicas).ok_or_else(|| {
            ConfigError::new("0 replicas cannot divide a quota: write how many processes share the storage, at least 1")
        })?;
        let Parts { primary, circuit, .. } = &*self.0;
        Ok(Breaker::with(primary.clone(), Some(Fallback::new(fallback, replicas)), circuit.patience()))
    }

    /// Sets the number of consecutive failures that open the breaker. Defaults to 5.
    ///
    /// Returns a new breaker, which is closed.
    ///
    /// # Panics
    ///
    /// Panics if `failures` is 0. [`try_failures`](Self::try_failures) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn failures(self, failures: u32) -> Self {
        or_panic(self.try_failures(failures))
    }

    /// As [`failures`](Self::failures), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `failures` is 0.
    pub fn try_failures(self, failures: u32) -> Result<Self, ConfigError> {
        if failures == 0 {
            return Err(ConfigError::new(
                "after 0 failures nothing would ever be asked: use at least 1, for example 5",
            ));
        }
        Ok(self.patient(Patience { failures, ..self.0.circuit.patience() }))
    }

    /// Sets the time until the first probe, and the longest time between probes. Defaults to 100
    /// milliseconds and 1 second. The time doubles with each failed probe, and up to half of it is
    /// subtracted at random.
    ///
    /// Returns a new breaker, which is closed.
    ///
    /// # Panics
    ///
    /// Panics if `shortest` is less than a millisecond, or if `longest` is less than `shortest` or more
    /// than an hour. [`try_probe_after`](Self::try_probe_after) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn probe_after(self, shortest: Duration, longest: Duration) -> Self {
        or_panic(self.try_probe_after(shortest, longest))
    }

    /// As [`probe_after`](Self::probe_after), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `shortest` is less than a millisecond, or if `longest` is less than `shortest`
    /// or more than an hour.
    pub fn try_probe_after(self, shortest: Duration, longest: Duration) -> Result<Self, ConfigError> {
        if shortest < Duration::from_millis(1) || longest < shortest || longest > Duration::from_secs(3_600) {
            return Err(ConfigError::new(format!(
                "probes cannot come after {shortest:?} and at most {longest:?}: use at least a millisecond, then no less, and at \
                 most an hour, for example Duration::from_millis(100) and Duration::from_secs(1)"
            )));
        }
        Ok(self.patient(Patience { shortest, longest, ..self.0.circuit.patience() }))
    }

    fn patient(&self, patience: Patience) -> Self {
        let Parts { primary, fallback, .. } = &*self.0;
        let fallback = fallback.as_ref().map(|fallback| Fallback::new(fallback.storage.clone(), fallback.replicas));
        Self::with(primary.clone(), fallback, patience)
    }

    /// Returns a handle on the breaker's state that does not depend on the types of the storages.
    pub fn circuit(&self) -> &Circuit {
        &self.0.circuit
    }

    /// Returns the primary.
    pub fn primary(&self) -> &P {
        &self.0.primary
    }
}

impl<P: Storage, F: Storage> Storage for Breaker<P, F> {
    type Error = BreakerError;
    type DecideFuture = Deciding<P, F>;
    type UpdateFuture = Changing<P, F>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        Deciding::new(&self.0, ask)
    }

    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        let Parts { primary, fallback, circuit } = &*self.0;
        if circuit.is_closed() {
            let yes = primary.try_admit(ask, shown);
            if yes {
                circuit.counts().primary();
            }
            return yes;
        }
        let Some(fallback) = fallback.as_ref().filter(|_| !circuit.is_due()) else { return false };
        let share = fallback.divide(ask.policy);
        let yes = share.is_ok_and(|share| fallback.storage.try_admit(StorageRequest { policy: &share, ..ask }, shown));
        if yes {
            circuit.counts().fallback();
        }
        yes
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        Changing::nothing()
            .fallback(&self.0, policy, |fallback, share| fallback.clear(share, key))
            .primary(&self.0, |primary| primary.clear(policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        if decision.is_refused() || decision.cost() == 0 {
            return Changing::nothing();
        }
        match decision.clone().back() {
            (DecisionSource::Primary, decision) => {
                Changing::nothing().primary(&self.0, |primary| primary.refund(policy, key, &decision))
            }
            (DecisionSource::Fallback, decision) => {
                Changing::nothing().fallback(&self.0, policy, |fallback, share| fallback.refund(share, key, &decision))
            }
        }
    }

    /// The smaller number of the two storages.
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        let fallback = self.0.fallback.as_ref().and_then(|fallback| {
            let policy = policy.divide(fallback.replicas).ok()?;
            fallback.storage.clients_to_fill(&policy)
        });
        self.0.primary.clients_to_fill(policy).into_iter().chain(fallback).min()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.primary.validate(policy)?;
        match &self.0.fallback {
            Some(fallback) => fallback.storage.validate(&policy.divide(fallback.replicas)?),
            None => Ok(()),
        }
    }
}
