//! The one retry loop: load, decide on all who wait, swap, and again if others were faster.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::batch::BatchQueue;
use super::error::CasError;
use super::job::{Answer, Job};
use super::queues::Place;
use super::shared::CasShared;
use super::{CasStorage, Loaded, Swapped, pause};
use crate::BoxError;

/// So many times in a row it is tried again without a pause.
const AT_ONCE: u32 = 4;

/// What is done for one key; should it be dropped half-way, or before it began, whoever waits is told.
pub(super) struct Worker<S: CasStorage> {
    shared: Arc<CasShared<S>>,
    place: Place,
    /// How long the store takes to answer: the longest of late, of which an old one is forgotten little by little.
    trip: Duration,
    over: bool,
}

impl<S: CasStorage> Drop for Worker<S> {
    fn drop(&mut self) {
        if !self.over {
            self.shared.busy.abandon(&self.place);
        }
    }
}

impl<S: CasStorage> Worker<S> {
    pub(super) fn new(shared: Arc<CasShared<S>>, place: Place) -> Self {
        Self { shared, place, trip: Duration::ZERO, over: false }
    }

    /// Does all jobs of the key until none is left.
    pub(super) async fn serve(mut self) {
        loop {
            let jobs = self.shared.busy.take(&self.place);
            if jobs.is_empty() {
                self.over = true;
                return;
            }
            self.settle(jobs).await;
        }
    }

    /// Does these jobs. Who comes later waits, as what was loaded may be older than what they know.
    async fn settle(&mut self, jobs: Vec<Job>) {
        let mut jobs = self.in_time(jobs);
        let mut known = None;
        for attempt in 0_u32.. {
            if jobs.is_empty() {
                return;
            }
            let loaded = match known.take() {
                Some(loaded) => loaded,
                None => match self.load(&jobs).await {
                    Ok(loaded) => loaded,
                    Err(error) => return Self::tell(jobs.into_iter().map(|job| (job, Err(error.clone())))),
                },
            };
            let now = self.shared.now(&loaded);
            match self.attempt(self.in_time(jobs), &loaded).await {
                Ok(()) => return,
                Err((lost, newer)) => (jobs, known) = (lost, newer),
            }
            for job in &mut jobs {
                job.has_lost(now);
            }
            // What the store has just said is the best there is to go on from; who is unlucky again and again gives way.
            if known.is_none() || attempt >= AT_ONCE {
                known = None;
                sleep(pause::before(attempt)).await;
            }
            jobs = self.in_time(jobs);
        }
    }

    /// Does the jobs on what was loaded, and stores that. What has lost is to be done again, on what stands there now.
    #[allow(clippy::type_complexity, reason = "nobody else sees it")]
    async fn attempt(
        &mut self,
        jobs: Vec<Job>,
        loaded: &Loaded<S::Version>,
    ) -> Result<(), (Vec<Job>, Option<Loaded<S::Version>>)> {
        let mut desk = BatchQueue::new(&loaded.text, self.shared.view(loaded));
        let mut pending: Vec<(Job, Answer)> = Vec::with_capacity(jobs.len());
        for job in jobs.into_iter().filter(Job::begins) {
            let answer = Ok(desk.work(&job.policy, &job.want));
            if desk.is_changed() {
                pending.push((job, answer));
            } else {
                // Nothing has been changed before it, so it needs no swap.
                Self::tell([(job, answer)]);
            }
        }
        let Some((text, keep)) = desk.finish(self.shared.skew.max()) else {
            Self::tell(pending);
            return Ok(());
        };
        match self.swap(&pending, loaded, &text, keep).await {
            Ok(Swapped::Stored) => Self::tell(pending),
            Ok(Swapped::Lost(newer)) => return Err((pending.into_iter().map(|(job, _)| job).collect(), newer)),
            Err(error) => Self::tell(pending.into_iter().map(|(job, _)| (job, Err(error.clone())))),
        }
        Ok(())
    }

    async fn load(&mut self, jobs: &[Job]) -> Result<Loaded<S::Version>, CasError> {
        let (shared, key) = (Arc::clone(&self.shared), Arc::clone(&self.place.1));
        let asked = shared.store.load(&key);
        let loaded = self.timed(jobs.iter(), asked).await.ok_or(CasError::late(false))?.map_err(CasError::loading)?;
        self.shared.busy.are_contended(&self.place, self.shared.now(&loaded));
        Ok(loaded)
    }

    async fn swap(
        &mut self,
        pending: &[(Job, Answer)],
        loaded: &Loaded<S::Version>,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<S::Version>, CasError> {
        if let Some(longest) = self.shared.store.longest().filter(|longest| text.len() > *longest) {
            return Err(CasError::overgrown(text.len(), longest));
        }
        let (shared, key) = (Arc::clone(&self.shared), Arc::clone(&self.place.1));
        let asked = shared.store.swap(&key, &loaded.version, text, keep);
        let jobs = pending.iter().map(|(job, _)| job);
        let swapped = self.timed(jobs, asked).await.ok_or(CasError::late(true))?.map_err(CasError::swapping)?;
        self.shared.busy.are_contended(&self.place, self.shared.now(loaded));
        Ok(swapped)
    }

    /// What the store answers, for as long as any of the callers would wait who asks now: a store may need all of that to
    /// notice that nobody is there.
    async fn timed<T, E: Into<BoxError>>(
        &mut self,
        jobs: impl Iterator<Item = &Job>,
        asked: impl Future<Output = Result<T, E>>,
    ) -> Option<Result<T, E>> {
        let (started, patience) = (Instant::now(), jobs.map(|job| job.patience).max().unwrap_or_default());
        let answer = timeout(patience, asked).await.ok()?;
        self.trip = started.elapsed().max(self.trip * 7 / 8);
        Some(answer)
    }

    /// The jobs that can still be done in time.
    fn in_time(&self, jobs: Vec<Job>) -> Vec<Job> {
        jobs.into_iter().filter_map(|job| job.goes_on(self.trip)).collect()
    }

    fn tell(answers: impl IntoIterator<Item = (Job, Answer)>) {
        for (job, answer) in answers {
            job.answer(answer);
        }
    }
}
