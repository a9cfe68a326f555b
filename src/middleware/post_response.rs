//! Queueing, shadow limits and refunds.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::Response;

use crate::headers::{Numbers, OtherFields};
use crate::middleware::options::{ChargeFn, ResponseHead};
use crate::observe::{Event, EventKind, Reporter};
use crate::storage::StorageRequest;
use crate::{Decision, Headers, Key, Op, Policy, Storage, headers};

/// A policy and a key on a storage, with the observer to report to.
#[derive(Clone)]
pub(crate) struct ChargeContext<St> {
    pub(crate) storage: St,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
}

impl<St: Storage> ChargeContext<St> {
    pub(crate) fn storage_request(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    /// Refunds a hit. Returns `true` if the refund is complete, and `false` if it runs in a task of
    /// the tokio runtime or could not run.
    pub(crate) fn refund(&self, decision: &Decision) -> bool {
        let (context, refunded) = (self.clone(), decision.clone());
        let outcome = run_or_spawn(self.storage.settle(&self.policy, &self.key, decision, 0), move |done| match done {
            Ok(()) => context.report(EventKind::Refunded(&refunded)),
            Err(error) => context.report(EventKind::NotRefunded(&error.into())),
        });
        if outcome == RunOutcome::Dropped {
            self.report(EventKind::NotRefunded(&"the storage is asynchronous and there is no tokio runtime".into()));
        }
        outcome == RunOutcome::Finished
    }

    /// Peeks at the key. Returns `None` if the storage is not immediately ready or fails.
    pub(crate) fn peek_now(&self) -> Option<Decision> {
        match poll_once(&mut self.storage.decide(self.storage_request(Op::Peek, 1))) {
            Poll::Ready(decided) => decided.ok(),
            Poll::Pending => None,
        }
    }

    fn failed(&self, error: St::Error) {
        self.report(EventKind::Failed { error: &error.into(), admitted: true });
    }

    fn report(&self, kind: EventKind<'_>) {
        if std::thread::panicking() {
            // A second panic, in the observer, would abort the process.
            return;
        }
        let Self { policy, key, shadow, .. } = self;
        self.reporter.report(&Event { kind, policy, key: Some(key), shadow: *shadow });
    }
}

/// The work that is left when the response of an admitted request is ready.
pub(crate) struct PostResponse<St: Storage> {
    pub(crate) headers: Headers,
    pub(crate) other_fields: Option<OtherFields>,
    /// Decides by the response if the request stays charged.
    pub(crate) charge: Option<Arc<ChargeFn>>,
    /// The hit that `charge` can refund.
    pub(crate) spent: Option<(ChargeContext<St>, Decision)>,
    pub(crate) shadow_checks: Vec<ShadowCheck<St>>,
}

impl<St: Storage> PostResponse<St> {
    /// Polls the shadow checks.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        for shadow_check in &mut self.shadow_checks {
            shadow_check.poll(cx);
        }
    }

    /// Settles the hits of the request and writes the header fields of its response.
    pub(crate) fn settle<B>(self, response: &mut Response<B>, mut numbers: Option<Numbers>) {
        let Self { headers, mut other_fields, charge, spent, shadow_checks } = self;
        let charged = charge.is_none_or(|charge| charge(&ResponseHead::of(response)));
        for mut shadow_check in shadow_checks {
            shadow_check.settle(charged);
        }
        if let Some((context, decision)) = spent.filter(|_| !charged) {
            (numbers, other_fields) = (numbers.map(Numbers::without_wait), other_fields.map(OtherFields::without_wait));
            if context.refund(&decision)
                && (headers.writes_x_rate_limit() || headers.writes_other_fields())
                && let Some(now) = context.peek_now()
            {
                numbers = headers.numbers_of(&now);
                other_fields = headers.other_fields_of(&now, &context.policy, &context.key);
            }
        }
        headers::write_admitted(response, numbers, other_fields);
    }
}

/// A hit on shadow limits. It never delays or refuses the request.
pub(crate) struct ShadowCheck<St: Storage> {
    context: ChargeContext<St>,
    progress: Progress<St::DecideFuture>,
}

enum Progress<D> {
    Deciding(D),
    Admitted(Decision),
    Over,
}

