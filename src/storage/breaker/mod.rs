//! A circuit breaker around a storage, with an optional fallback.

mod circuit;
mod fallback;
mod state;

use std::any::Any;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

pub use self::circuit::Circuit;
use self::circuit::{CallPermit, CircuitSettings};
use self::fallback::Fallback;
#[cfg(feature = "metrics")]
pub(crate) use self::state::PATHS;
pub use self::state::{CircuitState, Phase};
use crate::decision::{Decision, DecisionSource};
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::contract::{OwnedRequest, forward_storage};
use crate::storage::{
    AnyStorage, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest, Summary, layers,
};
use crate::sync::join_all;

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
/// | probing (half-open) | the call that started this phase | closed if the call succeeds, open if it fails |
///
/// The time between probes doubles with each failed probe, up to 1 second. Up to 50 % of jitter is
/// subtracted. A refusal is not a failure. Neither is an error of the kind
/// [`Unsupported`](StorageErrorKind::Unsupported) or [`Contended`](StorageErrorKind::Contended): it
/// concerns one policy or key, so one client cannot open the circuit for all others.
///
/// | call of the primary | with a fallback | without a fallback |
/// |---|---|---|
/// | failed | the fallback decides | the decision fails with the primary's error |
/// | not made, because the breaker is open or probing | the fallback decides | the decision fails immediately with the kind [`CircuitOpen`](StorageErrorKind::CircuitOpen) |
///
/// The fallback applies each policy [divided](Policy::divide) by the number of replicas. After an
/// error of the primary that [may have counted](StorageError::may_have_counted), such as a timeout,
/// both storages may have counted the hit. [`OnError`](crate::OnError) applies to decisions that
/// fail.
///
/// The primary needs a timeout. The storages of this crate that can fail have one.
///
/// Clones share one state. The guide on [outages](crate::guide::outages#the-circuit-breaker) has
/// the details and the bounds.
///
/// # Errors
///
/// Calls fail with [`StorageError`] in these cases:
///
/// - Neither storage makes a decision.
/// - The storage that made a decision fails to [settle](Storage::settle) the hit. If that storage
///   is the primary, the settlement also fails while the breaker is open.
/// - One of the storages fails to [clear](Storage::clear) a key, or the breaker is open.
#[derive(Clone, Debug)]
pub struct Breaker(Arc<BreakerInner>);

#[derive(Debug)]
struct BreakerInner {
    primary: AnyStorage,
    fallback: Option<Fallback>,
    circuit: Circuit,
}

/// The defaults of [`Breaker::failures`] and [`Breaker::probe_after`].
const DEFAULTS: CircuitSettings =
    CircuitSettings { failures: 5, shortest: Duration::from_millis(100), longest: Duration::from_secs(1) };

impl Breaker {
    /// Creates a closed breaker around `primary`, without a fallback.
    ///
    /// # Panics
    ///
    /// Panics if `primary` is or wraps another breaker.
    #[track_caller]
    pub fn new(primary: impl Storage) -> Self {
        assert_contains_no_breaker(&primary);
        Self::with(AnyStorage::new(primary), None, DEFAULTS)
    }

    fn with(primary: AnyStorage, fallback: Option<Fallback>, settings: CircuitSettings) -> Self {
        Self(Arc::new(BreakerInner { primary, fallback, circuit: Circuit::new(settings) }))
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
    pub fn fallback(self, fallback: impl Storage, replicas: u32) -> Self {
        let replicas = NonZeroU32::new(replicas)
            .expect("invalid replicas 0: it must be at least 1, the number of processes that share the storage");
        assert_contains_no_breaker(&fallback);
        let BreakerInner { primary, circuit, .. } = &*self.0;
        let fallback = Fallback::new(AnyStorage::new(fallback), replicas);
        Self::with(primary.clone(), Some(fallback), circuit.settings())
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
        self.with_settings(CircuitSettings { failures, ..self.0.circuit.settings() })
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
        self.with_settings(CircuitSettings { shortest, longest, ..self.0.circuit.settings() })
    }

    fn with_settings(&self, settings: CircuitSettings) -> Self {
        let BreakerInner { primary, fallback, .. } = &*self.0;
        let fallback = fallback.as_ref().map(|fallback| Fallback::new(fallback.storage.clone(), fallback.replicas));
        Self::with(primary.clone(), fallback, settings)
    }

    /// Returns a handle to the state of this breaker and its clones, for example for a health
    /// endpoint.
    pub fn circuit(&self) -> &Circuit {
        &self.0.circuit
    }

    /// Returns the fallback and the number of replicas, if there is a fallback.
    pub(crate) fn fallback_ref(&self) -> Option<(&AnyStorage, NonZeroU32)> {
        self.0.fallback.as_ref().map(|fallback| (&fallback.storage, fallback.replicas))
    }

    /// Returns the primary storage.
    pub fn get_ref(&self) -> &AnyStorage {
        &self.0.primary
    }
}

/// Panics if `storage` is or wraps a breaker. A decision records only one source, so a refund
/// through nested breakers could reach the wrong storage.
#[track_caller]
fn assert_contains_no_breaker(storage: &dyn Storage) {
    assert!(
        layers(storage).all(|layer| !(layer as &dyn Any).is::<Breaker>()),
        "a breaker cannot contain another breaker: wrap the storage of the inner breaker instead"
    );
}

impl BreakerInner {
    /// Records the result of a decision by the primary. If the primary has failed, sends the request
    /// to the fallback.
    fn decided(
        &self,
        decided: Result<Decision, StorageError>,
        permit: CallPermit,
        request: StorageRequest<'_>,
    ) -> StorageFuture<Decision> {
        match decided {
            Ok(decision) => {
                permit.decided(decision.is_admitted());
                self.circuit.counts().primary();
                StorageFuture::ok(decision.with_source(DecisionSource::Primary))
            }
            Err(error) => {
                permit.failed(&error);
                self.fall_back(request, || error)
            }
        }
    }

