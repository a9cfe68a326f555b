//! Finds the lints of a layer and reports each once.
//!
//! A lint costs one atomic load. Only the first 1,024 requests of a layer are examined, and one in
//! 64 of them gets a mark, which allocates, to find a layer that it passes twice.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::config::{LayerConfig, LayerMember};
use super::exchange::Exchange;
use crate::lint::Lint;
use crate::policy::{Limit, Policy};
use crate::quota::{MONTH, WEEK, YEAR};
use crate::storage::{AnyStorage, Breaker, MemoryStorage, Storage, layers};
use crate::strategy::{ElasticWindow, Strategy};

/// One of this many inspected requests is marked, to detect a layer that requests pass twice. The
/// others are not marked, because a mark allocates.
const REQUESTS_PER_MARK: u32 = 64;

/// A layer reports a lint if fewer clients than this fill the storage by exhausting their quotas.
const FEW_CLIENTS: u64 = 10_000;

/// A request extension with the addresses of the layers that have marked the request.
#[derive(Clone, Default)]
struct PassedLayers(Vec<usize>);

/// The number of requests that are inspected after the start.
const INSPECTED_REQUESTS: u32 = 1_024;

/// The lints that a layer has reported, and the number of requests that it still inspects.
#[derive(Debug)]
pub(crate) struct Lints {
    started: AtomicBool,
    left: AtomicU32,
    reported: AtomicU32,
}

impl Default for Lints {
    fn default() -> Self {
        Self { started: AtomicBool::new(false), left: AtomicU32::new(INSPECTED_REQUESTS), reported: AtomicU32::new(0) }
    }
}

impl Lints {
    /// Reports the lints that need no request. `storage` is the one that keeps the states, if there is
    /// one.
    pub(crate) fn start(&self, config: &LayerConfig, storage: Option<&AnyStorage>) {
        if self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        self.warn(config, config.lints(None));
        for member in config.members() {
            if let Some(policy) = member.policies.shared() {
                self.report_policy(config, storage, member, &policy.read());
            }
        }
    }

    /// Reports the lints that need a request. `applying` are the members of the layer that apply to it, with
    /// their policies.
    #[cold]
    pub(crate) fn inspect<'a>(
        &self,
        config: &LayerConfig,
        storage: Option<&AnyStorage>,
        exchange: &mut dyn Exchange,
        applying: impl IntoIterator<Item = (&'a LayerMember, &'a Policy)>,
    ) {
        let left = self.count_inspected();
        self.warn(config, config.lints(Some(&exchange.head())));
        for (member, policy) in applying {
            if member.policies.shared().is_none() {
                self.report_policy(config, storage, member, policy);
            }
        }
        let (this_layer, extensions) = (std::ptr::from_ref(self).addr(), exchange.extensions_mut());
        if extensions.get().is_some_and(|PassedLayers(passed)| passed.contains(&this_layer)) {
            self.warn(config, [Lint::SameLayerTwice]);
        } else if left.is_multiple_of(REQUESTS_PER_MARK) {
            extensions.get_or_insert_with(PassedLayers::default).0.push(this_layer);
        }
    }

    /// Reports the lints of a policy of `member`.
    pub(super) fn report_policy(
        &self,
        config: &LayerConfig,
        storage: Option<&AnyStorage>,
        member: &LayerMember,
        policy: &Policy,
    ) {
        let is_elastic = |limit: &Limit| limit.strategy().name() == ElasticWindow::new().name();
        let is_refunded = config.settling.is_some() && policy.limits().iter().any(is_elastic);
        let clients =
            storage.and_then(|storage| clients_to_fill(storage, policy)).filter(|clients| *clients < FEW_CLIENTS);
        let is_aligned = policy.limits().iter().any(is_aligned_to_weeks_or_more);
        let is_chosen = policy.limits().iter().any(Limit::locks) && config.has_chosen_key(member);
        let lints = [
            is_refunded.then_some(Lint::ElasticWindowRefunded),
            clients.map(|clients| Lint::SmallStorage { clients }),
            is_aligned.then_some(Lint::AlignedCalendar),
            is_chosen.then_some(Lint::LockoutByHeader),
        ];
        self.warn(config, lints.into_iter().flatten());
    }

    /// Reports each of the lints that this layer has not reported yet.
    fn warn(&self, config: &LayerConfig, lints: impl IntoIterator<Item = Lint>) {
        for lint in lints {
            if self.reported.fetch_or(lint.bit(), Ordering::Relaxed) & lint.bit() == 0 {
                config.reporter.warn(lint);
            }
        }
    }

    /// Returns `true` if the next request is to be inspected.
    #[inline]
    pub(crate) fn is_inspecting(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// Counts an inspected request, and returns the number of requests that were left before it. If
    /// other threads have counted the last ones meanwhile, returns 1.
    fn count_inspected(&self) -> u32 {
        let count = |left: u32| left.checked_sub(1);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).unwrap_or(1)
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
    is_aligned && [WEEK, MONTH, YEAR].into_iter().any(|unit| limit.quota().period_micros().is_multiple_of(unit))
}
