//! A storage over any store with compare-and-swap.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::CasStorage;
use super::job::{self, Command, Job, JobResult};
use super::shared::{CasShared, TimeSource, store_deadline};
use super::skew::Skew;
use super::worker::Worker;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::policy::{Limit, Op, Policy};
use crate::storage::calls::{MAX_SKEW, TIMEOUT, checked_skew, checked_timeout, measured};
use crate::storage::{Clock, SlotStore, Storage, StorageError, StorageFuture, StorageRequest, names, text};

/// A storage over any store with compare-and-swap. The page of [`CasStorage`] has an example.
///
/// It runs every strategy, and every policy whose states fit into the
/// [longest](CasStorage::longest) text of the store.
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
/// - [`clear_all`](Storage::clear_all) is not supported, because the store cannot list its keys.
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
/// | [`Contended`](crate::storage::StorageErrorKind::Contended) | A settlement or a clear loses every race. |
/// | [`Unsupported`](crate::storage::StorageErrorKind::Unsupported) | The states of the policy can exceed, or have exceeded, the longest text of the store. Another version of this crate has written the state in an [unknown format](crate::guide::deploying#rolling-upgrades). Also returned by `clear_all`. |
/// | [`Cancelled`](crate::storage::StorageErrorKind::Cancelled) | The call was made outside of a tokio runtime, the runtime shuts down, or a custom strategy panics. |
/// | any other | The store fails. |
#[derive(Clone)]
pub struct Cas<S> {
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
        let shared = CasShared::new(store, "the store".into(), TimeSource::Store, Skew::new(MAX_SKEW));
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
    /// | newest decision | the next decision |
    /// |---|---|
    /// | behind the clock | is made at the clock's time |
    /// | ahead by at most `max_skew` | is made at the instant of the newest decision |
    /// | further ahead | is made at the instant of the newest decision, plus the time that has passed on this clock since its own last decision on the key; the decision [reports](Decision::at) the clock's time |
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

    /// Returns the name of the states of `key` in the store.
    fn key(&self, policy: &Policy, key: &Key) -> String {
        let name = names::of(policy, key);
        if self.prefix.is_empty() { name } else { format!("{}{name}", self.prefix) }
    }

    /// Executes a command. The job is queued at the first poll.
    fn execute(&self, policy: &Policy, key: &Key, command: Command) -> impl Future<Output = JobResult> + Send + use<S> {
        let (shared, policy, name, timeout) =
            (Arc::clone(&self.shared), policy.clone(), self.key(policy, key), self.timeout);
        async move {
            let runtime = Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            let place = (runtime.id(), name.into());
            let (job, waiting) = Job::new(&policy, command, timeout, &shared.name);
            if shared.queues.add(&place, job) {
                runtime.spawn(Worker::new(Arc::clone(&shared), place).run());
            }
            waiting.answer().await
        }
    }

    /// Decides without storing. Loads the state without waiting for queued jobs.
    fn peek(
        &self,
        request: StorageRequest<'_>,
    ) -> impl Future<Output = Result<Decision, StorageError>> + Send + use<S> {
        let (shared, within) = (Arc::clone(&self.shared), self.timeout);
        let StorageRequest { policy, key, op, cost } = request;
        let (policy, name) = (policy.clone(), self.key(policy, key));
        async move {
            Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            let loaded = timeout(within, shared.store.load(&name, store_deadline(within))).await;
            let loaded = loaded.map_err(|_| job::late(&shared.name, false))?;
            let loaded = loaded.map_err(|error| StorageError::from_boxed(error).uncounted())?;
            shared.view(&name, &loaded).peek(&policy, op, cost)
        }
    }
}

