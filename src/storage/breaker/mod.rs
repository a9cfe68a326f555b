//! A circuit breaker around a storage, with an optional fallback.

mod circuit;
mod fallback;
mod future;
mod state;
mod telemetry;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

pub use self::circuit::Circuit;
use self::circuit::Settings;
use self::fallback::Fallback;
pub use self::fallback::NoFallback;
use self::future::{Changing, Deciding};
pub use self::state::{CircuitState, Phase};
#[cfg(feature = "metrics")]
pub(crate) use self::telemetry::PATHS;
use crate::storage::{Storage, StorageError, StorageRequest, Summary};
use crate::{ConfigError, Decision, DecisionSource, Key, Policy};

/// A circuit breaker around a storage, the primary. It stops calling a primary that keeps failing,
/// and can use another storage as a fallback.
///
/// ```
/// use tower_ratelimit::storage::Breaker;
/// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
///
/// # let redis = MemoryStorage::new();
/// // Three replicas share `redis`. During an outage, each admits a third of the quota.
/// let storage = Breaker::new(redis).fallback(MemoryStorage::new(), 3);
/// let circuit = storage.circuit().clone();
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// assert_eq!(circuit.state().failures, 0);
/// ```
///
/// The breaker has three [phases](Phase):
///
/// | phase | calls of the primary | next phase |
/// |---|---|---|
/// | closed | all | open, after 5 consecutive [`failures`](Self::failures) |
/// | open | none | probing, by the first hit, charge, settlement or clear after 100 milliseconds ([`probe_after`](Self::probe_after)) |
/// | probing | the call that started this phase | closed if the call succeeds, open if it fails |
///
/// The time between probes doubles with each failed probe, up to 1 second, with jitter. A refusal
/// is not a failure. Neither is the error for a policy that the primary does not
/// [support](Storage::validate).
///
/// | the primary | with a fallback | without a fallback |
/// |---|---|---|
/// | is called and fails | the fallback decides | the decision fails |
/// | is not called | the fallback decides | the decision fails immediately |
///
/// The fallback applies each policy [divided](Policy::divide) by the number of replicas. After an
/// error of the primary that [may have counted](StorageError::may_have_counted), such as a timeout,
/// both storages may have counted the hit. [`OnError`](crate::OnError) applies to decisions that
/// fail.
///
/// The primary needs a timeout. The storages of this crate that can fail have one, and
/// [`Timeout`](super::Timeout) adds one to other storages.
///
/// Clones share one state. The guide on [outages](crate::guide::outages#the-circuit-breaker) has
/// the details and the bounds.
///
/// # Errors
///
/// Returns a [`StorageError`] in these cases:
///
/// - Neither storage makes a decision.
/// - The storage that made a decision fails to [settle](Storage::settle) the hit. If that storage
///   is the primary, the settlement also fails while the breaker is open.
/// - One of the storages fails to [clear](Storage::clear) a key, or the breaker is open.
#[derive(Clone, Debug)]
pub struct Breaker<P, F = NoFallback>(Arc<Parts<P, F>>);

#[derive(Debug)]
struct Parts<P, F> {
    primary: P,
    fallback: Option<Fallback<F>>,
    circuit: Circuit,
}

/// The defaults of [`Breaker::failures`] and [`Breaker::probe_after`].
const DEFAULTS: Settings =
    Settings { failures: 5, shortest: Duration::from_millis(100), longest: Duration::from_secs(1) };

impl<P: Storage> Breaker<P> {
    /// Creates a closed breaker around `primary`, without a fallback.
    ///
    /// # Panics
    ///
    /// Panics if `primary` is or wraps another breaker.
    #[track_caller]
    pub fn new(primary: P) -> Self {
        assert_contains_no_breaker(&primary);
        Self::with(primary, None, DEFAULTS)
    }
}

/// Panics if `storage` is or wraps a breaker. A decision records only one source, so a refund
/// through nested breakers could reach the wrong storage.
#[track_caller]
fn assert_contains_no_breaker(storage: &impl Storage) {
    assert!(
        !storage.contains_breaker(),
        "a breaker cannot contain another breaker: wrap the storage of the inner breaker instead"
    );
}

impl<P: Storage, F: Storage> Breaker<P, F> {
    fn with(primary: P, fallback: Option<Fallback<F>>, settings: Settings) -> Self {
        Self(Arc::new(Parts { primary, fallback, circuit: Circuit::new(settings) }))
    }

    /// Sets the storage that decides while the breaker is open, and each time the primary fails.
    /// Defaults to none.
    ///
    /// The fallback applies each policy [divided](Policy::divide) by `replicas`, the number of
    /// processes that share the primary. Use a storage that cannot fail, such as
    /// [`MemoryStorage`](crate::MemoryStorage).
    ///
    /// The returned breaker is closed, and independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `replicas` is 0, or if `fallback` is or wraps another breaker.
    #[must_use]
    #[track_caller]
    pub fn fallback<G: Storage>(self, fallback: G, replicas: u32) -> Breaker<P, G> {
        let replicas = NonZeroU32::new(replicas)
            .expect("invalid replicas 0: it must be at least 1, the number of processes that share the storage");
        assert_contains_no_breaker(&fallback);
        let Parts { primary, circuit, .. } = &*self.0;
        Breaker::with(primary.clone(), Some(Fallback::new(fallback, replicas)), circuit.settings())
    }