impl<St: Storage> ShadowCheck<St> {
    pub(crate) fn begin(context: ChargeContext<St>, cost: u32) -> Self {
        let deciding = context.storage.decide(context.storage_request(Op::Hit, cost));
        let mut shadow_check = Self { context, progress: Progress::Deciding(deciding) };
        shadow_check.poll(&mut Context::from_waker(Waker::noop()));
        shadow_check
    }

    /// Returns the decision if the hit was admitted.
    pub(crate) fn decision(&self) -> Option<&Decision> {
        match &self.progress {
            Progress::Admitted(decision) => Some(decision),
            Progress::Deciding(_) | Progress::Over => None,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Progress::Deciding(deciding) = &mut self.progress
            && let Poll::Ready(decided) = Pin::new(deciding).poll(cx)
        {
            self.progress = match report_shadow(&self.context, decided) {
                Some(decision) => Progress::Admitted(decision),
                None => Progress::Over,
            };
        }
    }

    /// Ends the check, and refunds its hit if the request is not charged. An undecided check
    /// continues in a task.
    fn settle(&mut self, charged: bool) {
        match mem::replace(&mut self.progress, Progress::Over) {
            Progress::Admitted(decision) if !charged => {
                self.context.refund(&decision);
            }
            Progress::Deciding(deciding) => {
                let context = self.context.clone();
                run_or_spawn(deciding, move |decided| {
                    if let Some(decision) = report_shadow(&context, decided).filter(|_| !charged) {
                        context.refund(&decision);
                    }
                });
            }
            Progress::Admitted(_) | Progress::Over => {}
        }
    }
}

/// A request without a response stays charged.
impl<St: Storage> Drop for ShadowCheck<St> {
    fn drop(&mut self) {
        self.settle(true);
    }
}

/// A waiting request. Dropping it before the end of its delay refunds the hit, which frees its slot
/// in the queue of a leaky bucket.
pub(crate) struct QueueSlot<St: Storage> {
    context: ChargeContext<St>,
    cost: u32,
    /// The decision, while the request waits for its delay.
    pub(crate) delayed: Option<Box<Decision>>,
}

impl<St: Storage> QueueSlot<St> {
    pub(crate) fn new(context: ChargeContext<St>, cost: u32, delayed: Option<Box<Decision>>) -> Self {
        Self { context, cost, delayed }
    }

    pub(crate) fn storage_request(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.context.storage_request(op, self.cost)
    }

    /// Peeks at the key after the delay. Returns `None` if the storage is not immediately ready.
    pub(crate) fn peek_now(&self) -> Option<Decision> {
        self.context.peek_now()
    }
}

impl<St: Storage> Drop for QueueSlot<St> {
    fn drop(&mut self) {
        if let Some(decision) = self.delayed.take() {
            self.context.refund(&decision);
        }
    }
}

/// Reports the result of a shadow check. Returns the decision if the hit was admitted.
fn report_shadow<St: Storage>(context: &ChargeContext<St>, decided: Result<Decision, St::Error>) -> Option<Decision> {
    match decided {
        Ok(decision) => {
            context.report(EventKind::Decided(&decision));
            Some(decision).filter(Decision::is_admitted)
        }
        Err(error) => {
            context.failed(error);
            None
        }
    }
}

/// Polls without a waker, for futures that may be ready immediately.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The outcome of work that may be moved to a background task.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunOutcome {
    Finished,
    /// The work runs in a task of the tokio runtime.
    Spawned,
    /// The work was dropped because there is no tokio runtime.
    Dropped,
}

/// Runs the future and then `then`: immediately if the future is ready, else in a task of the tokio
/// runtime if there is one.
fn run_or_spawn<F>(mut future: F, then: impl FnOnce(F::Output) + Send + 'static) -> RunOutcome
where
    F: Future + Unpin + Send + 'static,
{
    if let Poll::Ready(output) = poll_once(&mut future) {
        then(output);
        return RunOutcome::Finished;
    }
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => {
            runtime.spawn(async move { then(future.await) });
            RunOutcome::Spawned
        }
        Err(_) => RunOutcome::Dropped,
    }
}