impl<S: CasStorage> Storage for Cas<S> {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Err(error) = self.validate(request.policy) {
            return StorageFuture::ready(Err(StorageError::unsupported_policy(error)));
        }
        if request.op == Op::Peek || request.cost == 0 {
            return StorageFuture::new(measured(self.label, self.peek(request)));
        }
        let command = if request.op == Op::Charge { Command::Charge(request.cost) } else { Command::Hit(request.cost) };
        let answer = self.execute(request.policy, request.key, command);
        StorageFuture::new(measured(self.label, async { answer.await?.ok_or_else(job::cancelled) }))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let answer = self.execute(policy, key, Command::Clear);
        StorageFuture::new(measured(self.label, async { answer.await.map(drop) }))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let answer = self.execute(policy, key, Command::Settle(Box::new(decision.clone()), actual));
        StorageFuture::new(measured(self.label, async { answer.await.map(drop) }))
    }

    fn check(&self) -> StorageFuture<()> {
        let (shared, within) = (Arc::clone(&self.shared), self.timeout);
        StorageFuture::new(async move { shared.check(within, |deadline| shared.store.check(deadline)).await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.longest_log.map_or(Ok(()), |max_entries| check_logs(policy, max_entries))?;
        self.store().longest().map_or(Ok(()), |longest| check_length(policy, longest))
    }

    fn slots(&self) -> Option<Arc<dyn SlotStore>> {
        Some(Arc::new(self.clone()))
    }
}

/// Prints the store, the timeout and the number of keys with calls in progress.
impl<S: fmt::Debug> fmt::Debug for Cas<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cas")
            .field("store", &self.shared.store)
            .field("timeout", &self.timeout)
            .field("busy", &self.shared.queues.len())
            .finish_non_exhaustive()
    }
}

/// The largest number of bytes per log entry: `,`, an instant, `*` and a number of units.
const ENTRY: u64 = 19;

/// The largest number of bytes of a limit's entry, without the name of its strategy and its log
/// entries: brackets, separators, position, period, an instant and two amounts.
const LIMIT: u64 = 80;

/// Returns an error if the state of a key can grow longer than `longest` bytes.
fn check_length(policy: &Policy, longest: usize) -> Result<(), ConfigError> {
    let available = u64::try_from(longest).unwrap_or(u64::MAX);
    let all: u64 = text::LONGEST_HEAD + policy.limits().iter().map(max_bytes).sum::<u64>();
    if all <= available {
        return Ok(());
    }
    let largest = policy.limits().iter().max_by_key(|limit| max_bytes(limit));
    let advice = match largest.map(|limit| (limit, entries(limit))) {
        Some((limit, entries @ 1..)) => {
            let others = all - ENTRY * entries;
            format!(
                "an amount of at most {} in \"{limit}\", or a strategy with a smaller state, \
                 for example \"sliding-window-counter {}\"",
                available.saturating_sub(others) / ENTRY,
                limit.quota()
            )
        }
        _ => "fewer limits".to_owned(),
    };
    Err(ConfigError::new(format!(
        "\"{policy}\" can need {all} bytes per key, and the storage keeps at most {longest}: use {advice}"
    )))
}

/// Returns an error if the logs of the policy can hold more than `max_entries` entries.
fn check_logs(policy: &Policy, max_entries: u32) -> Result<(), ConfigError> {
    let all: u64 = policy.limits().iter().map(entries).sum();
    if all <= u64::from(max_entries) {
        return Ok(());
    }
    let bytes = ENTRY * all;
    let longest = policy.limits().iter().max_by_key(|limit| entries(limit));
    let quota = longest.map(|limit| limit.quota().to_string()).unwrap_or_default();
    Err(ConfigError::new(format!(
        "\"{policy}\" can keep {all} log entries per key, and each hit would load and store all of them, up to \
         {bytes} bytes in each direction: use \"sliding-window-counter {quota}\", or allow logs of more than \
         {max_entries} entries with long-logs=allow in the storage's URL"
    )))
}

fn max_bytes(limit: &Limit) -> u64 {
    // Percent-encoding can turn one byte of the strategy's name into three.
    let name = 3 * limit.strategy().name().len() as u64;
    LIMIT + name + ENTRY * entries(limit)
}

fn entries(limit: &Limit) -> u64 {
    limit.strategy().log_entries(limit.quota()).into()
}
