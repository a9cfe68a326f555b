//! A storage over any store that compares and swaps.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::error::CasError;
use super::job::{Answer, Command, Job};
use super::shared::{CasShared, Time};
use super::skew::{self, MAX_SKEW, Skew};
use super::worker::Worker;
use super::{CasStorage, max_len};
use crate::error::or_panic;
use crate::storage::deadline::{self, DEADLINE};
use crate::storage::{Clock, Storage, StorageRequest, names, text};
use crate::{ConfigError, Decision, Key, Op, Policy};

/// The most log entries of a key on memcached and etcd, unless long logs are allowed: 19 kB.
#[cfg(any(feature = "memcached", feature = "etcd"))]
const LONGEST_LOG: u32 = 1_000;

/// A storage over any store that compares and swaps: a [`CasStorage`], whose page has an example.
///
/// Every strategy and every policy runs on it. A hit loads the state of its key, decides, and stores the
/// new state if no other process has stored one meanwhile. Otherwise it tries again. Hits of this
/// process that wait for the same key are decided together. Clones are handles on the same store.
///
/// - A hit that loses every race is refused as [contended](Decision::is_contended). It has spent
///   nothing, and retrying can succeed.
/// - A hit counts from the first poll of its future. Dropping it later does not undo it.
/// - A call takes at most 100 milliseconds ([`deadline`](Self::deadline)).
/// - It needs a tokio runtime with time, and can be created outside of one.
///
/// The guide on [several processes](crate::guide::several_processes#your-own-store) has the details.
///
/// # Clocks
///
/// The store's time decides if it reports one, otherwise this machine's. The newest instant of a
/// decision is stored with the key, and no decision is made earlier than that, as long as it is at most 5
/// seconds ahead ([`max_skew`](Self::max_skew)). The guide says
/// [what this promises](crate::guide::several_processes#clocks).
///
/// # Errors
///
/// Decisions, refunds and clears fail if the store fails or does not answer in time. A swap without an
/// answer is not retried, because a retry could count twice. A refund or a clear fails if other
/// processes win every race.
#[derive(Clone)]
pub struct Cas<S> {
    shared: Arc<CasShared<S>>,
    deadline: Duration,
    /// The most log entries that a policy may keep of a key.
    longest_log: Option<u32>,
}

impl<S: CasStorage> Cas<S> {
    /// Creates a storage over `store`.
    pub fn new(store: S) -> Self {
        let shared = CasShared::new(store, Time::Stores, Skew::new(MAX_SKEW));
        Self { shared: Arc::new(shared), deadline: DEADLINE, longest_log: None }
    }

    /// Refuses policies that can keep more than 1,000 log entries of a key. A hit loads and stores the
    /// whole text, so a long log costs a remote store more than all else.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn without_long_logs(self) -> Self {
        Self { longest_log: Some(LONGEST_LOG), ..self }
    }

    /// Sets the timeout of a call. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `deadline` is less than a millisecond or more than an hour.
    /// [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `deadline` is less than a millisecond or more than an hour.
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        Ok(Self { deadline, ..self })
    }

    /// Sets the clock, in place of the store's and the machine's; for tests, or if the machine's
    /// clock cannot be trusted.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let shared = self.shared.with(Some(Time::Chosen(Arc::new(clock))), self.shared.skew.max());
        Self { shared: Arc::new(shared), ..self }
    }

    /// Sets how far the newest decision on a key may be ahead of this node's clock. Defaults to 5 seconds.
    ///
    /// See [clocks](Self#clocks). States are kept for that much longer. 0 switches the comparison off: each
    /// node decides by its own clock alone, and a node in the wrong year can lock a key.
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day. [`try_max_skew`](Self::try_max_skew) returns an error
    /// instead.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        or_panic(self.try_max_skew(max_skew))
    }

    /// As [`max_skew`](Self::max_skew), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `max_skew` is more than a day.
    pub fn try_max_skew(self, max_skew: Duration) -> Result<Self, ConfigError> {
        let shared = self.shared.with(None, skew::checked(max_skew)?);
        Ok(Self { shared: Arc::new(shared), ..self })
    }

    /// Returns the store.
    pub fn store(&self) -> &S {
        &self.shared.store
    }

    /// Returns the number of keys that jobs are being done on.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn busy_keys(&self) -> usize {
        self.shared.busy.len()
    }

    /// What becomes of a job, which is begun when this is first polled.
    fn answer(&self, policy: &Policy, key: &Key, want: Command) -> impl Future<Output = Answer> + Send + use<S> {
        let (shared, policy, name, patience) =
            (Arc::clone(&self.shared), policy.clone(), names::of(policy, key), self.deadline);
        async move {
            let runtime = Handle::try_current().map_err(|_| CasError::no_runtime())?;
            let place = (runtime.id(), name.into());
            let (job, waiting) = Job::new(&policy, want, patience);
            if shared.busy.add(&place, job) {
                runtime.spawn(Worker::new(Arc::clone(&shared), place).serve());
            }
            waiting.answer().await
        }
    }

    /// Looks at what stands there, and at nothing else.
    fn look(&self, ask: StorageRequest<'_>) -> impl Future<Output = Result<Decision, CasError>> + Send + use<S> {
        let (shared, name, patience) = (Arc::clone(&self.shared), names::of(ask.policy, ask.key), self.deadline);
        let (policy, op, cost) = (ask.policy.clone(), ask.op, ask.cost);
        async move {
            Handle::try_current().map_err(|_| CasError::no_runtime())?;
            let loaded = timeout(patience, shared.store.load(&name)).await.map_err(|_| CasError::late(false))?;
            let loaded = loaded.map_err(CasError::loading)?;
            let view = shared.view(&loaded);
            Ok(policy.decide(&mut text::read(&policy, &view.states), view.at, op, cost))
        }
    }
}

impl<S: CasStorage> Storage for Cas<S> {
    type Error = CasError;
    type DecideFuture = Pin<Box<dyn Future<Output = Result<Decision, CasError>> + Send>>;
    type UpdateFuture = Pin<Box<dyn Future<Output = Result<(), CasError>> + Send>>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        if let Err(error) = self.validate(ask.policy) {
            return Box::pin(async { Err(CasError::too_long(error)) });
        }
        if ask.op == Op::Peek || ask.cost == 0 {
            return Box::pin(self.look(ask));
        }
        let answer = self.answer(ask.policy, ask.key, Command::Hit(ask.cost));
        Box::pin(async { answer.await?.ok_or_else(CasError::ended) })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let answer = self.answer(policy, key, Command::Clear);
        Box::pin(async { answer.await.map(drop) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        if decision.is_refused() || decision.cost() == 0 {
            return Box::pin(async { Ok(()) });
        }
        let answer = self.answer(policy, key, Command::Refund(Box::new(decision.clone())));
        Box::pin(async { answer.await.map(drop) })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.longest_log.map_or(Ok(()), |most| max_len::check_logs(policy, most))?;
        self.store().longest().map_or(Ok(()), |longest| max_len::check(policy, longest))
    }
}

/// Shows how many keys are busy.
impl<S: fmt::Debug> fmt::Debug for Cas<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cas")
            .field("store", &self.shared.store)
            .field("deadline", &self.deadline)
            .field("busy", &self.shared.busy.len())
            .finish_non_exhaustive()
    }
}
