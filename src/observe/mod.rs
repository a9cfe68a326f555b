//! Events for observers, logs and metrics.

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "tracing")]
mod throttle;
#[cfg(feature = "tracing")]
mod trace;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "metrics")]
pub use self::metrics::MetricsObserver;
use crate::extract::KeyError;
use crate::lint::Lint;
use crate::{BoxError, Decision, Key, Policy};

/// The kind of an [`Event`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// The storage decided a hit or a peek.
    Decided(&'a Decision),
    /// The storage, or the look-up of the policy, failed.
    Failed {
        /// The error of the storage or the look-up.
        error: &'a BoxError,
        /// `true` if the request was forwarded.
        admitted: bool,
    },
    /// The request has no key or no cost.
    KeyError(&'a KeyError),
    /// The cost of a hit was corrected: by its response, by a [`Charge`](crate::Charge), or because
    /// its request was dropped while it was delayed.
    Settled {
        /// The decision on the hit, with its estimated cost.
        decision: &'a Decision,
        /// The actual cost in units, which differs from the estimated one.
        actual: u32,
    },
    /// The storage failed to settle a hit, or has no tokio runtime to do so. The hit keeps its
    /// estimated cost, unless the storage settled the hit before it failed.
    NotSettled {
        /// The decision on the hit, with its estimated cost.
        decision: &'a Decision,
        /// The actual cost in units.
        actual: u32,
        /// The reason of the failure.
        error: &'a BoxError,
    },
    /// A [`Charge`](crate::Charge) was dropped and not settled. The hit keeps its estimated cost.
    Unsettled(&'a Decision),
}

/// An event in a layer, with its policy and key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Event<'a> {
    /// The kind of the event.
    pub kind: EventKind<'a>,
    /// The policy that decided. Each [shadow limit](Policy#shadow-limits) is reported as a policy
    /// of its own. If a `PolicyLookup` fails or rejects the request, this is a placeholder with the
    /// name `unknown`.
    pub policy: &'a Policy,
    /// The key, or `None` if it is missing. It may be a secret or personal data, so be careful
    /// where you write it.
    pub key: Option<&'a Key>,
    /// `true` in shadow mode: the decision was not enforced.
    pub shadow: bool,
}

impl Event<'_> {
    /// Returns the outcome as one word: `admitted`, `delayed`, `refused`,
    /// [`storage_full`](Decision::is_storage_full), [`contended`](Decision::is_contended),
    /// `failed_open`, `failed_closed`, `missing`, `refunded`, `charged`, `not_settled` or
    /// `unsettled`.
    pub fn outcome(&self) -> &'static str {
        match self.kind {
            EventKind::Decided(decision) if decision.is_storage_full() => "storage_full",
            EventKind::Decided(decision) if decision.is_contended() => "contended",
            EventKind::Decided(decision) if decision.is_refused() => "refused",
            EventKind::Decided(decision) if decision.is_at_once() => "admitted",
            EventKind::Decided(_) => "delayed",
            EventKind::Failed { admitted: true, .. } => "failed_open",
            EventKind::Failed { admitted: false, .. } => "failed_closed",
            EventKind::KeyError(_) => "missing",
            EventKind::Settled { decision, actual } if actual < decision.cost() => "refunded",
            EventKind::Settled { .. } => "charged",
            EventKind::NotSettled { .. } => "not_settled",
            EventKind::Unsettled(_) => "unsettled",
        }
    }

    /// Returns the difference between the estimated and the actual cost of a hit in units, or
    /// `None` if this event does not report a settlement. It is 0 for [`EventKind::Unsettled`].
    pub fn settled_units(&self) -> Option<u32> {
        match self.kind {
            EventKind::Settled { decision, actual } | EventKind::NotSettled { decision, actual, .. } => {
                Some(actual.abs_diff(decision.cost()))
            }
            EventKind::Unsettled(_) => Some(0),
            _ => None,
        }
    }
}

/// Receives the events of a layer. See
/// [`RateLimitLayer::observer`](crate::RateLimitLayer::observer).
///
/// Implemented by closures over the [`Event`]. The middleware calls the observer inline for each
/// request, so it must not block.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tower_ratelimit::{Event, PeerIp, Quota, RateLimitLayer};
///
/// let refused = Arc::new(AtomicU64::new(0));
/// let counter = Arc::clone(&refused);
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).observer(move |event: &Event<'_>| {
///     if event.outcome() == "refused" {
///         counter.fetch_add(1, Ordering::Relaxed);
///     }
/// });
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Receives an event.
    fn observe(&self, event: &Event<'_>);

    /// Receives a lint about the layer's configuration. Called once for each layer and lint. The
    /// default implementation does nothing.
    fn warn(&self, lint: Lint) {
        let _ = lint;
    }
}

impl<F> Observer for F
where
    F: Fn(&Event<'_>) + Send + Sync + 'static,
{
    fn observe(&self, event: &Event<'_>) {
        self(event);
    }
}

/// Shares one observer among several layers.
impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn observe(&self, event: &Event<'_>) {
        (**self).observe(event);
    }

    fn warn(&self, lint: Lint) {
        (**self).warn(lint);
    }
}

/// Writes events to the log (feature `tracing`) and passes them to the observer.
#[derive(Clone, Default)]
pub(crate) struct Reporter {
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// `true` if log events contain keys.
    pub(crate) logs_keys: bool,
    #[cfg(feature = "tracing")]
    log: Arc<trace::Log>,
}

impl Reporter {
    /// Returns a reporter for another layer, whose log lines are throttled separately.
    pub(crate) fn for_another_layer(self) -> Self {
        Self {
            #[cfg(feature = "tracing")]
            log: Arc::default(),
            ..self
        }
    }

    #[inline]
    pub(crate) fn report(&self, event: &Event<'_>) {
        #[cfg(feature = "tracing")]
        self.log.event(event, self.logs_keys);
        if let Some(observer) = &self.observer {
            observer.observe(event);
        }
    }

    pub(crate) fn warn(&self, lint: Lint) {
        #[cfg(feature = "tracing")]
        trace::lint(lint);
        if let Some(observer) = &self.observer {
            observer.warn(lint);
        }
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let observed = self.observer.is_some();
        f.debug_struct("Reporter")
            .field("observed", &observed)
            .field("logs_keys", &self.logs_keys)
            .finish_non_exhaustive()
    }
}
