//! The next step of a request after its decision: it is forwarded, waits, or gets its response.

use tokio::time::Instant;

use super::exchange::{Exchange, HitWait, ResponsePlan, Step, Wait, WaitingHit};
use super::post_response::{PostResponse, Settlement};
use super::state::LayerState;
use crate::decision::Decision;
use crate::observe::EventKind;
use crate::reservation::{ObservedKey, RequestHits, Reservation, Reservations, ReservedHits, ShadowCheck, StartedLock};
use crate::storage::{StorageError, StorageRequest};

impl LayerState {
    /// Applies the storage's decision to the request. If the request is refused, its response takes
    /// over the memory of the request's extensions, which are empty afterwards.
    ///
    /// The decision is borrowed, because it is large and most requests need no copy of it.
    #[inline]
    pub(crate) fn apply(
        &self,
        decided: Result<&Decision, &StorageError>,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step {
        let decision = match decided {
            Ok(decision) => decision,
            Err(error) => return self.on_storage_error(error, storage_request, exchange),
        };
        if decision.is_admitted() && !decision.is_at_once() {
            return self.delay(decision.clone(), storage_request);
        }
        if decision.is_refused() {
            return self.refuse_or_wait(decision, storage_request, exchange);
        }
        self.report(EventKind::Decided(decision), storage_request.policy, Some(storage_request.key));
        Step::Forward(self.admitted_after(decision, decision, None, storage_request, exchange))
    }

    /// Applies the decision of a request that has waited for its turn. An admitted request waits
    /// for its delay, which may be zero, and for the inner service.
    pub(crate) fn apply_turn(
        &self,
        decided: Result<Decision, StorageError>,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step {
        match decided {
            Ok(decision) if decision.is_admitted() => self.delay(decision, storage_request),
            Ok(decision) => {
                self.config.refuse(&decision, storage_request.policy, storage_request.key, exchange);
                Step::Respond
            }
            Err(error) => self.on_storage_error(&error, storage_request, exchange),
        }
    }

    fn delay(&self, decision: Decision, storage_request: StorageRequest<'_>) -> Step {
        let StorageRequest { policy, key, cost, .. } = storage_request;
        Step::Wait(Wait::Hit(WaitingHit::delayed(self.observed(policy, key, false), cost, decision)))
    }

    /// Returns the plan for the response of an admitted request. `now` is the decision that the
    /// header fields report: `decision` itself, or a peek after its delay. `since` is the time of
    /// the decision, if the request has waited since.
    #[inline]
    fn admitted_after(
        &self,
        decision: &Decision,
        now: &Decision,
        since: Option<Instant>,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> ResponsePlan {
        let config = &self.config;
        if config.shares_decision {
            exchange.extensions_mut().insert(decision.clone());
        }
        let (headers, StorageRequest { policy, key, cost, .. }) = (config.headers, storage_request);
        let numbers = headers.numbers_of(now);
        let shadows = if cost == 0 { &[] } else { policy.shadows() };
        // A request that costs nothing has nothing to settle, but its handler may expect a
        // `Reservation`.
        let settling = config.settling.as_ref().filter(|settling| cost > 0 || settling.is_later);
        let started_lock = decision
            .new_lock()
            .and_then(|_| StartedLock::of(&self.observed(policy, key, false), decision))
            .map(Box::new);
        if settling.is_none() && shadows.is_empty() && !headers.writes_other_fields() {
            return ResponsePlan::only(numbers);
        }
        let begin = |shadow| ShadowCheck::begin(self.observed(shadow, key, true), cost);
        let observed = || {
            let observed = self.observed(policy, key, false);
            ObservedKey { since: since.unwrap_or(observed.since), ..observed }
        };
        let hits = RequestHits {
            spent: settling.filter(|_| cost > 0).map(|_| (observed(), decision.clone())),
            shadow_checks: shadows.iter().map(begin).collect(),
            // Without a settlement, the lock is reported now.
            started_lock: started_lock.filter(|_| settling.is_some()),
        };
        let after = PostResponse {
            headers,
            other_fields: headers.other_fields_of(now, policy, key),
            settlement: Settlement::begin(
                settling,
                hits,
                storage_request,
                || decision.clone(),
                exchange.extensions_mut(),
            ),
        };
        ResponsePlan { numbers, after: Some(Box::new(after)) }
    }

    /// Returns the plan for the response of a request that has waited and is admitted. Called when
    /// the service is ready, because dropping the hit with its decision refunds it.
    pub(crate) fn admitted_after_wait(&self, hit: &mut WaitingHit, exchange: &mut dyn Exchange) -> ResponsePlan {
        let decision = hit.take_decision().expect("an admitted request has a decision");
        let now = if decision.is_at_once() { None } else { hit.observed.peek_now(hit.cost) };
        let now = now.as_ref().unwrap_or(&decision);
        self.admitted_after(&decision, now, Some(hit.observed.since), hit.storage_request(), exchange)
    }

    /// Decides the request in shadow mode, in which every request is forwarded.
    #[cold]
    pub(super) fn check_in_shadow(
        &self,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> ResponsePlan {
        let (config, StorageRequest { policy, key, cost, .. }) = (&self.config, storage_request);
        let shadow_check = (cost > 0).then(|| ShadowCheck::begin(self.observed(policy, key, true), cost));
        if let Some(decision) = shadow_check.as_ref().and_then(ShadowCheck::decision)
            && config.shares_decision
        {
            exchange.extensions_mut().insert(decision.clone());
        }
        let decided = shadow_check.as_ref().and_then(ShadowCheck::decision).cloned();
        let hits = RequestHits { spent: None, shadow_checks: shadow_check.into_iter().collect(), started_lock: None };
        let decide = || decided.unwrap_or_else(|| policy.unspent(cost));
        let settlement =
            Settlement::begin(config.settling.as_ref(), hits, storage_request, decide, exchange.extensions_mut());
        let after = PostResponse { headers: config.headers, other_fields: None, settlement };
        ResponsePlan { numbers: None, after: Some(Box::new(after)) }
    }

    /// Lets a refused request wait for its turn if the layer has the option `wait`. Otherwise
    /// refuses it.
    #[inline(never)]
    pub(super) fn refuse_or_wait(
        &self,
        decision: &Decision,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step {
        let (room, waiter) = (self.room.as_ref(), || self.waiter(storage_request));
        if let Some(turn) = room.and_then(|room| room.wait_after(decision, storage_request, waiter)) {
            return self.wait(storage_request, HitWait::Turn(turn));
        }
        self.config.refuse(decision, storage_request.policy, storage_request.key, exchange);
        Step::Respond
    }

    /// Handles a failure of the storage. A handler that settles the request gets a reservation that does
    /// nothing.
    #[cold]
    fn on_storage_error(
        &self,
        error: &StorageError,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step {
        let step = self.config.on_failure(error, storage_request, exchange);
        let is_settled_later = self.config.settling.as_ref().is_some_and(|settling| settling.is_later);
        if is_settled_later && matches!(step, Step::Forward(_)) {
            let StorageRequest { policy, cost, .. } = storage_request;
            let hits = ReservedHits::new(policy.clone(), cost, RequestHits::NONE);
            Reservations::insert(Reservation::of_layer(policy.unspent(cost), hits), exchange.extensions_mut());
        }
        step
    }
}
