//! The state that all handles to a store share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::time::timeout;

use super::job::{Job, QueueKey};
use super::several::{KeySwap, SeveralKeys, SwappedAll};
use super::skew::{Skew, View};
use super::{CasStorage, Loaded, Swapped};
use crate::error::BoxError;
use crate::storage::contract::decides_one_key;
use crate::storage::queues::JobQueues;
use crate::storage::{Clock, StorageError, StorageErrorKind};
use crate::time::Timestamp;

/// Returns the deadline of the store for a call that begins now and times out after `timeout`. The
/// rest of the time is for the error of the store, which names its server.
pub(super) fn store_deadline(timeout: Duration) -> Instant {
    (tokio::time::Instant::now() + timeout * 15 / 16).into_std()
}

/// The store, the queues and the settings.
pub(super) struct CasShared<S: CasStorage> {
    pub(super) store: S,
    /// The same store, if it replaces several texts in one step.
    pub(super) several: Option<Arc<dyn SeveralKeys<S::Version>>>,
    /// The name of the store, for errors.
    pub(super) store_name: Arc<str>,
    pub(super) queues: JobQueues<QueueKey, Job>,
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

impl<S: CasStorage> CasShared<S> {
    pub(super) fn new(
        store: S,
        several: Option<Arc<dyn SeveralKeys<S::Version>>>,
        store_name: Arc<str>,
        time: TimeSource,
        skew: Skew,
    ) -> Self {
        Self { store, several, store_name, queues: JobQueues::default(), skew, time }
    }

    /// Returns a new handle to the same store, with empty queues. If `time` is `None`, keeps the
    /// source of the time.
    pub(super) fn with(&self, time: Option<TimeSource>, max_skew: Duration) -> Self {
        let (store_name, time) = (Arc::clone(&self.store_name), time.unwrap_or_else(|| self.time.clone()));
        Self::new(self.store.clone(), self.several.clone(), store_name, time, Skew::new(max_skew))
    }

    /// Returns a handle to another store with the same settings.
    #[cfg(any(
        feature = "etcd",
        feature = "postgres-rustls",
        feature = "memcached-rustls",
        all(feature = "memcached", feature = "testing")
    ))]
    pub(super) fn with_store(&self, store: S, several: Option<Arc<dyn SeveralKeys<S::Version>>>) -> Self {
        Self::new(store, several, Arc::clone(&self.store_name), self.time.clone(), Skew::new(self.skew.max()))
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
        let late = || format!("{} did not answer a check within the timeout", self.store_name);
        let checked = checked.map_err(|_| StorageError::new(StorageErrorKind::Timeout, late()).uncounted())?;
        checked.map_err(|error| StorageError::from_boxed(error).uncounted())
    }

    /// Loads the texts of the keys, in the same order.
    pub(super) async fn load_all(
        &self,
        keys: &[Arc<str>],
        deadline: Instant,
    ) -> Result<Vec<Loaded<S::Version>>, StorageError> {
        if let [key] = keys {
            return Ok(vec![self.store.load(key, deadline).await.map_err(StorageError::from_boxed)?]);
        }
        self.several()?.load_all(keys, deadline).await
    }

    /// Stores all changes, or none if the version of a text has changed.
    pub(super) async fn swap_all(
        &self,
        swaps: &[KeySwap<'_, S::Version>],
        deadline: Instant,
    ) -> Result<SwappedAll<S::Version>, StorageError> {
        let &[KeySwap { key, version, change: Some((text, keep)) }] = swaps else {
            return self.several()?.swap_all(swaps, deadline).await;
        };
        let swapped = self.store.swap(key, version, text, keep, deadline).await;
        Ok(match swapped.map_err(StorageError::from_boxed)? {
            Swapped::Stored => SwappedAll::Stored,
            Swapped::Lost(newer) => SwappedAll::Lost(newer.map(|newer| vec![newer])),
        })
    }

    fn several(&self) -> Result<&dyn SeveralKeys<S::Version>, StorageError> {
        self.several.as_deref().ok_or_else(|| StorageError::unsupported_policy(decides_one_key()))
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