    /// Sends the request to the fallback. If there is none, fails with `error`.
    fn fall_back(&self, request: StorageRequest<'_>, error: impl FnOnce() -> StorageError) -> StorageFuture<Decision> {
        let circuit = self.circuit.clone();
        let failed = |error| {
            circuit.counts().none();
            StorageFuture::ready(Err(error))
        };
        let Some(fallback) = &self.fallback else { return failed(error()) };
        let divided = match fallback.divide(request.policy) {
            Ok(divided) => divided,
            Err(error) => return failed(cannot_divide(error)),
        };
        let original = request.policy.clone();
        fallback.storage.decide(StorageRequest { policy: &divided, ..request }).map(move |decided| match decided {
            Ok(decision) => {
                circuit.counts().fallback();
                let decision = fallback::adjust_retry_after(&original, decision, circuit.until_probe());
                Ok(decision.with_source(DecisionSource::Fallback))
            }
            Err(error) => {
                circuit.counts().none();
                Err(fallback_failed(error))
            }
        })
    }

    /// Sends the requests of several keys to the fallback. If there is none, fails with `error`.
    fn fall_back_all(&self, members: Vec<OwnedRequest>, error: StorageError) -> StorageFuture<Vec<Decision>> {
        let circuit = self.circuit.clone();
        let decided = match &self.fallback {
            None => StorageFuture::ready(Err(error)),
            Some(fallback) => {
                let divide = |member: &OwnedRequest| {
                    let policy = fallback.divide(&member.policy).map_err(cannot_divide)?;
                    Ok(OwnedRequest { policy, ..member.clone() })
                };
                match members.iter().map(divide).collect::<Result<Vec<_>, StorageError>>() {
                    Ok(divided) => {
                        let requests: Vec<_> = divided.iter().map(OwnedRequest::borrow).collect();
                        fallback.storage.decide_all(&requests).map(|decided| decided.map_err(fallback_failed))
                    }
                    Err(error) => StorageFuture::ready(Err(error)),
                }
            }
        };
        decided.map(move |decided| {
            let Ok(decisions) = decided else {
                circuit.counts().none();
                return decided;
            };
            circuit.counts().fallback();
            let adjust = |(decision, member): (Decision, &OwnedRequest)| {
                let decision = fallback::adjust_retry_after(&member.policy, decision, circuit.until_probe());
                decision.with_source(DecisionSource::Fallback)
            };
            Ok(decisions.into_iter().zip(&members).map(adjust).collect())
        })
    }

    /// Makes a change in the primary, unless the circuit is open.
    fn change_primary(&self, change: impl FnOnce(&AnyStorage) -> StorageFuture<()>) -> StorageFuture<()> {
        let Some(permit) = self.circuit.try_acquire(true) else {
            return StorageFuture::ready(Err(self.circuit.open_error()));
        };
        change(&self.primary).map(move |changed| {
            match &changed {
                Ok(()) => permit.succeeded(),
                Err(error) => permit.failed(error),
            }
            changed
        })
    }

