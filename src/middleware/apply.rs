//! The next step of a request after its decision: it is forwarded, waits, or gets its response.

use tokio::time::Instant;

use super::exchange::Exchange;
use super::post_response::{PostResponse, ResponsePlan};
use super::settlement::Settlement;
use super::state::LayerState;
use super::step::{Step, Wait};
use super::waiting_hits::DelayedHits;
use crate::decision::{Decision, shown_position};
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::reservation::{
    ObservedKey, RequestHits, Reservation, Reservations, ShadowCheck, SharedHits, SpentHit, StartedLock,
};
use crate::storage::{StorageError, StorageRequest};

impl LayerState {
    /// Applies the storage's decisions to the request, one for each of its keys. If the request is
    /// refused, its response takes over the memory of the request's extensions, which are empty
    /// afterwards.
    ///
    /// The decisions are borrowed, because they are large and most requests need no copy of them.
    #[inline]
    pub(crate) fn apply(
        &self,
        decided: Result<&[Decision], &StorageError>,
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> Step {
        let decisions = match decided {
            Ok(decisions) => decisions,
            Err(error) => return self.on_storage_error(error, requests, exchange),
        };
        if decisions.iter().any(Decision::is_refused) {
            return self.refuse_or_wait(decisions, requests, exchange);
        }
        if !decisions.iter().all(Decision::is_at_once) {
            return self.delay(requests, decisions.to_vec());
        }
        for (decision, request) in decisions.iter().zip(requests) {
            self.report(EventKind::Decided(decision), request.policy, Some(request.key));
        }
        Step::Forward(self.admitted_after(decisions, decisions, None, requests, exchange))
    }

    /// Applies the decision of a request that has waited for its turn. An admitted request waits
    /// for its delay, which may be zero, and for the inner service.
    pub(crate) fn apply_turn(
        &self,
        decided: Result<Decision, StorageError>,
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> Step {
        match decided {
            Ok(decision) if decision.is_admitted() => self.delay(requests, vec![decision]),
            Ok(decision) => {
                self.config.refuse(&[decision], requests, exchange);
                Step::Respond
            }
            Err(error) => self.on_storage_error(&error, requests, exchange),
        }
    }

    /// Returns the plan for the response of an admitted request. `shown` are the decisions that the
    /// header fields report: `decisions`, or peeks after their delay. `since` is the time of the
    /// decisions, if the request has waited since.
    #[inline]
    fn admitted_after(
        &self,
        decisions: &[Decision],
        shown: &[Decision],
        since: Option<Instant>,
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> ResponsePlan {
        let config = &self.config;
        if config.shares_decision {
            exchange.extensions_mut().insert(decisions[shown_position(decisions)].clone());
        }
        let headers = config.headers;
        let numbers = headers.numbers_of(shown, requests);
        let mut hits = RequestHits::NONE;
        // A request that costs nothing has nothing to settle.
        let settles = config.settling.is_some() && requests.iter().any(|request| request.cost > 0);
        for (decision, request) in decisions.iter().zip(requests) {
            let StorageRequest { policy, key, cost, .. } = *request;
            // Without a settlement, the lock is reported now.
            let started_lock =
                decision.new_lock().and_then(|_| StartedLock::of(&self.observed(policy, key, false), decision));
            if cost > 0 {
                let begin = |shadow| ShadowCheck::begin(self.observed(shadow, key, true), cost);
                hits.shadow_checks.extend(policy.shadows().iter().map(begin));
            }
            if settles {
                let observed = self.observed(policy, key, false);
                let observed = ObservedKey { since: since.unwrap_or(observed.since), ..observed };
                hits.spent.push(SpentHit { observed, decision: decision.clone(), started_lock });
            }
        }
        // The handler may expect a `Reservation` even if there is nothing to settle.
        let settling = config.settling.as_ref().filter(|settling| settles || settling.is_later);
        if settling.is_none() && hits.shadow_checks.is_empty() && !headers.writes_other_fields() {
            return ResponsePlan::only(numbers);
        }
        let decided = || (decisions[shown_position(decisions)].clone(), policies(shown_position(decisions), requests));
        let after = PostResponse {
            headers,
            other_fields: headers.other_fields_of(shown, requests),
            settlement: Settlement::begin(settling, hits, decided, exchange.extensions_mut()),
        };
        ResponsePlan { numbers, after: Some(Box::new(after)) }
    }

    /// Returns the plan for the response of a request that has waited and is admitted. Called when
    /// the service is ready, because dropping the hit with its decisions refunds it.
    pub(crate) fn admitted_after_wait(&self, delayed: &mut DelayedHits, exchange: &mut dyn Exchange) -> ResponsePlan {
        let decisions = delayed.take_decisions();
        let peeked = if decisions.iter().all(Decision::is_at_once) { None } else { delayed.peek_now() };
        let (shown, since) = (peeked.as_ref().unwrap_or(&decisions), Some(delayed.since()));
        delayed.hits.with_requests(|requests| self.admitted_after(&decisions, shown, since, requests, exchange))
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
        let hits = RequestHits { spent: Vec::new(), shadow_checks: shadow_check.into_iter().collect() };
        let decide = || (decided.unwrap_or_else(|| policy.unspent(cost)), vec![policy.clone()]);
        let settlement = Settlement::begin(config.settling.as_ref(), hits, decide, exchange.extensions_mut());
        let after = PostResponse { headers: config.headers, other_fields: None, settlement };
        ResponsePlan { numbers: None, after: Some(Box::new(after)) }
    }

    /// Lets a refused request wait for its turn if the layer has the option `wait`. Otherwise
    /// refuses it.
    #[inline(never)]
    pub(super) fn refuse_or_wait(
        &self,
        decisions: &[Decision],
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> Step {
        // A layer with several keys has no waiting requests.
        let (room, waiter) = (self.room.as_ref(), || self.waiter(requests[0]));
        if let Some(turn) = room.and_then(|room| room.wait_after(&decisions[0], requests[0], waiter)) {
            return Step::Wait(Wait::Turn(self.waiting_hits(requests), turn));
        }
        self.config.refuse(decisions, requests, exchange);
        Step::Respond
    }

    /// Handles a failure of the storage. A handler that settles the request gets a reservation that does
    /// nothing.
    #[cold]
    fn on_storage_error(
        &self,
        error: &StorageError,
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> Step {
        let step = self.config.on_failure(error, requests, exchange);
        if matches!(step, Step::Forward(_)) {
            self.reserve_nothing(policies(0, requests), requests[0].cost, exchange);
        }
        step
    }

    /// Passes a reservation that does nothing to the handler, if it expects one.
    pub(super) fn reserve_nothing(&self, policies: Vec<Policy>, cost: u32, exchange: &mut dyn Exchange) {
        if self.config.settling.as_ref().is_some_and(|settling| settling.is_later) {
            let decision = policies[0].unspent(cost);
            let hits = SharedHits::new(policies, RequestHits::NONE);
            Reservations::insert(Reservation::of_layer(decision, hits), exchange.extensions_mut());
        }
    }
}

/// Returns the policies of the requests, beginning with the one at `first`.
fn policies(first: usize, requests: &[StorageRequest<'_>]) -> Vec<Policy> {
    let mut policies: Vec<_> = requests.iter().map(|request| request.policy.clone()).collect();
    policies.swap(0, first);
    policies
}
