//! A storage over any store with compare-and-swap.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::CasStorage;
use super::job::{self, Command, Job, JobResult, JobWork};
use super::length::{check_length, check_logs, check_members};
use super::shared::{CasShared, TimeSource, store_deadline};
use super::skew::Skew;
use super::worker::Worker;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::bounds::{MAX_SKEW, TIMEOUT, checked_skew, checked_timeout};
use crate::storage::contract::{OwnedRequest, decides_one_key};
use crate::storage::metrics::measured;
use crate::storage::{Clock, SlotStore, Storage, StorageError, StorageFuture, StorageRequest, names};

/// A storage over any store with compare-and-swap. The page of [`CasStorage`] has an example.
///
/// It runs every strategy, and every policy whose states fit into the
/// [longest text](CasStorage::max_text_len) of the store.
///
/// A hit loads the state of its key, decides, and stores the new state if no other process has
/// stored one meanwhile. Otherwise it loses the race, and tries again.
///
/// - A hit that loses every race until its timeout, or that has lost 24 races, is refused as
///   [contended](Decision::is_contended). It has spent nothing, and retrying can succeed.
/// - Concurrent hits on the same key share round trips, if they are made through clones in one
///   tokio runtime.
/// - A hit may be executed as soon as its future has been polled. Dropping the future later does
///   not undo the hit.
/// - A call takes at most 100 milliseconds by default: see [`timeout`](Self::timeout).
/// - A call decides on one key. For [several keys](crate::RateLimitLayer::and), wrap the storage in
///   [`InOrder`](crate::storage::InOrder).
/// - [`clear_all`](Storage::clear_all) and [`keys`](Storage::keys) are not supported, because the
///   store cannot list its keys.
/// - Calls need a tokio runtime with time enabled. The storage can be created outside of a runtime.
///
/// The guide on [writing a storage](crate::guide::write_a_storage) has the details.
///
/// # Clocks
///
/// A decision is made at the store's time, or at this machine's time if the store reports none: see
/// [`clock`](Self::clock).
///
/// The instant of the newest decision is stored with the key. No decision is made at an earlier
/// instant, even if the clock of the next process is behind. A clock that is more than 5 seconds
/// behind the stored instant is corrected: see [`max_skew`](Self::max_skew). The guide has the
/// [guarantees](crate::guide::several_processes#clocks).
///
/// # Errors
///
/// Calls fail with [`StorageError`]:
///
/// | kind | cause |
/// |---|---|
/// | [`Timeout`](crate::storage::StorageErrorKind::Timeout) | The store does not reply in time. A swap without a reply is not retried, because a retry could count a hit twice. |
/// | [`Contended`](crate::storage::StorageErrorKind::Contended) | A settlement, a clear or a claim of slots loses every race. |
/// | [`Unsupported`](crate::storage::StorageErrorKind::Unsupported) | The states of the policy can exceed, or have exceeded, the longest text of the store. Another version of this crate has written the state in an [unknown format](crate::guide::deploying#rolling-upgrades). Also returned by `clear_all` and `keys`. |
/// | [`Cancelled`](crate::storage::StorageErrorKind::Cancelled) | The call was made outside of a tokio runtime, the runtime shuts down, or a custom strategy panics. |
/// | any other | The store fails. |
#[derive(Clone)]
pub struct Cas<S: CasStorage> {
    pub(super) shared: Arc<CasShared<S>>,
    pub(super) timeout: Duration,
    /// The beginning of each key, for example `rl:`. Empty for custom stores.
    pub(super) prefix: Arc<str>,
    /// The label `storage` of the metrics.
    pub(super) label: &'static str,
    /// The maximum number of log entries that a policy may keep per key, or `None` if the number is
    /// not limited.
    pub(super) longest_log: Option<u32>,
}