    /// Makes a change in the fallback, if there is one, with the divided policy.
    fn change_fallback(
        &self,
        policy: &Policy,
        change: impl FnOnce(&AnyStorage, &Policy) -> StorageFuture<()>,
    ) -> StorageFuture<()> {
        let Some(fallback) = &self.fallback else { return StorageFuture::ok(()) };
        match fallback.divide(policy) {
            Ok(divided) => change(&fallback.storage, &divided).map(|changed| changed.map_err(fallback_failed)),
            Err(error) => StorageFuture::ready(Err(cannot_divide(error))),
        }
    }
}

/// Makes two changes together. Returns the result of the first, or the first error.
fn both<T: Send + 'static>(changes: [StorageFuture<T>; 2]) -> StorageFuture<T> {
    let is_ready = changes.iter().all(|change| change.as_ready().is_some());
    let both = StorageFuture::new(async {
        let changed: Result<Vec<T>, StorageError> = join_all(changes.into()).await.into_iter().collect();
        changed.map(|mut changed| changed.swap_remove(0))
    });
    // A pending change may be awaited on a runtime that the caller has not entered yet.
    if is_ready { both.polled_once() } else { both }
}

fn fallback_failed(error: StorageError) -> StorageError {
    error.context("rate limit storage and its fallback failed")
}

fn cannot_divide(error: ConfigError) -> StorageError {
    let message = "cannot divide the policy among the replicas for the fallback";
    StorageError::new(StorageErrorKind::Unsupported, message).with_source(error)
}

impl Storage for Breaker {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let Some(permit) = self.0.circuit.try_acquire(request.op != Op::Peek && request.cost > 0) else {
            return self.0.fall_back(request, || self.0.circuit.open_error());
        };
        let decided = self.0.primary.decide(request);
        let (parts, request) = (Arc::clone(&self.0), request.owned());
        decided.then(move |decided| parts.decided(decided, permit, request.borrow()))
    }

    /// The primary decides on all keys, or the fallback does.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        let owned = members.iter().map(StorageRequest::owned).collect();
        let is_write = |member: &StorageRequest<'_>| member.op != Op::Peek && member.cost > 0;
        let Some(permit) = self.0.circuit.try_acquire(members.iter().any(is_write)) else {
            return self.0.fall_back_all(owned, self.0.circuit.open_error());
        };
        let parts = Arc::clone(&self.0);
        self.0.primary.decide_all(members).then(move |decided| match decided {
            Ok(decisions) => {
                permit.decided(decisions.iter().all(Decision::is_admitted));
                parts.circuit.counts().primary();
                StorageFuture::ok(
                    decisions.into_iter().map(|decision| decision.with_source(DecisionSource::Primary)).collect(),
                )
            }
            Err(error) => {
                permit.failed(&error);
                parts.fall_back_all(owned, error)
            }
        })
    }

    /// Checks that the primary and the fallback decide on several keys together.
    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        self.0.primary.validate_members(policies)?;
        let Some(fallback) = &self.0.fallback else { return Ok(()) };
        let divided: Result<Vec<_>, _> = policies.iter().map(|policy| policy.divide(fallback.replicas)).collect();
        fallback.storage.validate_members(&divided?)
    }

    fn needs_outer_key(&self, policy: Option<&str>) -> bool {
        let needs = |storage: &AnyStorage| storage.needs_outer_key(policy);
        needs(&self.0.primary) || self.0.fallback.as_ref().is_some_and(|fallback| needs(&fallback.storage))
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, mut shown: Option<&mut Summary>) -> bool {
        let BreakerInner { primary, fallback, circuit } = &*self.0;
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

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let fallback = self.0.change_fallback(policy, |fallback, divided| fallback.clear(divided, key));
        let primary = self.0.change_primary(|primary| primary.clear(policy, key));
        both([primary, fallback])
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        match decision.source() {
            DecisionSource::Primary => self.0.change_primary(|primary| primary.settle(policy, key, decision, actual)),
            DecisionSource::Fallback => {
                self.0.change_fallback(policy, |fallback, divided| fallback.settle(divided, key, decision, actual))
            }
        }
    }

    /// Checks the primary, even while the breaker is open. The result does not change the breaker's
    /// state.
    fn check(&self) -> StorageFuture<()> {
        self.0.primary.check()
    }

    /// Clears the primary and the fallback at the same time, even if the breaker is open. The
    /// result does not change the breaker's state. Returns the number of keys that were removed
    /// from the primary.
    ///
    /// # Errors
    ///
    /// Returns the error of the primary, or else that of the fallback.
    fn clear_all(&self) -> StorageFuture<u64> {
        let primary = self.0.primary.clear_all();
        let Some(fallback) = &self.0.fallback else { return primary };
        both([primary, fallback.storage.clear_all()])
    }

    forward_storage!(self => self.0.primary; keys);

    /// Returns the primary.
    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&self.0.primary)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.primary.validate(policy)?;
        match &self.0.fallback {
            Some(fallback) => fallback.storage.validate(&policy.divide(fallback.replicas)?),
            None => Ok(()),
        }
    }
}
