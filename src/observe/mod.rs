//! Reports events to observers, to the log and as metrics.

mod event;
#[cfg(feature = "metrics")]
mod metrics;
mod near_limit;
#[cfg(feature = "tracing")]
mod trace;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use self::event::{Event, EventKind};
#[cfg(feature = "metrics")]
pub use self::metrics::metrics_observer;
pub(crate) use self::near_limit::NearLimit;
use crate::lint::Lint;

type Observe = dyn Fn(&Event<'_>) + Send + Sync;
type OnLint = dyn Fn(Lint) + Send + Sync;

/// Writes events to the log (feature `tracing`) and reports them to the observer.
#[derive(Clone, Default)]
pub(crate) struct Reporter {
    pub(crate) observer: Option<Arc<Observe>>,
    pub(crate) on_lint: Option<Arc<OnLint>>,
    /// The share of a limit at which hits are reported a second time.
    pub(crate) near_limit: Option<NearLimit>,
    /// `true` if log events contain keys.
    pub(crate) logs_keys: bool,
    #[cfg(feature = "tracing")]
    log: Arc<trace::EventLog>,
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
        self.report_one(event);
        if let (Some(near_limit), EventKind::Decided(decision)) = (self.near_limit, event.kind) {
            for (limit, status) in near_limit.crossed(event.policy, decision) {
                self.report_one(&Event { kind: EventKind::NearLimit { limit, status }, ..*event });
            }
        }
    }

    #[inline]
    fn report_one(&self, event: &Event<'_>) {
        #[cfg(feature = "tracing")]
        self.log.event(event, self.logs_keys);
        if let Some(observer) = &self.observer {
            observer(event);
        }
    }

    /// Like [`report`](Self::report), for a decision that was made without the storage.
    pub(crate) fn report_without_storage(&self, event: &Event<'_>) {
        #[cfg(feature = "tracing")]
        self.log.event_without_storage(event, self.logs_keys);
        if let Some(observer) = &self.observer {
            observer(event);
        }
    }

    /// Like [`report`](Self::report), for code that may run in a destructor. While the thread
    /// unwinds, catches a panic of the observer or of the log. A panic that leaves a destructor
    /// then would abort the process.
    pub(crate) fn report_in_drop(&self, event: &Event<'_>) {
        if std::thread::panicking() {
            // The panic hook has reported the caught panic.
            drop(catch_unwind(AssertUnwindSafe(|| self.report(event))));
        } else {
            self.report(event);
        }
    }

    pub(crate) fn warn(&self, lint: Lint) {
        #[cfg(feature = "tracing")]
        trace::lint(lint);
        if let Some(on_lint) = &self.on_lint {
            on_lint(lint);
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
