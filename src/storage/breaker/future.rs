//! Answers on their way, from one storage or from the other.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::circuit::{Circuit, Permit};
use super::error::BreakerError;
use super::{Parts, fallback};
use crate::storage::{Storage, StorageRequest};
use crate::{Decision, DecisionSource, Key, Op, Policy};

/// A decision of a [`Breaker`](super::Breaker) on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Deciding<P: Storage, F: Storage>(Stage<P, F>);

enum Stage<P: Storage, F: Storage> {
    Primary { answer: P::DecideFuture, permit: Permit, asked: Asked, parts: Arc<Parts<P, F>> },
    Fallback { answer: F::DecideFuture, whole: Policy, circuit: Circuit },
    Failed(BreakerError),
    Over,
}

/// What was asked, in case it has to be asked again.
struct Asked {
    policy: Policy,
    key: Key,
    op: Op,
    cost: u32,
}

impl<P: Storage, F: Storage> Deciding<P, F> {
    pub(super) fn new(parts: &Arc<Parts<P, F>>, ask: StorageRequest<'_>) -> Self {
        let Some(permit) = parts.circuit.ask(ask.op == Op::Hit && ask.cost > 0) else {
            return Self(Stage::stand_in(parts, ask, None));
        };
        let answer = parts.primary.decide(ask);
        let asked = Asked { policy: ask.policy.clone(), key: ask.key.clone(), op: ask.op, cost: ask.cost };
        Self(Stage::Primary { answer, permit, asked, parts: Arc::clone(parts) })
    }
}

impl<P: Storage, F: Storage> Stage<P, F> {
    /// What the fallback says, if there is one. Without `error` the primary was not asked.
    fn stand_in(parts: &Parts<P, F>, ask: StorageRequest<'_>, error: Option<BreakerError>) -> Self {
        let circuit = &parts.circuit;
        let failed = |error| {
            circuit.counts().none();
            Self::Failed(error)
        };
        let Some(fallback) = &parts.fallback else {
            return failed(error.unwrap_or_else(|| BreakerError::left_alone(circuit.last_error())));
        };
        match fallback.divide(ask.policy) {
            Ok(share) => {
                let answer = fallback.storage.decide(StorageRequest { policy: &share, ..ask });
                Self::Fallback { answer, whole: ask.policy.clone(), circuit: circuit.clone() }
            }
            Err(error) => failed(BreakerError::divide(error)),
        }
    }
}

impl<P: Storage, F: Storage> Future for Deciding<P, F> {
    type Output = Result<Decision, BreakerError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Stage::Primary { answer, .. } = &mut self.0 {
            let answer = ready!(Pin::new(answer).poll(cx));
            let Stage::Primary { permit, asked, parts, .. } = mem::replace(&mut self.0, Stage::Over) else {
                unreachable!("it was just that")
            };
            match answer {
                Ok(decision) => {
                    permit.decided(decision.is_admitted());
                    parts.circuit.counts().primary();
                    return Poll::Ready(Ok(decision.via(DecisionSource::Primary)));
                }
                Err(error) => {
                    let Asked { policy, key, op, cost } = &asked;
                    // What it could never keep says nothing of how it is.
                    let mut error = error.into().into();
                    if parts.primary.validate(policy).is_ok() {
                        error = permit.failed(error);
                    } else {
                        drop(permit);
                    }
                    let error = BreakerError::primary(error);
                    self.0 = Stage::stand_in(&parts, StorageRequest::new(policy, key, *op, *cost), Some(error));
                }
            }
        }
        if let Stage::Fallback { answer, .. } = &mut self.0 {
            let answer = ready!(Pin::new(answer).poll(cx));
            let Stage::Fallback { whole, circuit, .. } = mem::replace(&mut self.0, Stage::Over) else {
                unreachable!("it was just that")
            };
            return Poll::Ready(match answer {
                Ok(decision) => {
                    circuit.counts().fallback();
                    Ok(fallback::told(&whole, decision, circuit.wait()).via(DecisionSource::Fallback))
                }
                Err(error) => {
                    circuit.counts().none();
                    Err(BreakerError::fallback(error))
                }
            });
        }
        match mem::replace(&mut self.0, Stage::Over) {
            Stage::Failed(error) => Poll::Ready(Err(error)),
            _ => panic!("a decision was polled after it had been told"),
        }
    }
}

/// A change by a [`Breaker`](super::Breaker) on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Changing<P: Storage, F: Storage> {
    primary: Option<(P::UpdateFuture, Permit)>,
    fallback: Option<F::UpdateFuture>,
    failed: Option<BreakerError>,
}

impl<P: Storage, F: Storage> Changing<P, F> {
    /// There is nothing to change.
    pub(super) fn nothing() -> Self {
        Self { primary: None, fallback: None, failed: None }
    }

    /// In the primary, which is not asked while it is left alone.
    pub(super) fn primary(self, parts: &Parts<P, F>, change: impl FnOnce(&P) -> P::UpdateFuture) -> Self {
        match parts.circuit.ask(true) {
            Some(permit) => Self { primary: Some((change(&parts.primary), permit)), ..self },
            None => self.or_failed(BreakerError::left_alone(parts.circuit.last_error())),
        }
    }

    /// In the fallback, if there is one, of the policy's share.
    pub(super) fn fallback(
        self,
        parts: &Parts<P, F>,
        policy: &Policy,
        change: impl FnOnce(&F, &Policy) -> F::UpdateFuture,
    ) -> Self {
        let Some(fallback) = &parts.fallback else { return self };
        match fallback.divide(policy) {
            Ok(share) => Self { fallback: Some(change(&fallback.storage, &share)), ..self },
            Err(error) => self.or_failed(BreakerError::divide(error)),
        }
    }

    fn or_failed(self, error: BreakerError) -> Self {
        Self { failed: self.failed.or(Some(error)), ..self }
    }
}

impl<P: Storage, F: Storage> Future for Changing<P, F> {
    type Output = Result<(), BreakerError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some((done, _)) = &mut this.primary
            && let Poll::Ready(done) = Pin::new(done).poll(cx)
            && let Some((_, permit)) = this.primary.take()
        {
            match done {
                Ok(()) => permit.succeeded(),
                Err(error) => {
                    let error = BreakerError::primary(permit.failed(error.into().into()));
                    this.failed.get_or_insert(error);
                }
            }
        }
        if let Some(done) = &mut this.fallback
            && let Poll::Ready(done) = Pin::new(done).poll(cx)
        {
            this.fallback = None;
            if let Err(error) = done {
                this.failed.get_or_insert(BreakerError::fallback(error));
            }
        }
        if this.primary.is_some() || this.fallback.is_some() {
            return Poll::Pending;
        }
        Poll::Ready(this.failed.take().map_or(Ok(()), Err))
    }
}

impl<P: Storage, F: Storage> fmt::Debug for Deciding<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Stage::Primary { .. } => "Deciding(Primary)",
            Stage::Fallback { .. } => "Deciding(Fallback)",
            Stage::Failed(_) => "Deciding(Failed)",
            Stage::Over => "Deciding(Over)",
        })
    }
}

impl<P: Storage, F: Storage> fmt::Debug for Changing<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changing")
            .field("primary", &self.primary.is_some())
            .field("fallback", &self.fallback.is_some())
            .finish_non_exhaustive()
    }
}