    /// Sets the number of consecutive failures of the primary that open the breaker. Defaults to 5.
    ///
    /// The returned breaker is closed, and independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `failures` is 0.
    #[must_use]
    #[track_caller]
    pub fn failures(self, failures: u32) -> Self {
        assert!(failures > 0, "invalid failures 0: it must be at least 1, for example 5");
        self.with_settings(Settings { failures, ..self.0.circuit.settings() })
    }

    /// Sets the time between probes. Defaults to 100 milliseconds and 1 second.
    ///
    /// A probe is due `shortest` after the breaker opens. The time doubles with each failed probe,
    /// up to `longest`. Up to 50 % of jitter is subtracted. The next hit, charge, settlement or
    /// clear is then the probe. If a probe has no result after `longest`, another one can start.
    ///
    /// The returned breaker is closed, and independent of clones of this one.
    ///
    /// # Panics
    ///
    /// Panics if `shortest` is less than a millisecond, or if `longest` is less than `shortest` or
    /// more than an hour.
    #[must_use]
    #[track_caller]
    pub fn probe_after(self, shortest: Duration, longest: Duration) -> Self {
        assert!(
            Duration::from_millis(1) <= shortest && shortest <= longest && longest <= Duration::from_secs(3_600),
            "invalid probe times {shortest:?} and {longest:?}: the first must be at least 1 ms, the second at least \
             the first and at most 1 hour, for example Duration::from_millis(100) and Duration::from_secs(1)"
        );
        self.with_settings(Settings { shortest, longest, ..self.0.circuit.settings() })
    }

    fn with_settings(&self, settings: Settings) -> Self {
        let Parts { primary, fallback, .. } = &*self.0;
        let fallback = fallback.as_ref().map(|fallback| Fallback::new(fallback.storage.clone(), fallback.replicas));
        Self::with(primary.clone(), fallback, settings)
    }

    /// Returns a handle to the state of this breaker and its clones, for example for a health
    /// endpoint.
    pub fn circuit(&self) -> &Circuit {
        &self.0.circuit
    }

    /// Returns the primary storage.
    pub fn primary(&self) -> &P {
        &self.0.primary
    }
}

impl<P: Storage, F: Storage> Storage for Breaker<P, F> {
    type Error = StorageError;
    type DecideFuture = Deciding<P, F>;
    type UpdateFuture = Changing<P, F>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        Deciding::new(&self.0, request)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, mut shown: Option<&mut Summary>) -> bool {
        let Parts { primary, fallback, circuit } = &*self.0;
        if circuit.is_closed() {
            if primary.try_admit(request, shown.as_deref_mut()) {
                circuit.counts().primary();
                return true;
            }
        } else if let Some(fallback) = fallback.as_ref().filter(|_| !circuit.is_probe_due())
            && let Ok(divided) = fallback.divide(request.policy)
            && fallback.storage.try_admit(StorageRequest { policy: &divided, ..request }, shown.as_deref_mut())
        {
            circuit.counts().fallback();
            return true;
        }
        Summary::remove_refusal(shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        Changing::empty()
            .fallback(&self.0, policy, |fallback, divided| fallback.clear(divided, key))
            .primary(&self.0, |primary| primary.clear(policy, key))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        if !decision.has_spent() || actual == decision.cost() {
            return Changing::empty();
        }
        let settle = Changing::empty();
        match decision.source() {
            DecisionSource::Primary => settle.primary(&self.0, |primary| primary.settle(policy, key, decision, actual)),
            DecisionSource::Fallback => {
                settle.fallback(&self.0, policy, |fallback, divided| fallback.settle(divided, key, decision, actual))
            }
        }
    }

    /// Checks the primary, even while the breaker is open. The result does not change the breaker's
    /// state.
    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.0.primary.check()
    }

    /// Clears the primary and then the fallback, even if the breaker is open or the primary fails.
    /// The result does not change the breaker's state. Returns the number of keys that were removed
    /// from the primary.
    ///
    /// # Errors
    ///
    /// Returns the error of the fallback, or else that of the primary.
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        let primary = self.0.primary.clear_all();
        let fallback = self.0.fallback.as_ref().map(|fallback| fallback.storage.clear_all());
        async move {
            let cleared = primary.await;
            match fallback {
                Some(fallback) => fallback.await.and(cleared),
                None => cleared,
            }
        }
    }

    /// Returns the number of the primary or of the fallback, whichever is smaller. The fallback
    /// applies the divided policy.
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        let fallback = self.0.fallback.as_ref().and_then(|fallback| {
            let policy = policy.divide(fallback.replicas).ok()?;
            fallback.storage.clients_to_fill(&policy)
        });
        self.0.primary.clients_to_fill(policy).into_iter().chain(fallback).min()
    }

    fn contains_breaker(&self) -> bool {
        true
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.primary.validate(policy)?;
        match &self.0.fallback {
            Some(fallback) => fallback.storage.validate(&policy.divide(fallback.replicas)?),
            None => Ok(()),
        }
    }
}
