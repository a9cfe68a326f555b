//! Something to look at when it misbehaves: what is decided, as events.

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

/// What happened: see [`Event`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// The storage decided. [`Decision::is_admitted`] and its siblings say what.
    Decided(&'a Decision),
    /// The storage failed.
    Failed {
        /// Why.
        error: &'a BoxError,
        /// Whether the request was passed on.
        admitted: bool,
    },
    /// There was no key, or no cost.
    KeyError(&'a KeyError),
    /// A hit, which was decided before, has been given back: its response is not charged, or its request was dropped while it
    /// waited for its turn.
    Refunded(&'a Decision),
    /// A hit was to be given back, and could not be.
    NotRefunded(&'a BoxError),
}

/// One thing that happened in a layer: by whose policy, and to whom.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Event<'a> {
    /// What happened.
    pub kind: EventKind<'a>,
    /// The policy that binds the request. Each [shadow limit](Policy#shadow-limits) is a policy of its own.
    pub policy: &'a Policy,
    /// Who asked; `None` when that is what is missing. It may be a secret, or personal: mind where it goes.
    pub key: Option<&'a Key>,
    /// Whether this is only tried out: whatever was decided, the request went on.
    pub shadow: bool,
}

impl Event<'_> {
    /// In one word: `admitted`, `delayed`, `refused`, [`storage_full`](Decision::is_storage_full),
    /// [`contended`](Decision::is_contended), `failed_open`, `failed_closed`, `missing`, `refunded` or `not_refunded`.
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
            EventKind::Refunded(_) => "refunded",
            EventKind::NotRefunded(_) => "not_refunded",
        }
    }
}

/// Is told what a layer does: see [`RateLimitLayer::observer`](crate::RateLimitLayer::observer).
///
/// It is called on the way of each request, so it had better be quick. Closures over the [`Event`] do.
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
    /// Something happened.
    fn observe(&self, event: &Event<'_>);

    /// Something about how the layer is set up is probably not meant so. Told once for each layer.
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

/// One for several layers, or one chosen while the program runs.
impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn observe(&self, event: &Event<'_>) {
        (**self).observe(event);
    }

    fn warn(&self, lint: Lint) {
        (**self).warn(lint);
    }
}

/// Passes events on to the log (feature `tracing`) and to the observer.
#[derive(Clone, Default)]
pub(crate) struct Reporter {
    pub(crate) observer: Option<Arc<dyn Observer>>,
    /// True if the log may name keys.
    pub(crate) logs_keys: bool,
    #[cfg(feature = "tracing")]
    log: Arc<trace::Log>,
}

impl Reporter {
    /// The same for another layer, which counts its own failures.
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
