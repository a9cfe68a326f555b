//! The state that all handles to a store share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::Loaded;
use super::job::{Job, JobKey};
use super::skew::{Skew, View};
use crate::error::BoxError;
use crate::storage::queues::JobQueues;
use crate::storage::{Clock, StorageError, StorageErrorKind};
use crate::time::Timestamp;

/// Returns the deadline of the store for a call that begins now and times out after `timeout`. The
/// rest of the time is for the error of the store, which names its server.
pub(super) fn store_deadline(timeout: Duration) -> Instant {
    (tokio::time::Instant::now() + timeout * 15 / 16).into_std()
}

/// The store, the queues and the settings.
pub(super) struct CasShared<S> {
    pub(super) store: S,
    /// The name of the store, for errors.
    pub(super) name: Arc<str>,
    pub(super) queues: JobQueues<JobKey, Job>,
    pub(super) skew: Skew,
    time: TimeSource,
}

/// The source of the time of decisions.
#[derive(Clone)]
pub(super) enum TimeSource {
    /// The store's time, or the wall clock if the store reports none.
    Store,
    /// The time of a clock that the caller has set.
    Clock(Arc<dyn Clock>),
}

impl<S> CasShared<S> {
    pub(super) fn new(store: S, name: Arc<str>, time: TimeSource, skew: Skew) -> Self {
        Self { store, name, queues: JobQueues::default(), skew, time }
    }

    /// Returns a new handle to the same store, with empty queues. If `time` is `None`, keeps the
    /// source of the time.
    pub(super) fn with(&self, time: Option<TimeSource>, max_skew: Duration) -> Self
    where
        S: Clone,
    {
        let (name, time) = (Arc::clone(&self.name), time.unwrap_or_else(|| self.time.clone()));
        Self::new(self.store.clone(), name, time, Skew::new(max_skew))
    }

    /// Returns a handle to another store with the same settings.
    #[cfg(any(feature = "etcd", feature = "postgres-rustls", all(feature = "memcached", feature = "testing")))]
    pub(super) fn with_store(&self, store: S) -> Self {
        Self::new(store, Arc::clone(&self.name), self.time.clone(), Skew::new(self.skew.max()))
    }

    /// Awaits a check of the store. It fails after `within`.
    pub(super) async fn check<F, E>(
        &self,
        within: Duration,
        check: impl FnOnce(Instant) -> F,
    ) -> Result<(), StorageError>
    where
        F: Future<Output = Result<(), E>>,
        E: Into<BoxError>,
    {
        Handle::try_current().map_err(|_| StorageError::no_runtime())?;
        let checked = timeout(within, check(store_deadline(within))).await;
        let late = || format!("{} did not answer a check within the timeout", self.name);
        let checked = checked.map_err(|_| StorageError::new(StorageErrorKind::Timeout, late()).uncounted())?;
        checked.map_err(|error| StorageError::from_boxed(error).uncounted())
    }

    /// Returns the states of `key`, and the instant of the decision.
    pub(super) fn view<'a, V>(&self, key: &str, loaded: &'a Loaded<V>) -> View<'a> {
        self.skew.view(key, &loaded.text, self.now(loaded))
    }

    /// Returns the node's time for a decision on `loaded`.
    pub(super) fn now<V>(&self, loaded: &Loaded<V>) -> Timestamp {
        match &self.time {
            TimeSource::Store => loaded.now.unwrap_or_else(Timestamp::wall_clock),
            TimeSource::Clock(clock) => clock.now(),
        }
    }
}
