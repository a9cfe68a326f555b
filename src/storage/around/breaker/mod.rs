//! A storage that fails is left alone, and another stands in for it.

mod circuit;
mod error;
mod fallback;
mod future;
mod state;
mod told;

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
pub(crate) use self::told::PATHS;
use crate::error::or_panic;
use crate::storage::{Ask, Shown, Storage};
use crate::{ConfigError, Decision, Key, Policy, Way};

/// Leaves a storage alone that keeps failing, the primary, and lets another stand in for it: the fallback.
///
/// ```
/// use tower_ratelimit::storage::Breaker;
/// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
///
/// # let redis = MemoryStorage::new();
/// // Three replicas of this program share what is in `redis`. While it is away, each admits a third of the quota.
/// let storage = Breaker::new(redis).fallback(MemoryStorage::new(), 3);
/// let circuit = storage.circuit().clone();
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// assert_eq!(circuit.state().failures, 0);
/// ```
///
/// 1. After [five](Self::failures) failures in a row the primary is not asked any more. A hit that is refused, as
///    [contended](Decision::is_contended) too, is an answer and no failure; but as it may only have been looked up, it does not end
///    a row of them. Nor is it a failure that a policy is one the primary [cannot keep](Storage::validate).
/// 2. A tenth of a second later one hit tries it: a probe, one at a time. While probes fail, the next comes after twice as long,
///    up to [a second](Self::probe_after), less up to half of that by chance. The first that succeeds ends it. Giving back and
///    clearing are probes too; peeks are none, for a server that is read from may still not be written to.
/// 3. Whatever the primary did not answer, the fallback does: the failures that open the circuit, all hits while it is open, and
///    a probe that fails. Nothing is asked of the primary twice, so what may have been counted there is not counted again.
/// 4. The fallback has a [share](Policy::share) of each policy: amounts, bursts and queues divided by the number of replicas,
///    rounded down and at least 1. Clients are told the share's numbers. A cost for which only the whole quota has room is refused
///    until the primary may be asked again.
/// 5. Refunds go where the decision came from, which it [knows](Decision::back); while the primary is left alone, what was
///    spent there cannot be given back, and that is an error. Clearing a key clears both, and says so if the primary is left alone.
/// 6. What the fallback has admitted is not written back to the primary: that has forgotten nothing of what it had counted before.
/// 7. What is asked before the circuit opens or closes says nothing about it afterwards. A probe that is dropped, or of which
///    nothing is heard for as long as probes are apart at most, is not waited for.
///
/// A primary that may hang needs a deadline; [`Deadline`](super::Deadline) gives it one, and our own on servers have theirs. Whoever
/// waits outside of the breaker had better be more patient than that: hits that are dropped before it are no failures, so a shorter
/// timeout of requests, or a deadline around the breaker, keeps it closed while everybody waits.
///
/// # What holds while the primary is away
///
/// | storage | a request | more than the limit is admitted |
/// |---|---|---|
/// | the primary alone, `OnError::Admit` | waits for the deadline, then passes | without bound |
/// | the primary alone, `OnError::Refuse` | waits for the deadline, then is refused with 503 | never |
/// | `Breaker`, `OnError::Admit` | passes at once, but for a probe | without bound |
/// | `Breaker`, `OnError::Refuse` | is refused with 503 at once, but for a probe | never |
/// | `Breaker` with a fallback | is decided at once, but for a probe and for the failures that open it, which wait for the deadline | by at most the limit once more, in a period in which both have decided; by the shares rounded up to 1, when there are more replicas than units |
///
/// Each replica that was not counted among those that share adds another share. Of a leaky bucket each serves one at once, beside the
/// places in its queue, and so each adds one.
///
/// Without a fallback, what the primary does not answer is an error, and while it is left alone that comes at once: so
/// [`OnError`](crate::OnError) decides without anybody having waited.
///
/// # How many
///
/// One for a server: what is told of it holds for all layers with a clone of it. A route that is rather refused than decided by a
/// fallback needs one of its own, without, which finds out by itself; the log tells one from another by its error.
///
/// # Watching it
///
/// It learns from hits, refunds and clears alone: without any it says what it last knew, also long after a server has died or come back.
/// [`Circuit::state`] says how things stand, and a decision [whether a fallback made it](Decision::is_from_fallback). With the
/// feature `tracing`, opening is logged as a warning and closing as information; with `metrics`, decisions are counted by `path`, and breakers that are open:
/// see `MetricsObserver`.
#[derive(Clone, Debug)]
pub struct Breaker<P, F = NoFallback>(Arc<Parts<P, F>>);

#[derive(Debug)]
struct Parts<P, F> {
    primary: P,
    fallback: Option<Fallback<F>>,
    circuit: Circuit,
}

/// Unless told otherwise.
const PATIENCE: Patience =
    Patience { failures: 5, shortest: Duration::from_millis(100), longest: Duration::from_secs(1) };

impl<P: Storage> Breaker<P> {
    /// Leaves `primary` alone when it keeps failing.
    pub fn new(primary: P) -> Self {
        Self::with(primary, None, PATIENCE)
    }
}

