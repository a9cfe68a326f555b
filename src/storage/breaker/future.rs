//! The futures of a breaker.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::circuit::{Circuit, Permit};
use super::{Parts, fallback};
use crate::storage::{Storage, StorageError, StorageErrorKind, StorageRequest};
use crate::{BoxError, ConfigError, Decision, DecisionSource, Key, Op, Policy};

/// The future of a decision by a [`Breaker`](super::Breaker).
#[must_use = "futures do nothing unless they are polled"]
pub struct Deciding<P: Storage, F: Storage>(Stage<P, F>);

enum Stage<P: Storage, F: Storage> {
    Primary { answer: P::DecideFuture, permit: Permit, request: OwnedRequest, parts: Arc<Parts<P, F>> },
    Fallback { answer: F::DecideFuture, original: Policy, circuit: Circuit },
    Failed(StorageError),
    Done,
}

/// An owned copy of the request, to send it to the fallback if the primary fails.
struct OwnedRequest {
    policy: Policy,
    key: Key,
    op: Op,
    cost: u32,
}

impl<P: Storage, F: Storage> Deciding<P, F> {
    pub(super) fn new(parts: &Arc<Parts<P, F>>, request: StorageRequest<'_>) -> Self {
        let Some(permit) = parts.circuit.try_acquire(request.op != Op::Peek && request.cost > 0) else {
            return Self(Stage::fall_back(parts, request, None));
        };
        let answer = parts.primary.decide(request);
        let request = OwnedRequest {
            policy: request.policy.clone(),
            key: request.key.clone(),
            op: request.op,
            cost: request.cost,
        };
        Self(Stage::Primary { answer, permit, request, parts: Arc::clone(parts) })
    }
}

impl<P: Storage, F: Storage> Stage<P, F> {
    /// Sends the request to the fallback. If there is none, fails with `error`, the primary's
    /// error. If the primary was not called, `error` is `None`, and an error for the open circuit
    /// replaces it.
    fn fall_back(parts: &Parts<P, F>, request: StorageRequest<'_>, error: Option<StorageError>) -> Self {
        let circuit = &parts.circuit;
        let failed = |error| {
            circuit.counts().none();
            Self::Failed(error)
        };
        let Some(fallback) = &parts.fallback else {
            return failed(error.unwrap_or_else(|| circuit.open_error()));
        };
        match fallback.divide(request.policy) {
            Ok(divided) => {
                let answer = fallback.storage.decide(StorageRequest { policy: &divided, ..request });
                Self::Fallback { answer, original: request.policy.clone(), circuit: circuit.clone() }
            }
            Err(error) => failed(cannot_divide(error)),
        }
    }
}

impl<P: Storage, F: Storage> Future for Deciding<P, F> {
    type Output = Result<Decision, StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Stage::Primary { answer, .. } = &mut self.0 {
            let answer = ready!(Pin::new(answer).poll(cx));
            let Stage::Primary { permit, request, parts, .. } = mem::replace(&mut self.0, Stage::Done) else {
                unreachable!("the stage was checked above")
            };
            match answer {
                Ok(decision) => {
                    permit.decided(decision.is_admitted());
                    parts.circuit.counts().primary();
                    return Poll::Ready(Ok(decision.via(DecisionSource::Primary)));
                }
                Err(error) => {
                    let OwnedRequest { policy, key, op, cost } = &request;
                    // An unsupported policy is not a failure of the storage.
                    let error = StorageError::from_boxed(error);
                    if parts.primary.validate(policy).is_ok() {
                        permit.failed(&error);
                    } else {
                        drop(permit);
                    }
                    self.0 = Stage::fall_back(&parts, StorageRequest::new(policy, key, *op, *cost), Some(error));
                }
            }
        }
        if let Stage::Fallback { answer, .. } = &mut self.0 {
            let answer = ready!(Pin::new(answer).poll(cx));
            let Stage::Fallback { original, circuit, .. } = mem::replace(&mut self.0, Stage::Done) else {
                unreachable!("the stage was checked above")
            };
            return Poll::Ready(match answer {
                Ok(decision) => {
                    circuit.counts().fallback();
                    Ok(fallback::adjust_retry_after(&original, decision, circuit.until_probe())
                        .via(DecisionSource::Fallback))
                }
                Err(error) => {
                    circuit.counts().none();
                    Err(fallback_failed(error))
                }
            });
        }
        match mem::replace(&mut self.0, Stage::Done) {
            Stage::Failed(error) => Poll::Ready(Err(error)),
            _ => panic!("`Deciding` polled after completion"),
        }
    }
}

