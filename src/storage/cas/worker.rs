//! The compare-and-swap loop of a key, or of several: load, decide on all waiting jobs, swap, and
//! retry after a lost race.
//!
//! Without batches, eight writers on one etcd key would need seven attempts each. With them, a key
//! costs a process one or two round trips for any number of waiting hits.
//!
//! No job of a batch on a recalled text is answered before the swap has confirmed the text. If the
//! batch would change nothing, it loads the text and decides again, because the recalled one may be
//! outdated.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

use super::batch::Batches;
use super::job::{Job, JobResult, QueueKey, late};
use super::length::longest_text;
use super::several::{KeySwap, MAX_KEYS, SwappedAll};
use super::shared::{CasShared, store_deadline};
use super::{CasStorage, Loaded};
use crate::storage::{StorageError, StorageErrorKind};
use crate::time::{Timestamp, random_up_to};

/// The maximum number of retries without a delay.
const IMMEDIATE_RETRIES: u32 = 4;

/// The texts of the keys of a batch.
type Texts<V> = HashMap<Arc<str>, Loaded<V>>;

/// The result of executing a batch.
enum Attempt<V> {
    /// All jobs have an answer, or their callers have left.
    Answered,
    /// The race for a key was lost. Or the jobs would not change the recalled texts, and nothing was
    /// sent. Contains the jobs to execute again, and the newer texts if the store returned them.
    Lost(Vec<Job>, Option<Texts<V>>),
    /// The new texts are too long for one step, and nothing was sent. Contains the jobs to execute again
    /// in several steps, and the texts that they were executed on.
    TooLong(Vec<Job>, Texts<V>),
}

/// Executes the jobs of one key, or those of several keys. If it is dropped early, the waiting callers get an error.
pub(super) struct Worker<S: CasStorage> {
    shared: Arc<CasShared<S>>,
    place: QueueKey,
    /// The jobs that were taken from the queue, and do not fit into the current batch.
    waiting: Vec<Job>,
    /// The longest recent round trip to the store. It decays by an eighth with each shorter round
    /// trip.
    trip: Duration,
    /// The time that the last swap took if the store cancelled it, for example because another
    /// transaction has locked the key. Otherwise zero.
    blocked: Duration,
    is_done: bool,
}

impl<S: CasStorage> Drop for Worker<S> {
    fn drop(&mut self) {
        if !self.is_done {
            self.shared.queues.abandon(&self.place);
        }
    }
}

impl<S: CasStorage> Worker<S> {
    pub(super) fn new(shared: Arc<CasShared<S>>, place: QueueKey) -> Self {
        Self { shared, place, waiting: Vec::new(), trip: Duration::ZERO, blocked: Duration::ZERO, is_done: false }
    }

    /// Executes jobs until the queue is empty.
    pub(super) async fn run(mut self) {
        loop {
            if self.waiting.is_empty() {
                self.waiting = self.shared.queues.take(&self.place);
            }
            if self.waiting.is_empty() {
                self.is_done = true;
                return;
            }
            let jobs = self.next_batch();
            self.run_batch(jobs).await;
        }
    }

    /// Takes as many waiting jobs as the store can execute in one step, and at least one.
    fn next_batch(&mut self) -> Vec<Job> {
        let longest =
            self.shared.store.max_text_len().and_then(|longest| u64::try_from(longest).ok()).unwrap_or(u64::MAX);
        let (mut keys, mut bytes) = (HashSet::new(), 0);
        let is_too_much = |job: &Job| {
            for (key, policy) in job.work.keys() {
                if keys.insert(Arc::clone(key)) {
                    bytes += longest_text(policy);
                }
            }
            keys.len() > MAX_KEYS || bytes > longest
        };
        let count = self.waiting.iter().position(is_too_much).unwrap_or(self.waiting.len());
        let rest = self.waiting.split_off(count.max(1));
        mem::replace(&mut self.waiting, rest)
    }

    /// Executes a batch of jobs. Jobs that arrive later wait for the next batch, because the loaded
    /// state may be older than a result that their callers have seen.
    async fn run_batch(&mut self, jobs: Vec<Job>) {
        let mut jobs = self.in_time(jobs);
        let mut newest = None;
        // If the store recalls all texts, the first load is not needed.
        if let Some(recalled) = self.recall(&jobs) {
            match self.attempt(jobs, recalled, true).await {
                Attempt::Answered => return,
                // An outdated recalled text does not count as a lost race.
                Attempt::Lost(remaining, newer) => {
                    take_back(&remaining);
                    (jobs, newest) = (self.in_time(remaining), newer);
                }
                // The recalled texts may be outdated.
                Attempt::TooLong(remaining, _) => jobs = self.half_of(remaining),
            }
        }
        for attempt in 0_u32.. {
            if jobs.is_empty() {
                return;
            }
            let loaded = match newest.take() {
                Some(loaded) => loaded,
                None => match self.load(&jobs).await {
                    Ok(loaded) => loaded,
                    Err(error) => return Self::send_all(jobs.into_iter().map(|job| (job, Err(error.clone())))),
                },
            };
            let now = self.now(&loaded);
            match self.attempt(self.in_time(jobs), loaded, false).await {
                Attempt::Answered => return,
                Attempt::Lost(lost, newer) => (jobs, newest) = (lost, newer),
                Attempt::TooLong(remaining, loaded) => {
                    (jobs, newest) = (self.half_of(remaining), Some(loaded));
                    // Each half executes its jobs on long texts.
                    yield_now().await;
                    continue;
                }
            }
            for job in &mut jobs {
                job.set_lost(now);
            }
            // The first retries use the state that the lost swap returned, if there is one. All
            // other retries back off and load again.
            if newest.is_none() || attempt >= IMMEDIATE_RETRIES {
                newest = None;
                sleep(backoff(attempt)).await;
            }
            jobs = self.in_time(jobs);
        }
    }