impl<S: CasStorage> Cas<S> {
    /// Creates a storage over `store`, with the default settings.
    pub fn new(store: S) -> Self {
        let shared = CasShared::new(store, None, "the store".into(), TimeSource::Store, Skew::new(MAX_SKEW));
        Self { shared: Arc::new(shared), timeout: TIMEOUT, prefix: "".into(), label: "cas", longest_log: None }
    }

    /// Sets the label `storage` of the [metrics](crate::guide::monitoring#metrics) (feature
    /// `metrics`). Defaults to `cas`.
    #[must_use]
    pub fn metrics_label(self, label: &'static str) -> Self {
        Self { label, ..self }
    }

    /// Sets the timeout of a call. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(self, timeout: Duration) -> Self {
        or_panic(checked_timeout(timeout));
        Self { timeout, ..self }
    }

    /// Sets the clock, for example in tests, or on machines with an unreliable clock. Defaults to
    /// the store's clock, or to this machine's clock if the store reports [no
    /// time](super::Loaded::now).
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let shared = self.shared.with(Some(TimeSource::Clock(Arc::new(clock))), self.shared.skew.max());
        Self { shared: Arc::new(shared), ..self }
    }

    /// Sets the longest time by which the newest decision on a key may be ahead of the
    /// [clock](Self::clock). Defaults to 5 seconds.
    ///
    /// | newest decision | time of the next decision |
    /// |---|---|
    /// | behind the clock | the clock's time |
    /// | ahead by at most `max_skew` | the instant of the newest decision |
    /// | further ahead | the instant of the newest decision, plus the time that has passed on this clock since this process last decided on the key; [`Decision::at`] returns the clock's time |
    ///
    /// In the last case, a warning is logged at most once per minute (feature `tracing`). At any
    /// difference, all processes together admit at most what the strategy promises, plus one quota
    /// for each [change of a clock](crate::guide::several_processes#clocks).
    ///
    /// The store keeps each state for `max_skew` after it expires, and for at least 500
    /// milliseconds.
    ///
    /// With zero, the instant of the newest decision is neither stored nor compared with the clock.
    /// Each decision is made at the clock's time. So a node whose clock is years ahead can block a
    /// key for years.
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        let shared = self.shared.with(None, or_panic(checked_skew(max_skew)));
        Self { shared: Arc::new(shared), ..self }
    }

    /// Returns the store that [`new`](Self::new) was called with.
    pub fn store(&self) -> &S {
        &self.shared.store
    }

    /// Returns the key in the store of the states of `key`.
    fn store_key(&self, policy: &Policy, key: &Key) -> Arc<str> {
        let name = names::of(policy, key);
        if self.prefix.is_empty() { name.into() } else { format!("{}{name}", self.prefix).into() }
    }

    /// Executes a command on one key.
    fn execute_one(
        &self,
        policy: &Policy,
        key: &Key,
        command: Command,
    ) -> impl Future<Output = JobResult> + Send + use<S> {
        self.execute(JobWork::One { key: self.store_key(policy, key), policy: policy.clone(), command })
    }

    /// Executes a job, which is queued at the first poll.
    fn execute(&self, work: JobWork) -> impl Future<Output = JobResult> + Send + use<S> {
        let (shared, timeout) = (Arc::clone(&self.shared), self.timeout);
        async move {
            let runtime = Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            let place = (runtime.id(), work.queue_name());
            let (job, waiting) = Job::new(work, timeout, &shared.store_name);
            if shared.queues.add(&place, job) {
                runtime.spawn(Worker::new(Arc::clone(&shared), place).run());
            }
            waiting.answer().await
        }
    }

    /// Decides without storing. Loads the states without waiting for queued jobs.
    fn peek(
        &self,
        members: &[StorageRequest<'_>],
    ) -> impl Future<Output = Result<Vec<Decision>, StorageError>> + Send + use<S> {
        let (shared, within) = (Arc::clone(&self.shared), self.timeout);
        let keys: Vec<Arc<str>> = members.iter().map(|member| self.store_key(member.policy, member.key)).collect();
        let members: Vec<_> = members.iter().map(StorageRequest::owned).collect();
        async move {
            Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            let loaded = timeout(within, shared.load_all(&keys, store_deadline(within))).await;
            let loaded = loaded.map_err(|_| job::late(&shared.store_name, false))?;
            let loaded = loaded.map_err(StorageError::uncounted)?;
            let peek = |((member, key), loaded): ((&OwnedRequest, &Arc<str>), _)| {
                shared.view(key, loaded).peek(&member.policy, member.op, member.cost)
            };
            members.iter().zip(&keys).zip(&loaded).map(peek).collect()
        }
    }
}