/// The future of a clear or settlement by a [`Breaker`](super::Breaker).
#[must_use = "futures do nothing unless they are polled"]
pub struct Changing<P: Storage, F: Storage> {
    primary: Option<(P::UpdateFuture, Permit)>,
    fallback: Option<F::UpdateFuture>,
    failed: Option<StorageError>,
}

impl<P: Storage, F: Storage> Changing<P, F> {
    /// Returns a future without changes, which is immediately ready.
    pub(super) fn empty() -> Self {
        Self { primary: None, fallback: None, failed: None }
    }

    /// Adds a change of the primary. If the circuit is open, the future fails instead.
    pub(super) fn primary(self, parts: &Parts<P, F>, change: impl FnOnce(&P) -> P::UpdateFuture) -> Self {
        match parts.circuit.try_acquire(true) {
            Some(permit) => Self { primary: Some((change(&parts.primary), permit)), ..self },
            None => self.or_failed(parts.circuit.open_error()),
        }
    }

    /// Adds a change of the fallback, if there is one, with the divided policy.
    pub(super) fn fallback(
        self,
        parts: &Parts<P, F>,
        policy: &Policy,
        change: impl FnOnce(&F, &Policy) -> F::UpdateFuture,
    ) -> Self {
        let Some(fallback) = &parts.fallback else { return self };
        match fallback.divide(policy) {
            Ok(divided) => Self { fallback: Some(change(&fallback.storage, &divided)), ..self },
            Err(error) => self.or_failed(cannot_divide(error)),
        }
    }

    fn or_failed(self, error: StorageError) -> Self {
        Self { failed: self.failed.or(Some(error)), ..self }
    }
}

impl<P: Storage, F: Storage> Future for Changing<P, F> {
    type Output = Result<(), StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some((update, _)) = &mut this.primary
            && let Poll::Ready(update) = Pin::new(update).poll(cx)
            && let Some((_, permit)) = this.primary.take()
        {
            match update {
                Ok(()) => permit.succeeded(),
                Err(error) => {
                    let error = StorageError::from_boxed(error);
                    permit.failed(&error);
                    this.failed.get_or_insert(error);
                }
            }
        }
        if let Some(update) = &mut this.fallback
            && let Poll::Ready(update) = Pin::new(update).poll(cx)
        {
            this.fallback = None;
            if let Err(error) = update {
                this.failed.get_or_insert_with(|| fallback_failed(error));
            }
        }
        if this.primary.is_some() || this.fallback.is_some() {
            return Poll::Pending;
        }
        Poll::Ready(this.failed.take().map_or(Ok(()), Err))
    }
}

fn fallback_failed(error: impl Into<BoxError>) -> StorageError {
    StorageError::from_boxed(error).context("rate limit storage and its fallback failed")
}

fn cannot_divide(error: ConfigError) -> StorageError {
    let message = "cannot divide the policy among the replicas for the fallback";
    StorageError::new(StorageErrorKind::Unsupported, message).with_source(error)
}

impl<P: Storage, F: Storage> fmt::Debug for Deciding<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Stage::Primary { .. } => "Deciding(Primary)",
            Stage::Fallback { .. } => "Deciding(Fallback)",
            Stage::Failed(_) => "Deciding(Failed)",
            Stage::Done => "Deciding(Done)",
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
