//! The shared state of a layer.

use std::ops::Deref;
use std::sync::Arc;

use tokio::time::Instant;

use super::config::LayerConfig;
use super::lints::Lints;
use crate::key::Key;
use crate::observe::{Event, EventKind};
use crate::policy::Policy;
use crate::reservation::{Account, ObservedAccount};
use crate::storage::{AnyStorage, StorageRequest};
use crate::waiting::{OnFailedRefund, Queues, Waiter, WaitingRoom};

/// The state that all services of a layer share.
pub(crate) struct Shared<R> {
    state: LayerState,
    pub(crate) rejection: Arc<R>,
}

/// The part of the state that does not depend on the type of the rejection.
pub(crate) struct LayerState {
    pub(crate) config: LayerConfig,
    pub(crate) storage: AnyStorage,
    pub(super) lints: Lints,
    /// The queues of the layer's limiters and of its waiting requests.
    pub(crate) queues: Arc<Queues>,
    /// `None` if the layer refuses without waiting.
    pub(super) room: Option<Arc<WaitingRoom>>,
}

impl<R> Shared<R> {
    pub(crate) fn new(config: LayerConfig, storage: AnyStorage, rejection: Arc<R>) -> Arc<Self> {
        let queues = Arc::<Queues>::default();
        let room = config.wait.map(|bounds| WaitingRoom::new(bounds, Arc::clone(&queues)));
        Arc::new(Self { state: LayerState { config, storage, lints: Lints::default(), queues, room }, rejection })
    }
}

impl<R> Deref for Shared<R> {
    type Target = LayerState;

    fn deref(&self) -> &LayerState {
        &self.state
    }
}

impl LayerState {
    pub(super) fn account(&self, policy: &Policy, key: &Key, shadow: bool) -> ObservedAccount {
        let account = Account { storage: self.storage.clone(), policy: policy.clone(), key: key.clone() };
        ObservedAccount { account, reporter: self.config.reporter.clone(), shadow, since: Instant::now() }
    }

    pub(super) fn waiter(&self, storage_request: StorageRequest<'_>) -> Waiter {
        let StorageRequest { policy, key, cost, .. } = storage_request;
        // A live policy may change while the request waits, so the waiter reads it at each attempt.
        // A policy that was chosen for this request is kept.
        let policy = self.config.policies.shared().cloned().unwrap_or_else(|| policy.clone().into());
        let on_failed_refund = Some(self.reports_failed_refunds());
        Waiter { storage: self.storage.clone(), policy, key: key.clone(), cost, delayed_until: None, on_failed_refund }
    }

    /// Returns a function that reports a failed refund. A hit is refunded if its client left while
    /// the hit was in flight.
    fn reports_failed_refunds(&self) -> OnFailedRefund {
        let reporter = self.config.reporter.clone();
        Arc::new(move |policy, key, decision, error| {
            let kind = EventKind::NotSettled { decision, actual: 0, error };
            reporter.report_in_drop(&Event { kind, policy, key: Some(key), shadow: false });
        })
    }

    /// Reports the lints that need no request.
    pub(crate) fn start(&self) {
        self.lints.start(&self.config, &self.storage);
    }

    #[inline]
    pub(super) fn report(&self, kind: EventKind<'_>, policy: &Policy, key: Option<&Key>) {
        self.config.reporter.report(&Event { kind, policy, key, shadow: self.config.shadow });
    }
}
