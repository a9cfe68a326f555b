//! The compare-and-swap loop of a key: load, decide on all waiting jobs, swap, and retry after a
//! lost race.
//!
//! Without batches, eight writers on one etcd key would need seven attempts each. With them, a key
//! costs a process two round trips for any number of waiting hits.
//!
//! No job of a batch on a recalled text is answered before the swap has confirmed the text. If the
//! batch would change nothing, it loads the text and decides again, because the recalled one may be
//! outdated.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::batch::Batch;
use super::job::{Job, JobKey, JobResult, late};
use super::shared::{CasShared, store_deadline};
use super::{CasStorage, Loaded, Swapped};
use crate::storage::{StorageError, StorageErrorKind};
use crate::time::{Timestamp, random_up_to};

/// The maximum number of retries without a delay.
const IMMEDIATE_RETRIES: u32 = 4;

/// Executes the jobs of one key. If it is dropped early, the waiting callers get an error.
pub(super) struct Worker<S: CasStorage> {
    shared: Arc<CasShared<S>>,
    place: JobKey,
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
    pub(super) fn new(shared: Arc<CasShared<S>>, place: JobKey) -> Self {
        Self { shared, place, trip: Duration::ZERO, blocked: Duration::ZERO, is_done: false }
    }

    /// Executes jobs until the queue is empty.
    pub(super) async fn run(mut self) {
        loop {
            let jobs = self.shared.queues.take(&self.place);
            if jobs.is_empty() {
                self.is_done = true;
                return;
            }
            self.run_batch(jobs).await;
        }
    }

    /// Executes a batch of jobs. Jobs that arrive later wait for the next batch, because the loaded
    /// state may be older than a result that their callers have seen.
    async fn run_batch(&mut self, jobs: Vec<Job>) {
        let mut jobs = self.in_time(jobs);
        let mut newest = None;
        // If the store recalls a text, the first load is not needed.
        if let Some(recalled) = self.shared.store.recall(&self.place.1) {
            match self.attempt(jobs, &recalled, true).await {
                Ok(()) => return,
                Err((remaining, newer)) => {
                    // An outdated recalled text does not count as a lost race.
                    for job in &remaining {
                        job.ticket.take_back();
                    }
                    (jobs, newest) = (self.in_time(remaining), newer);
                }
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
            let now = self.shared.now(&loaded);
            match self.attempt(self.in_time(jobs), &loaded, false).await {
                Ok(()) => return,
                Err((lost, newer)) => (jobs, newest) = (lost, newer),
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

    /// Executes the jobs on the loaded state, and stores the result. After a lost race, returns the
    /// jobs that have to be executed again, and the newer state if the store returned it.
    ///
    /// A recalled state may be outdated, so no job is answered before a swap has confirmed it. If
    /// the jobs change nothing, there is no swap, and all of them have to be executed again on a
    /// loaded state.
    #[allow(clippy::type_complexity, reason = "private, with one caller")]
    async fn attempt(
        &mut self,
        jobs: Vec<Job>,
        loaded: &Loaded<S::Version>,
        is_recalled: bool,
    ) -> Result<(), (Vec<Job>, Option<Loaded<S::Version>>)> {
        let view = self.shared.view(&self.place.1, loaded);
        let behind = view.behind;
        if !is_recalled {
            self.shared.skew.remember(&self.place.1, behind);
        }
        let mut batch = Batch::new(view);
        let mut pending: Vec<(Job, JobResult)> = Vec::with_capacity(jobs.len());
        for job in jobs.into_iter().filter(|job| job.ticket.begin()) {
            let answer = batch.execute(&job.policy, &job.command);
            if is_recalled || batch.is_changed() {
                pending.push((job, answer));
            } else {
                // This job and all jobs before it have changed nothing, so it needs no swap.
                Self::send_all([(job, answer)]);
            }
        }
        let Some((text, keep)) = batch.finish(self.shared.skew.max()) else {
            if is_recalled {
                return Err((pending.into_iter().map(|(job, _)| job).collect(), None));
            }
            Self::send_all(pending);
            return Ok(());
        };
        match self.swap(&pending, loaded, &text, keep).await {
            Ok(Swapped::Stored) => {
                if is_recalled {
                    self.shared.skew.remember(&self.place.1, behind);
                }
                Self::send_all(pending);
            }
            Ok(Swapped::Lost(newer)) => return Err((pending.into_iter().map(|(job, _)| job).collect(), newer)),
            Err(error) => Self::send_all(pending.into_iter().map(|(job, _)| (job, Err(error.clone())))),
        }
        Ok(())
    }

    async fn load(&mut self, jobs: &[Job]) -> Result<Loaded<S::Version>, StorageError> {
        let (shared, key) = (Arc::clone(&self.shared), Arc::clone(&self.place.1));
        let loaded = self
            .timed(jobs.iter(), |deadline| shared.store.load(&key, deadline))
            .await
            .ok_or_else(|| late(&shared.name, false))?
            .map_err(|error| StorageError::from_boxed(error).uncounted())?;
        self.set_contended(self.shared.now(&loaded));
        Ok(loaded)
    }

    async fn swap(
        &mut self,
        pending: &[(Job, JobResult)],
        loaded: &Loaded<S::Version>,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<S::Version>, StorageError> {
        if let Some(longest) = self.shared.store.longest().filter(|longest| text.len() > *longest) {
            return Err(too_long(text.len(), longest));
        }
        let (shared, key) = (Arc::clone(&self.shared), Arc::clone(&self.place.1));
        let swap = |deadline| shared.store.swap(&key, &loaded.version, text, keep, deadline);
        let jobs = pending.iter().map(|(job, _)| job);
        let begun = Instant::now();
        let swapped = self.timed(jobs, swap).await.ok_or_else(|| late(&shared.name, true))?;
        let swapped = swapped.map_err(StorageError::from_boxed);
        let is_cancelled = swapped.as_ref().is_err_and(|error| error.is_timeout() && !error.may_have_counted());
        self.blocked = if is_cancelled { begun.elapsed() } else { Duration::ZERO };
        let swapped = swapped?;
        self.set_contended(self.shared.now(loaded));
        Ok(swapped)
    }

    /// Records for each waiting job of the key that the current batch still delayed it at the time
    /// `at`.
    fn set_contended(&self, at: Timestamp) {
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

/// Returns the delay before the next attempt: exponential backoff with full jitter. The upper bound
/// is 200 microseconds at first, and doubles with each attempt up to 12.8 milliseconds.
pub(super) fn backoff(attempt: u32) -> Duration {
    random_up_to(Duration::from_micros(200 << attempt.min(6)))
}

fn too_long(bytes: usize, longest: usize) -> StorageError {
    let message = format!(
        "the state of the key has grown to {bytes} bytes, and the store keeps at most {longest}; use a different \
         name for each policy, implement Strategy::log_entries for strategies with a log, and use no moving window \
         for costs that are settled"
    );
    StorageError::new(StorageErrorKind::Unsupported, message)
}