impl<S: CasStorage> Storage for Cas<S> {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Err(error) = self.validate(request.policy) {
            return StorageFuture::ready(Err(StorageError::unsupported_policy(error)));
        }
        if request.is_peek() {
            let answer = self.peek(&[request]);
            return StorageFuture::new(measured(self.label, async { answer.await?.pop().ok_or_else(job::cancelled) }));
        }
        let command = if request.op == Op::Charge { Command::Charge(request.cost) } else { Command::Hit(request.cost) };
        let answer = self.execute_one(request.policy, request.key, command);
        StorageFuture::new(measured(self.label, async { answer.await?.pop().ok_or_else(job::cancelled) }))
    }

    /// Returns an error of the kind [`Unsupported`](crate::storage::StorageErrorKind::Unsupported)
    /// for more than one key, because a [`CasStorage`] replaces one text at a time.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let Err(error) = StorageRequest::check_members(members) {
            return StorageFuture::ready(Err(error));
        }
        match *members {
            [] => return StorageFuture::ok(Vec::new()),
            [only] => return self.decide(only).map(|decided| Ok(vec![decided?])),
            _ => {}
        }
        let policies: Vec<_> = members.iter().map(|member| member.policy.clone()).collect();
        if let Err(error) = self.validate_members(&policies) {
            return StorageFuture::ready(Err(StorageError::unsupported_policy(error)));
        }
        if members.iter().all(StorageRequest::is_peek) {
            return StorageFuture::new(measured(self.label, self.peek(members)));
        }
        let member = |member: &StorageRequest<'_>| (self.store_key(member.policy, member.key), member.owned());
        let work = JobWork::All(members.iter().map(member).collect());
        StorageFuture::new(measured(self.label, self.execute(work)))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let answer = self.execute_one(policy, key, Command::Clear);
        StorageFuture::new(measured(self.label, async { answer.await.map(drop) }))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let answer = self.execute_one(policy, key, Command::Settle(Box::new(decision.clone()), actual));
        StorageFuture::new(measured(self.label, async { answer.await.map(drop) }))
    }

    fn check(&self) -> StorageFuture<()> {
        let (shared, within) = (Arc::clone(&self.shared), self.timeout);
        StorageFuture::new(async move { shared.check(within, |deadline| shared.store.check(deadline)).await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.longest_log.map_or(Ok(()), |max_entries| check_logs(policy, max_entries))?;
        self.store().max_text_len().map_or(Ok(()), |longest| check_length(policy, longest))
    }

    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        if self.shared.several.is_none() {
            return Err(decides_one_key());
        }
        policies.iter().try_for_each(|policy| self.validate(policy))?;
        self.store().max_text_len().map_or(Ok(()), |longest| check_members(policies, longest))
    }

    fn slots(&self) -> Option<Arc<dyn SlotStore>> {
        Some(Arc::new(self.clone()))
    }
}

/// Prints the store, the timeout and the number of keys with calls in progress.
impl<S: CasStorage> fmt::Debug for Cas<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cas")
            .field("store", &self.shared.store)
            .field("timeout", &self.timeout)
            .field("busy", &self.shared.queues.len())
            .finish_non_exhaustive()
    }
}
