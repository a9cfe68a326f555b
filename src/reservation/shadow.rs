//! Hits that are observed but not enforced: on shadow limits, and in layers in shadow mode.

use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::future::run_or_spawn;
use super::limited_key::ObservedKey;
use super::settle::{Correction, StartedLock};
use crate::decision::Decision;
use crate::observe::EventKind;
use crate::policy::Op;
use crate::storage::{StorageError, StorageFuture};

/// A hit on the policy of a shadow limit, or of a layer in shadow mode. It never delays or refuses
/// the request.
pub(crate) struct ShadowCheck {
    observed: ObservedKey,
    state: ShadowState,
}

enum ShadowState {
    Deciding(StorageFuture<Decision>),
    Admitted(Decision),
    Over,
}

impl ShadowCheck {
    /// Starts the hit, and polls it once.
    pub(crate) fn begin(observed: ObservedKey, cost: u32) -> Self {
        let deciding = observed.limited.decide(Op::Hit, cost).polled_once_in_runtime();
        let is_ready = deciding.as_ready().is_some();
        let mut shadow_check = Self { observed, state: ShadowState::Deciding(deciding) };
        if is_ready {
            shadow_check.poll(&mut Context::from_waker(Waker::noop()));
        }
        shadow_check
    }

    /// Returns the decision if the hit was admitted.
    pub(crate) fn decision(&self) -> Option<&Decision> {
        match &self.state {
            ShadowState::Admitted(decision) => Some(decision),
            ShadowState::Deciding(_) | ShadowState::Over => None,
        }
    }

    pub(super) fn is_undecided(&self) -> bool {
        matches!(self.state, ShadowState::Deciding(_))
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) {
        // The future is taken out. Otherwise `drop` would poll it again if the observer panics, and
        // a second panic aborts the process.
        match mem::replace(&mut self.state, ShadowState::Over) {
            ShadowState::Deciding(mut deciding) => match Pin::new(&mut deciding).poll(cx) {
                Poll::Pending => self.state = ShadowState::Deciding(deciding),
                Poll::Ready(decided) => {
                    if let Some(decision) = report(&self.observed, decided) {
                        self.state = ShadowState::Admitted(decision);
                    }
                }
            },
            other => self.state = other,
        }
    }

    /// Ends the check, and corrects its hit if there is a correction. An undecided check continues
    /// in a task.
    pub(super) fn settle(mut self, correction: Option<Correction>) {
        self.end(correction);
    }

    /// Ends the check, and reports that its hit keeps its estimated cost.
    pub(super) fn abandon(mut self) {
        if let ShadowState::Admitted(decision) = &self.state {
            self.observed.report(EventKind::Unsettled(decision));
        }
        self.end(None);
    }

    /// Decides the check, which must be undecided, in a task. If the hit is admitted, passes the
    /// check to `then`.
    pub(super) fn decide_in_task(mut self, then: impl FnOnce(Self) + Send + 'static) {
        let ShadowState::Deciding(deciding) = mem::replace(&mut self.state, ShadowState::Over) else { return };
        run_or_spawn(deciding, move |decided| {
            if let Some(decision) = report(&self.observed, decided) {
                self.state = ShadowState::Admitted(decision);
                then(self);
            }
        });
    }

    fn end(&mut self, correction: Option<Correction>) {
        match mem::replace(&mut self.state, ShadowState::Over) {
            ShadowState::Admitted(decision) => end(&self.observed, &decision, correction),
            ShadowState::Deciding(deciding) => {
                let observed = self.observed.clone();
                run_or_spawn(deciding, move |decided| {
                    if let Some(decision) = report(&observed, decided) {
                        end(&observed, &decision, correction);
                    }
                });
            }
            ShadowState::Over => {}
        }
    }
}

/// If the request ends without a response, an undecided hit continues in a task, so that it is
/// counted and reported. An admitted hit keeps its estimated cost.
impl Drop for ShadowCheck {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// Corrects an admitted hit if there is a correction, and reports the lock that the hit has
/// started.
fn end(observed: &ObservedKey, decision: &Decision, correction: Option<Correction>) {
    if let Some(lock) = StartedLock::of(observed, decision) {
        lock.report_unless_refunded(correction, decision.cost());
    }
    if let Some(correction) = correction {
        drop(observed.settle(decision, correction));
    }
}

/// Reports the result of a shadow check. Returns the decision if the hit was admitted.
fn report(observed: &ObservedKey, decided: Result<Decision, StorageError>) -> Option<Decision> {
    match decided {
        Ok(decision) => {
            observed.report(EventKind::Decided(&decision));
            if decision.is_admitted() {
                return Some(decision);
            }
            // The refusal may have started a lock, which is reported now.
            drop(StartedLock::of(observed, &decision));
            None
        }
        Err(error) => {
            observed.report(EventKind::Failed { error: &error, admitted: true });
            None
        }
    }
}
