//! A storage over any store that compares and swaps.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::error::CasError;
use super::job::{Answer, Job, Want};
use super::round::Rounds;
use super::shared::{Shared, Time};
use super::skew::{self, MAX_SKEW, Skew};
use super::{CasStorage, size};
use crate::error::or_panic;
use crate::storage::deadline::{self, DEADLINE};
use crate::storage::{Ask, Clock, Storage, names, text};
use crate::{ConfigError, Decision, Key, Op, Policy};

/// The most log entries of a key on memcached and etcd, unless long logs are allowed: 19 kB.
#[cfg(any(feature = "memcached", feature = "etcd"))]
const LONGEST_LOG: u32 = 1_000;

/// Makes a storage of anything that can compare and swap: of a [`CasStorage`].
///
/// Every strategy and every policy runs on it. A hit loads what stands under its key, decides on it, and puts what that leaves
/// there instead, unless somebody else has done so meanwhile; then it tries again. Clones are handles on the same store.
///
/// 1. Hits that wait for one key in this process are decided one after another on what was loaded once, and stored at once: a
///    key that everybody uses costs the store no more than one that few do. No key waits for another.
/// 2. A hit that others outran all the time is refused, to come back soon: its decision
///    [is contended](Decision::is_contended). That is no failure of the storage, which [`OnError`](crate::OnError) would decide on.
/// 3. Each answer comes within the [deadline](Self::deadline). Silence of the store until then is an error.
/// 4. A swap of which it is not known what became of it is an error, and is not tried again: that could count twice.
/// 5. A peek, and a hit of cost 0, are a load and nothing more. So is a refusal, except by a strategy that counts them.
/// 6. A hit is charged from the first time its future is polled: dropping it later does not undo that.
/// 7. Clearing a key, and giving back, change only what the policy's own limits remember: policies of one name that are
///    configured differently keep their states side by side. When others are always faster, that is an error.
///
/// # Clocks
///
/// The time is the store's if it reports one, else this machine's. The clocks of two machines differ, so the
/// newest instant at which a key was decided is stored with the key, and no decision is made earlier than
/// that. All nodes together spend one limit on one time line, which is never ahead of the fastest clock and
/// never behind the slowest. In `d` of real time they admit at most what the strategy promises for `d` plus the
/// skew. A node whose clock is behind may have to wait longer than `retry_after`, by the skew at most.
///
/// That holds up to [`max_skew`](Self::max_skew), 5 seconds. If a stored instant is further ahead of a node's
/// clock, one of the clocks is broken. The node then decides by its own clock, so that a node in the wrong
/// year locks no client out. It logs a warning, at most once a minute, and counts each such decision in
/// `ratelimit_clock_skew_total` (feature `metrics`). Until the clocks are set, a window that one node began may
/// be over for another: each hit of a node with a clock that is ahead by a period or more can give all
/// others a new window. Buckets admit no more than they promise: nodes that are behind find them empty.
///
/// It needs a runtime of tokio's with time, and may be made outside of one. The [`CasStorage`] shows one in use.
#[derive(Clone)]
pub struct Cas<S> {
    shared: Arc<Shared<S>>,
    deadline: Duration,
    /// The most log entries that a policy may keep of a key.
    longest_log: Option<u32>,
}

impl<S: CasStorage> Cas<S> {
    /// A storage over this store.
    pub fn new(store: S) -> Self {
        let shared = Shared::new(store, Time::Stores, Skew::new(MAX_SKEW));
        Self { shared: Arc::new(shared), deadline: DEADLINE, longest_log: None }
    }

    /// Refuses policies that can keep more than 1,000 log entries of a key. A hit loads and stores the
    /// whole text, so a long log costs a remote store more than all else.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn without_long_logs(self) -> Self {
        Self { longest_log: Some(LONGEST_LOG), ..self }
    }

    /// How long an answer may take: 100 milliseconds unless it is said.
    ///
    /// # Panics
    ///
    /// When it is less than a millisecond or more than an hour; [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline).
    ///
    /// # Errors
    ///
    /// When it is less than a millisecond or more than an hour.
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        Ok(Self { deadline, ..self })
    }

    /// Decides by this clock, whatever time the store says: for tests, or where the machine's clock is not to be trusted.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let shared = self.shared.with(Some(Time::Chosen(Arc::new(clock))), self.shared.skew.max());
        Self { shared: Arc::new(shared), ..self }
    }

    /// Sets how far the newest decision on a key may be ahead of this node's clock. Defaults to 5 seconds.
    ///
    /// See [clocks](Self#clocks). States are kept for as much longer than they matter. 0 switches this
    /// off: each node decides by its own clock alone, and a node in the wrong year may lock a key.
    ///
    /// # Panics
    ///
    /// If it is more than a day. [`try_max_skew`](Self::try_max_skew) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        or_panic(self.try_max_skew(max_skew))
    }

    /// As [`max_skew`](Self::max_skew).
    ///
    /// # Errors
    ///
    /// If it is more than a day.
    pub fn try_max_skew(self, max_skew: Duration) -> Result<Self, ConfigError> {
        let shared = self.shared.with(None, skew::checked(max_skew)?);
        Ok(Self { shared: Arc::new(shared), ..self })
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.shared.store
    }

    /// Returns the number of keys that jobs are being done on.
    #[cfg(any(feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) fn busy_keys(&self) -> usize {
        self.shared.busy.len()
    }

    /// What becomes of a job, which is begun when this is first polled.
    fn answer(&self, policy: &Policy, key: &Key, want: Want) -> impl Future<Output = Answer> + Send + use<S> {
        let (shared, policy, name, patience) =
            (Arc::clone(&self.shared), policy.clone(), names::of(policy, key), self.deadline);
        async move {
            let runtime = Handle::try_current().map_err(|_| CasError::no_runtime())?;
            let place = (runtime.id(), name.into());
            let (job, waiting) = Job::new(&policy, want, patience);
            if shared.busy.add(&place, job) {
                runtime.spawn(Rounds::new(Arc::clone(&shared), place).serve());
            }
            waiting.answer().await
        }
    }

    /// Looks at what stands there, and at nothing else.
    fn look(&self, ask: Ask<'_>) -> impl Future<Output = Result<Decision, CasError>> + Send + use<S> {
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
    type Decided = Pin<Box<dyn Future<Output = Result<Decision, CasError>> + Send>>;
    type Done = Pin<Box<dyn Future<Output = Result<(), CasError>> + Send>>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        if let Err(error) = self.validate(ask.policy) {
            return Box::pin(async { Err(CasError::too_long(error)) });
        }
        if ask.op == Op::Peek || ask.cost == 0 {
            return Box::pin(self.look(ask));
        }
        let answer = self.answer(ask.policy, ask.key, Want::Hit(ask.cost));
        Box::pin(async { answer.await?.ok_or_else(CasError::ended) })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let answer = self.answer(policy, key, Want::Clear);
        Box::pin(async { answer.await.map(drop) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        if decision.is_refused() || decision.cost() == 0 {
            return Box::pin(async { Ok(()) });
        }
        let answer = self.answer(policy, key, Want::Refund(Box::new(decision.clone())));
        Box::pin(async { answer.await.map(drop) })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.longest_log.map_or(Ok(()), |most| size::check_logs(policy, most))?;
        self.store().longest().map_or(Ok(()), |longest| size::check(policy, longest))
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