    /// Returns the texts of the jobs' keys if the store recalls all of them.
    fn recall(&self, jobs: &[Job]) -> Option<Texts<S::Version>> {
        let recall = |key: Arc<str>| self.shared.store.recall(&key).map(|loaded| (key, loaded));
        keys(jobs).into_iter().map(recall).collect()
    }

    /// Takes jobs back whose texts are too long together. Returns the first half of them, and keeps the
    /// rest for the next batches. So a text that is too long fails the jobs on its own key only.
    fn half_of(&mut self, mut jobs: Vec<Job>) -> Vec<Job> {
        take_back(&jobs);
        let rest = jobs.split_off(jobs.len().div_ceil(2));
        self.waiting.splice(..0, rest);
        self.in_time(jobs)
    }

    /// Executes the jobs on the loaded states, and stores the result. After a lost race, returns the
    /// jobs that have to be executed again, and the newer states if the store returned them.
    ///
    /// A recalled state may be outdated, so no job is answered before a swap has confirmed it. If
    /// the jobs change nothing, there is no swap, and all of them have to be executed again on a
    /// loaded state.
    async fn attempt(
        &mut self,
        jobs: Vec<Job>,
        mut loaded: Texts<S::Version>,
        is_recalled: bool,
    ) -> Attempt<S::Version> {
        let (shared, now) = (Arc::clone(&self.shared), self.now(&loaded));
        let (mut batches, mut behind) = (Batches::default(), Vec::new());
        for (key, loaded) in &loaded {
            let view = shared.view(key, loaded);
            behind.push((key, view.behind));
            batches.add(key, view);
        }
        let remember = || behind.iter().for_each(|(key, behind)| shared.skew.remember(key, *behind));
        if !is_recalled {
            remember();
        }
        let mut pending: Vec<(Job, JobResult)> = Vec::with_capacity(jobs.len());
        for job in jobs.into_iter().filter(|job| job.ticket.begin()) {
            let answer = batches.execute(&job.work);
            if is_recalled || batches.is_changed() {
                pending.push((job, answer));
            } else {
                // This job and all jobs before it have changed nothing, so it needs no swap.
                Self::send_all([(job, answer)]);
            }
        }
        let texts = batches.finish(shared.skew.max());
        if texts.iter().all(|(_, change)| change.is_none()) {
            if is_recalled {
                return Attempt::Lost(jobs_of(pending), None);
            }
            Self::send_all(pending);
            return Attempt::Answered;
        }
        let bytes = texts.iter().filter_map(|(_, change)| change.as_ref()).map(|(text, _)| text.len()).sum::<usize>();
        if let Some(longest) = shared.store.max_text_len().filter(|longest| bytes > *longest) {
            if pending.len() > 1 {
                return Attempt::TooLong(jobs_of(pending), loaded);
            }
            Self::send_all(pending.into_iter().map(|(job, _)| (job, Err(too_long(bytes, longest)))));
            return Attempt::Answered;
        }
        // A recalled text is compared even if it does not change.
        let swaps = texts.iter().filter(|(_, change)| is_recalled || change.is_some()).filter_map(|(key, change)| {
            let change = change.as_ref().map(|(text, keep)| (&**text, *keep));
            Some(KeySwap { key, version: &loaded.get(*key)?.version, change })
        });
        let swaps: Vec<_> = swaps.collect();
        match self.swap(&pending, &swaps, now).await {
            Ok(SwappedAll::Stored) => {
                if is_recalled {
                    remember();
                }
                Self::send_all(pending);
            }
            Ok(SwappedAll::Lost(newer)) => {
                let keys: Vec<_> = swaps.iter().map(|swap| Arc::clone(swap.key)).collect();
                let newer = newer.map(|newer| {
                    loaded.extend(keys.into_iter().zip(newer));
                    loaded
                });
                return Attempt::Lost(jobs_of(pending), newer);
            }
            Err(error) => Self::send_all(pending.into_iter().map(|(job, _)| (job, Err(error.clone())))),
        }
        Attempt::Answered
    }