impl<P: Storage, F: Storage> Breaker<P, F> {
    fn with(primary: P, fallback: Option<Fallback<F>>, patience: Patience) -> Self {
        Self(Arc::new(Parts { primary, fallback, circuit: Circuit::new(patience) }))
    }

    /// Lets `fallback` stand in for the primary with quotas divided by `replicas`: how many processes share the primary. It had
    /// better not fail, as memory does not. What this returns is another breaker than this one, which has not failed yet.
    ///
    /// # Panics
    ///
    /// When there are 0 replicas; [`try_fallback`](Self::try_fallback) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn fallback<G: Storage>(self, fallback: G, replicas: u32) -> Breaker<P, G> {
        or_panic(self.try_fallback(fallback, replicas))
    }

    /// As [`fallback`](Self::fallback).
    ///
    /// # Errors
    ///
    /// When there are 0 replicas.
    pub fn try_fallback<G: Storage>(self, fallback: G, replicas: u32) -> Result<Breaker<P, G>, ConfigError> {
        let replicas = NonZeroU32::new(replicas).ok_or_else(|| {
            ConfigError::new("0 replicas cannot divide a quota: write how many processes share the storage, at least 1")
        })?;
        let Parts { primary, circuit, .. } = &*self.0;
        Ok(Breaker::with(primary.clone(), Some(Fallback::new(fallback, replicas)), circuit.patience()))
    }

    /// After how many failures in a row the primary is left alone: 5 unless it is said. What this returns is another breaker than
    /// this one, which has not failed yet.
    ///
    /// # Panics
    ///
    /// When it is 0; [`try_failures`](Self::try_failures) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn failures(self, failures: u32) -> Self {
        or_panic(self.try_failures(failures))
    }

    /// As [`failures`](Self::failures).
    ///
    /// # Errors
    ///
    /// When it is 0.
    pub fn try_failures(self, failures: u32) -> Result<Self, ConfigError> {
        if failures == 0 {
            return Err(ConfigError::new(
                "after 0 failures nothing would ever be asked: use at least 1, for example 5",
            ));
        }
        Ok(self.patient(Patience { failures, ..self.0.circuit.patience() }))
    }

    /// How soon the primary is tried when it is left alone, and how much later at most while that fails: 100 milliseconds and a
    /// second unless it is said. What this returns is another breaker than this one, which has not failed yet.
    ///
    /// # Panics
    ///
    /// When the first is less than a millisecond, or the second less than the first or more than an hour;
    /// [`try_probe_after`](Self::try_probe_after) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn probe_after(self, shortest: Duration, longest: Duration) -> Self {
        or_panic(self.try_probe_after(shortest, longest))
    }

    /// As [`probe_after`](Self::probe_after).
    ///
    /// # Errors
    ///
    /// When the first is less than a millisecond, or the second less than the first or more than an hour.
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

    /// How it stands. Clones of it can be kept where the types of the storages are of no interest.
    pub fn circuit(&self) -> &Circuit {
        &self.0.circuit
    }

    /// The storage that may be left alone.
    pub fn primary(&self) -> &P {
        &self.0.primary
    }
}

impl<P: Storage, F: Storage> Storage for Breaker<P, F> {
    type Error = BreakerError;
    type Decided = Deciding<P, F>;
    type Done = Changing<P, F>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        Deciding::new(&self.0, ask)
    }

    #[inline]
    fn hit_at_once(&self, ask: Ask<'_>, shown: Option<&mut Shown>) -> bool {
        let Parts { primary, fallback, circuit } = &*self.0;
        if circuit.is_closed() {
            let yes = primary.hit_at_once(ask, shown);
            if yes {
                circuit.counts().primary();
            }
            return yes;
        }
        let Some(fallback) = fallback.as_ref().filter(|_| !circuit.is_due()) else { return false };
        let share = fallback.share(ask.policy);
        let yes = share.is_ok_and(|share| fallback.storage.hit_at_once(Ask { policy: &share, ..ask }, shown));
        if yes {
            circuit.counts().fallback();
        }
        yes
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        Changing::nothing()
            .fallback(&self.0, policy, |fallback, share| fallback.clear(share, key))
            .primary(&self.0, |primary| primary.clear(policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        if decision.is_refused() || decision.cost() == 0 {
            return Changing::nothing();
        }
        match decision.clone().back() {
            (Way::Primary, decision) => {
                Changing::nothing().primary(&self.0, |primary| primary.refund(policy, key, &decision))
            }
            (Way::Fallback, decision) => {
                Changing::nothing().fallback(&self.0, policy, |fallback, share| fallback.refund(share, key, &decision))
            }
        }
    }

    /// The smaller number of the two storages.
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        let fallback = self.0.fallback.as_ref().and_then(|fallback| {
            let policy = policy.share(fallback.replicas).ok()?;
            fallback.storage.clients_to_fill(&policy)
        });
        self.0.primary.clients_to_fill(policy).into_iter().chain(fallback).min()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.primary.validate(policy)?;
        match &self.0.fallback {
            Some(fallback) => fallback.storage.validate(&policy.share(fallback.replicas)?),
            None => Ok(()),
        }
    }
}
