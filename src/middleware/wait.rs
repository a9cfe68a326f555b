//! Requests that wait instead of being refused.

use std::sync::Arc;

use http::{Request, Response};
use tokio::time::Instant;

use super::admission::{Action, Hold};
use super::post_response::QueueSlot;
use super::state::LayerState;
use super::waiting_room::{Deciding, Pause, Seat, Turn, WaitingRoom};
use crate::decision::Decision;
use crate::extract::Head;
use crate::observe::{Event, EventKind};
use crate::rejection::Rejection;
use crate::storage::{StorageError, StorageRequest};
use crate::waiting::{OnFailedRefund, Place, Refusal, Waiter, later};

impl<R> LayerState<R> {
    /// Lets a refused request wait for its turn to ask the storage, if the layer has the option
    /// `wait`, the request can be admitted in time, and fewer than `max_waiting` requests wait.
    /// Otherwise returns the response to the [refused](Self::refuse) request as an error.
    #[inline(never)]
    pub(super) fn refuse_or_wait<B, ResBody>(
        &self,
        decision: &Decision,
        storage_request: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> Result<Turn, Response<ResBody>>
    where
        R: Rejection<ResBody>,
    {
        let turn = self.room.as_ref().and_then(|room| self.turn(room, decision, storage_request));
        turn.ok_or_else(|| self.refuse(decision, storage_request, request))
    }

    fn turn(&self, room: &Arc<WaitingRoom>, decision: &Decision, storage_request: StorageRequest<'_>) -> Option<Turn> {
        let deadline = later(Instant::now(), room.bounds.max_wait);
        let refusal = Refusal::new(decision.clone(), storage_request.policy.clone());
        let seat = refusal.ends_by(deadline).then(|| room.seat()).flatten()?;
        let waiter = self.waiter(storage_request);
        let place = Place::after(&refusal, &waiter.key, &room.queues);
        Some(wait(waiter, place, Some(refusal), deadline, seat))
    }

    /// Lets a new request wait behind others of its key, if it may be admitted in time and fewer
    /// than `max_waiting` requests wait. Otherwise returns `None`, and the caller makes the first
    /// hit of the request, which can overtake the others.
    #[inline]
    pub(super) fn wait_behind(&self, storage_request: StorageRequest<'_>) -> Option<Turn> {
        let room = self.room.as_ref().filter(|room| !room.queues.is_empty())?;
        let deadline = later(Instant::now(), room.bounds.max_wait);
        let (seat, waiter) = (room.seat()?, self.waiter(storage_request));
        let place = waiter.join_behind(&room.queues, deadline)?;
        Some(wait(waiter, place, None, deadline, seat))
    }

    fn waiter(&self, storage_request: StorageRequest<'_>) -> Waiter {
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

    /// Lets a request wait for its decision, or for the delay of its decision.
    pub(super) fn hold<ResBody>(
        &self,
        delayed: Option<Box<Decision>>,
        deciding: Deciding,
        storage_request: StorageRequest<'_>,
    ) -> Action<ResBody> {
        let StorageRequest { policy, key, cost, .. } = storage_request;
        let slot = QueueSlot::new(self.account(policy, key, false), cost, delayed);
        self.report_delayed(&slot);
        Action::Wait(Hold::Queue(slot, deciding))
    }

    /// Reports a delayed decision. The slot already has it, so if the observer panics, the drop of
    /// the slot refunds the hit.
    pub(crate) fn report_delayed(&self, slot: &QueueSlot) {
        if let Some(decision) = &slot.delayed {
            let storage_request = slot.storage_request();
            self.report(EventKind::Decided(decision), storage_request.policy, Some(storage_request.key));
        }
    }

    /// Applies the decision of a request that has waited for its turn. An admitted request waits
    /// for its delay, which may be zero, and for the inner service.
    pub(crate) fn apply_turn<B, ResBody>(
        &self,
        decided: Result<Decision, StorageError>,
        storage_request: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> Action<ResBody, Pause>
    where
        R: Rejection<ResBody>,
    {
        match decided {
            Ok(decision) if decision.is_admitted() => Action::Wait(Pause::Delay(Box::new(decision))),
            Ok(decision) => Action::Respond(self.refuse(&decision, storage_request, request)),
            Err(error) => self.on_storage_error(&error, storage_request, &Head::of(request)),
        }
    }
}

fn wait(waiter: Waiter, place: Place, refusal: Option<Refusal>, deadline: Instant, seat: Seat) -> Turn {
    Box::pin(async move {
        let _seat = seat;
        waiter.wait(place, refusal, deadline).await
    })
}