    async fn load(&mut self, jobs: &[Job]) -> Result<Texts<S::Version>, StorageError> {
        let (shared, keys) = (Arc::clone(&self.shared), keys(jobs));
        let loaded = self
            .timed(jobs.iter(), |deadline| shared.load_all(&keys, deadline))
            .await
            .ok_or_else(|| late(&shared.store_name, false))?
            .map_err(StorageError::uncounted)?;
        let loaded = keys.into_iter().zip(loaded).collect();
        self.set_contended(self.now(&loaded));
        Ok(loaded)
    }

    async fn swap(
        &mut self,
        pending: &[(Job, JobResult)],
        swaps: &[KeySwap<'_, S::Version>],
        now: Timestamp,
    ) -> Result<SwappedAll<S::Version>, StorageError> {
        let shared = Arc::clone(&self.shared);
        let jobs = pending.iter().map(|(job, _)| job);
        let begun = Instant::now();
        let swapped = self.timed(jobs, |deadline| shared.swap_all(swaps, deadline)).await;
        let swapped = swapped.ok_or_else(|| late(&shared.store_name, true))?;
        let is_cancelled = swapped.as_ref().is_err_and(|error| error.is_timeout() && !error.may_have_counted());
        // The next jobs of several keys can have other keys, which need not be locked.
        let is_of_one_key = !self.place.1.is_empty();
        self.blocked = if is_cancelled && is_of_one_key { begun.elapsed() } else { Duration::ZERO };
        let swapped = swapped?;
        self.set_contended(now);
        Ok(swapped)
    }

    /// Returns the node's time for a decision on `loaded`.
    fn now(&self, loaded: &Texts<S::Version>) -> Timestamp {
        loaded.values().map(|loaded| self.shared.now(loaded)).max().unwrap_or_else(Timestamp::wall_clock)
    }

    /// Records for each waiting job that the current batch still delayed it at the time `at`.
    fn set_contended(&self, at: Timestamp) {
        self.waiting.iter().for_each(|job| job.ticket.set_contended(at));
        self.shared.queues.visit(&self.place, |job| job.ticket.set_contended(at));
    }

    /// Waits for the store, and measures the round trip. Returns `None` after a timeout.
    ///
    /// The deadline of the store is before the last caller leaves, so that its error, or a statement
    /// that it cancels, is still a definite answer. A call without a reply goes on for the longest of
    /// the jobs' full timeouts: it may still be executed, and its result is what the next jobs of the
    /// key need.
    async fn timed<T, E, F>(
        &mut self,
        jobs: impl Iterator<Item = &Job>,
        call: impl FnOnce(std::time::Instant) -> F,
    ) -> Option<Result<T, E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let (started, mut longest, mut remaining) = (Instant::now(), Duration::ZERO, Duration::ZERO);
        for job in jobs {
            longest = longest.max(job.timeout);
            remaining = remaining.max(job.deadline.saturating_duration_since(started));
        }
        let result = timeout(longest, call(store_deadline(remaining))).await.ok()?;
        self.trip = started.elapsed().max(self.trip * 7 / 8);
        Some(result)
    }

    /// Keeps the jobs that can still be executed in time.
    fn in_time(&self, jobs: Vec<Job>) -> Vec<Job> {
        jobs.into_iter().filter_map(|job| job.retain(self.trip, self.blocked)).collect()
    }

    fn send_all(answers: impl IntoIterator<Item = (Job, JobResult)>) {
        for (job, answer) in answers {
            job.ticket.answer(answer);
        }
    }
}

/// Marks jobs as not executed.
fn take_back(jobs: &[Job]) {
    for job in jobs {
        job.ticket.take_back();
    }
}

fn jobs_of(pending: Vec<(Job, JobResult)>) -> Vec<Job> {
    pending.into_iter().map(|(job, _)| job).collect()
}

/// Returns the keys of the jobs, each once.
fn keys(jobs: &[Job]) -> Vec<Arc<str>> {
    let keys: HashSet<_> = jobs.iter().flat_map(|job| job.work.keys()).map(|(key, _)| key).collect();
    keys.into_iter().cloned().collect()
}

/// Returns the delay before the next attempt: exponential backoff with full jitter. The upper bound
/// is 200 microseconds at first, and doubles with each attempt up to 12.8 milliseconds.
pub(super) fn backoff(attempt: u32) -> Duration {
    random_up_to(Duration::from_micros(200 << attempt.min(6)))
}

fn too_long(bytes: usize, longest: usize) -> StorageError {
    let message = format!(
        "the states have grown to {bytes} bytes, and the store keeps at most {longest} in one step; use a different \
         name for each policy, implement Strategy::log_entries for strategies with a log, and use no moving window \
         for costs that are settled"
    );
    StorageError::new(StorageErrorKind::Unsupported, message)
}
