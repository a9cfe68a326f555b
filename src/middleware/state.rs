//! The shared state of a layer.

use std::sync::Arc;

use tokio::time::Instant;

use super::common::Shared;
use super::config::{LayerConfig, OnError};
use super::lints::Lints;
use super::step::{Step, Wait};
use super::waiting_hits::{DelayedHits, WaitingHits};
use crate::decision::Decision;
use crate::key::Key;
use crate::meter::Metered;
use crate::observe::EventKind;
use crate::policy::{Policy, SharedPolicy};
use crate::reservation::{LimitedKey, ObservedKey};
use crate::storage::{AnyStorage, StorageRequest};
use crate::waiting::{WaitQueues, Waiter, WaitingRoom};

/// The state that all services of a layer share.
pub(crate) type SharedState<R> = Shared<LayerState, R>;

/// The part of the state that does not depend on the type of the rejection.
pub(crate) struct LayerState {
    pub(crate) config: LayerConfig,
    pub(crate) storage: AnyStorage,
    pub(super) lints: Lints,
    /// The queues of the layer's limiters and of its waiting requests.
    pub(crate) queues: Arc<WaitQueues>,
    /// `None` if the layer refuses without waiting.
    pub(super) room: Option<Arc<WaitingRoom>>,
}

impl LayerState {
    pub(crate) fn new(config: LayerConfig, storage: AnyStorage) -> Self {
        let queues = Arc::<WaitQueues>::default();
        let room = config.wait.map(|bounds| WaitingRoom::new(bounds, Arc::clone(&queues)));
        Self { config, storage, lints: Lints::default(), queues, room }
    }

    pub(super) fn observed(&self, policy: &Policy, key: &Key, shadow: bool) -> ObservedKey {
        let limited = LimitedKey { storage: self.storage.clone(), policy: policy.clone(), key: key.clone() };
        ObservedKey { limited, reporter: self.config.reporter.clone(), shadow, since: Instant::now() }
    }

    /// Returns the data of a meter. `members` are the policies and keys of the request.
    pub(super) fn metered(&self, members: Vec<(SharedPolicy, Key)>) -> Metered {
        let (storage, queues) = (self.storage.clone(), Arc::clone(&self.queues));
        let LayerConfig { shadow, on_error, .. } = self.config;
        let (reporter, fails_open) = (self.config.reporter.clone(), on_error == OnError::Admit);
        Metered { members, storage, queues, reporter, fails_open, shadow }
    }

    /// Returns the hits of a request that waits. They keep clones of the policies and keys.
    pub(super) fn waiting_hits(&self, requests: &[StorageRequest<'_>]) -> WaitingHits {
        WaitingHits::new(requests, |request| self.observed(request.policy, request.key, false))
    }

    /// Returns the step of a request that is admitted after the delay of the decisions.
    pub(super) fn delay(&self, requests: &[StorageRequest<'_>], decisions: Vec<Decision>) -> Step {
        Step::Wait(Wait::Delay(DelayedHits::new(self.waiting_hits(requests), decisions)))
    }

    pub(super) fn waiter(&self, storage_request: StorageRequest<'_>) -> Waiter {
        let StorageRequest { policy, key, cost, .. } = storage_request;
        let policy = self.config.first.policy_of_later_hits(policy);
        let (storage, reporter) = (self.storage.clone(), Some(self.config.reporter.clone()));
        Waiter { storage, policy, key: key.clone(), cost, delayed_until: None, reporter }
    }

    /// Reports the lints that need no request.
    pub(crate) fn start(&self) {
        self.lints.start(&self.config, Some(&self.storage));
    }

    #[inline]
    pub(super) fn report(&self, kind: EventKind<'_>, policy: &Policy, key: Option<&Key>) {
        self.config.report(kind, policy, key);
    }
}
