//! Finds the lints of a layer and reports each once.

use std::any::Any;

use http::Request;

use super::state::LayerState;
use crate::extract::Head;
use crate::lint::Lint;
use crate::policy::{Limit, Policy};
use crate::storage::{Breaker, MemoryStorage, Storage, layers};
use crate::strategy::{ElasticWindow, Strategy};

/// One of this many inspected requests is marked, to detect a layer that requests pass twice. The
/// others are not marked, because a mark allocates.
const REQUESTS_PER_MARK: u32 = 64;

/// A layer reports a lint if fewer clients than this fill the storage by exhausting their quotas.
const FEW_CLIENTS: u64 = 10_000;

/// A day in microseconds.
const DAY: u64 = 86_400_000_000;

/// A request extension with the addresses of the layers that have marked the request.
#[derive(Clone, Default)]
struct PassedLayers(Vec<usize>);

impl<R> LayerState<R> {
    /// Reports the lints that need no request.
    pub(crate) fn start(&self) {
        if !self.lints.start() {
            return;
        }
        self.warn(self.config.lints(None));
        if let Some(policy) = self.config.policies.shared() {
            self.lint_policy(&policy.read());
        }
    }

    /// Reports the lints that need a request.
    #[cold]
    pub(super) fn inspect<B>(&self, request: &mut Request<B>, policy: &Policy) {
        let left = self.lints.count_inspected();
        self.warn(self.config.lints(Some(&Head::of(request))));
        if self.config.policies.shared().is_none() {
            self.lint_policy(policy);
        }
        let this_layer = std::ptr::from_ref(self).addr();
        if request.extensions().get().is_some_and(|PassedLayers(passed)| passed.contains(&this_layer)) {
            self.warn([Lint::SameLayerTwice]);
        } else if left.is_multiple_of(REQUESTS_PER_MARK) {
            request.extensions_mut().get_or_insert_with(PassedLayers::default).0.push(this_layer);
        }
    }

    fn warn(&self, lints: impl IntoIterator<Item = Lint>) {
        for lint in lints {
            if self.lints.is_first(lint) {
                self.config.reporter.warn(lint);
            }
        }
    }

    /// Reports the lints of a policy.
    pub(super) fn lint_policy(&self, policy: &Policy) {
        self.warn(self.policy_lints(policy));
    }

    fn policy_lints(&self, policy: &Policy) -> impl Iterator<Item = Lint> {
        let is_elastic = |limit: &Limit| limit.strategy().name() == ElasticWindow::new().name();
        let is_refunded = self.config.settling.is_some() && policy.limits().iter().any(is_elastic);
        let clients = clients_to_fill(&self.storage, policy).filter(|clients| *clients < FEW_CLIENTS);
        let is_aligned = policy.limits().iter().any(is_aligned_to_weeks_or_more);
        let elastic = is_refunded.then_some(Lint::ElasticWindowRefunded);
        let small = clients.map(|clients| Lint::SmallStorage { clients });
        elastic.into_iter().chain(small).chain(is_aligned.then_some(Lint::AlignedCalendar))
    }
}

/// Returns the number of clients that fill a memory storage in `storage` if all of them have
/// exhausted a limit of `policy`. Returns `None` if it contains no memory storage.
fn clients_to_fill(storage: &dyn Storage, policy: &Policy) -> Option<u64> {
    let clients = |layer: &dyn Storage| {
        let layer: &dyn Any = layer;
        if let Some(memory) = layer.downcast_ref::<MemoryStorage>() {
            return Some(memory.clients_to_fill(policy));
        }
        let (fallback, replicas) = layer.downcast_ref::<Breaker>()?.fallback_ref()?;
        clients_to_fill(fallback, &policy.divide(replicas).ok()?)
    };
    layers(storage).filter_map(clients).min()
}

fn is_aligned_to_weeks_or_more(limit: &Limit) -> bool {
    let is_aligned = matches!(limit.strategy().name(), "fixed-window-aligned" | "sliding-window-counter-aligned");
    is_aligned && [7, 30, 365].iter().any(|days| limit.quota().period_micros().is_multiple_of(days * DAY))
}
