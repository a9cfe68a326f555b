//! Admission of a request: key, cost and decision.

#[cfg(feature = "lookup")]
use std::sync::LazyLock;

use tokio::time::Instant;

use crate::decision::Decision;
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{Found, LookupResult, Outcome, Tenant};
#[cfg(feature = "lookup")]
use crate::middleware::config::OnError;
use crate::middleware::exchange::{Exchange, Hold, ResponsePlan, Step};
use crate::middleware::post_response::{HeldHit, PostResponse, Settlement};
#[cfg(feature = "lookup")]
use crate::middleware::respond::unavailable;
use crate::middleware::state::LayerState;
use crate::observe::EventKind;
use crate::policy::{Op, Policy, SharedPolicy};
#[cfg(feature = "lookup")]
use crate::quota::Quota;
use crate::reservation::{Hits, ObservedAccount, Reservations, ShadowCheck, StartedLock};
use crate::storage::{Storage, StorageError, StorageRequest, Summary};
use crate::waiting::{Pause, Stage, Turn};

impl LayerState {
    /// Decides a request as far as possible without waiting.
    ///
    /// The key is borrowed from the extraction and cloned only if the request waits, because moving
    /// it costs more than building it in place.
    #[inline]
    pub(crate) fn admit(&self, exchange: &mut impl Exchange) -> Step {
        let plain = self.config.plain.as_ref().and_then(SharedPolicy::plain);
        let Some(policy) = plain else { return self.admit_by_options(exchange) };
        let extracted = self.config.key.extract(&exchange.head());
        let Ok(Some(key)) = &extracted else { return self.forward_or_reject(extracted, policy, exchange) };
        if self.lints.is_inspecting() {
            self.lints.inspect(&self.config, &self.storage, exchange, policy);
        }
        self.try_hit(StorageRequest::new(policy, key, Op::Hit, 1), exchange)
    }

    /// Like [`admit`](Self::admit), for a layer that is not plain (see `LayerConfig::plain`).
    #[inline(never)]
    fn admit_by_options(&self, exchange: &mut dyn Exchange) -> Step {
        let config = &self.config;
        if config.settling.as_ref().is_some_and(|settling| settling.is_later) {
            Reservations::begin(exchange.extensions_mut());
        }
        let head = exchange.head();
        if config.skips(&head) {
            return Step::Forward(ResponsePlan::NOTHING);
        }
        #[cfg(feature = "lookup")]
        if let Some(lookup) = config.policies.lookup() {
            return self.admit_by_lookup(lookup.find(&head), exchange);
        }
        let Some(policy) = config.policies.of(&head) else { return Step::Forward(ResponsePlan::NOTHING) };
        if config.policies.shared().is_some_and(SharedPolicy::take_changed) {
            self.lints.report_policy(&self.config, &self.storage, &policy);
        }
        self.admit_by_policy(&policy, None, exchange)
    }

    /// Decides a request under a policy. `key` replaces the key of the extractor if it is `Some`.
    #[inline]
    pub(super) fn admit_by_policy(&self, policy: &Policy, key: Option<&Key>, exchange: &mut dyn Exchange) -> Step {
        let (config, head) = (&self.config, exchange.head());
        let extracted;
        let key = if let Some(key) = key {
            key
        } else {
            extracted = config.key.extract(&head);
            let Ok(Some(key)) = &extracted else { return self.forward_or_reject(extracted, policy, exchange) };
            key
        };
        let cost = match config.cost.as_ref().map_or(Ok(1), |cost| cost(&head)) {
            Ok(cost) => cost,
            Err(missing) => return self.reject_without_key(&missing, policy, exchange),
        };
        if self.lints.is_inspecting() {
            self.lints.inspect(&self.config, &self.storage, exchange, policy);
        }
        // A request that costs nothing peeks, so that its header fields report the state of the
        // limits.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let storage_request = StorageRequest::new(policy, key, op, cost);
        if config.shadow {
            return Step::Forward(self.check_in_shadow(storage_request, exchange));
        }
        if let Some(turn) = self.wait_behind(storage_request) {
            return self.hold(Pause::Turn(turn), storage_request);
        }
        if op == Op::Peek || config.wants_decisions || policy.wants_decisions() {
            return self.decide(storage_request, exchange);
        }
        self.try_hit(storage_request, exchange)
    }

    /// The fast path, for layers that need no full decision to admit a request, but at most the
    /// numbers for `X-RateLimit-*`. Calls `decide` if the storage did not admit the hit and
    /// returned no refusal.
    #[inline(always)]
    fn try_hit(&self, storage_request: StorageRequest<'_>, exchange: &mut dyn Exchange) -> Step {
        let headers = self.config.headers;
        if !headers.writes_x_rate_limit() {
            if self.storage.try_admit(storage_request, None) {
                return Step::Forward(ResponsePlan::NOTHING);
            }
            return self.decide(storage_request, exchange);
        }
        let mut summary = Summary::default();
        if self.storage.try_admit(storage_request, Some(&mut summary)) {
            let numbers = headers.numbers(summary.at, &summary.limit, storage_request.cost);
            return Step::Forward(ResponsePlan::only(numbers));
        }
        match summary.refusal(&storage_request) {
            Some(refusal) => self.held(self.refuse_or_wait(&refusal, storage_request, exchange), storage_request),
            None => self.decide(storage_request, exchange),
        }
    }

    #[inline(never)]
    fn decide(&self, storage_request: StorageRequest<'_>, exchange: &mut dyn Exchange) -> Step {
        // Polls once here, because many storages need no round trip for a decision.
        let deciding = self.storage.decide(storage_request).polled_once();
        let Some(decided) = deciding.as_ready() else {
            return Step::Wait(Hold::Hit(self.held_hit(storage_request), Stage::Decision(deciding)));
        };
        self.held(self.apply(decided, storage_request, exchange), storage_request)
    }

    /// Returns the step of a request that may have to wait, and keeps its policy and key.
    fn held(&self, step: Step<Pause>, storage_request: StorageRequest<'_>) -> Step {
        match step {
            Step::Forward(plan) => Step::Forward(plan),
            Step::Respond => Step::Respond,
            Step::Wait(pause) => self.hold(pause, storage_request),
        }
    }

    fn hold(&self, pause: Pause, storage_request: StorageRequest<'_>) -> Step {
        let mut hit = self.held_hit(storage_request);
        let stage = hit.pause(pause);
        Step::Wait(Hold::Hit(hit, stage))
    }

    fn held_hit(&self, storage_request: StorageRequest<'_>) -> HeldHit {
        let StorageRequest { policy, key, cost, .. } = storage_request;
        HeldHit::new(self.account(policy, key, false), cost)
    }

    /// Lets a refused request wait for its turn if the layer has the option `wait`. Otherwise
    /// refuses it.
    #[inline(never)]
    fn refuse_or_wait(
        &self,
        decision: &Decision,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step<Pause> {
        let waiter = || self.waiter(storage_request);
        if let Some(turn) = self.room.as_ref().and_then(|room| room.turn(decision, storage_request.policy, waiter)) {
            return Step::Wait(Pause::Turn(turn));
        }
        self.refuse(decision, storage_request, exchange);
        Step::Respond
    }

    #[inline]
    fn wait_behind(&self, storage_request: StorageRequest<'_>) -> Option<Turn> {
        self.room.as_ref()?.turn_behind(|| self.waiter(storage_request))
    }

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
    ) -> Step<Pause> {
        let decision = match decided {
            Ok(decision) => decision,
            Err(error) => return self.on_storage_error(error, storage_request, exchange),
        };
        if decision.is_admitted() && !decision.is_at_once() {
            return Step::Wait(Pause::Delay(Box::new(decision.clone())));
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
    ) -> Step<Pause> {
        match decided {
            Ok(decision) if decision.is_admitted() => Step::Wait(Pause::Delay(Box::new(decision))),
            Ok(decision) => {
                self.refuse(&decision, storage_request, exchange);
                Step::Respond
            }
            Err(error) => self.on_storage_error(&error, storage_request, exchange),
        }
    }

    /// Returns the plan for the response of an admitted request. `now` is the decision that the
    /// header fields report: `decision` itself, or a peek after its delay. `since` is the time of the
    /// decision, if the request has waited since.
    #[inline]
    pub(crate) fn admitted_after(
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
            .and_then(|_| StartedLock::of(&self.account(policy, key, false), decision))
            .map(Box::new);
        if settling.is_none() && shadows.is_empty() && !headers.writes_other_fields() {
            return ResponsePlan::only(numbers);
        }
        let begin = |shadow| ShadowCheck::begin(self.account(shadow, key, true), cost);
        let account = || {
            let account = self.account(policy, key, false);
            ObservedAccount { since: since.unwrap_or(account.since), ..account }
        };
        let hits = Hits {
            spent: settling.filter(|_| cost > 0).map(|_| (account(), decision.clone())),
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
    pub(crate) fn admitted_after_wait(&self, hit: &mut HeldHit, exchange: &mut dyn Exchange) -> ResponsePlan {
        let decision = hit.delayed.take().expect("an admitted request has a decision");
        let now = if decision.is_at_once() { None } else { hit.peek_now() };
        let now = now.as_ref().unwrap_or(&decision);
        self.admitted_after(&decision, now, Some(hit.since()), hit.storage_request(), exchange)
    }

    /// Decides the request in shadow mode, in which every request is forwarded.
    #[cold]
    fn check_in_shadow(&self, storage_request: StorageRequest<'_>, exchange: &mut dyn Exchange) -> ResponsePlan {
        let (config, StorageRequest { policy, key, cost, .. }) = (&self.config, storage_request);
        let shadow_check = (cost > 0).then(|| ShadowCheck::begin(self.account(policy, key, true), cost));
        if let Some(decision) = shadow_check.as_ref().and_then(ShadowCheck::decision)
            && config.shares_decision
        {
            exchange.extensions_mut().insert(decision.clone());
        }
        let decided = shadow_check.as_ref().and_then(ShadowCheck::decision).cloned();
        let hits = Hits { spent: None, shadow_checks: shadow_check.into_iter().collect(), started_lock: None };
        let decide = || decided.unwrap_or_else(|| policy.unspent(cost));
        let settlement =
            Settlement::begin(config.settling.as_ref(), hits, storage_request, decide, exchange.extensions_mut());
        let after = PostResponse { headers: config.headers, other_fields: None, settlement };
        ResponsePlan { numbers: None, after: Some(Box::new(after)) }
    }
}

/// The placeholder policy in events about requests whose policy is unknown.
#[cfg(feature = "lookup")]
static UNKNOWN: LazyLock<Policy> = LazyLock::new(|| Policy::from(Quota::per_second(1)).with_name("unknown"));

/// Requests whose policy is looked up.
#[cfg(feature = "lookup")]
impl LayerState {
    #[inline(never)]
    pub(super) fn admit_by_lookup(&self, found: Found, exchange: &mut dyn Exchange) -> Step {
        match found {
            Found::Tenant(tenant) => self.admit_tenant(&tenant, exchange),
            Found::Missing(missing) => self.reject_without_key(&missing, &UNKNOWN, exchange),
            Found::Pending(finding) => Step::Wait(Hold::Lookup(finding)),
            Found::Failed(error) => self.admit_found(Err(error), exchange),
        }
    }

    /// Decides a request after its lookup.
    pub(crate) fn admit_found(&self, found: LookupResult, exchange: &mut dyn Exchange) -> Step {
        match found {
            Ok(tenant) => self.admit_tenant(&tenant, exchange),
            Err(error) => {
                let admitted = self.config.on_error == OnError::Admit || self.config.shadow;
                self.report(EventKind::Failed { error: &error, admitted }, &UNKNOWN, None);
                if admitted {
                    return Step::Forward(ResponsePlan::NOTHING);
                }
                unavailable(exchange)
            }
        }
    }

    fn admit_tenant(&self, tenant: &Tenant, exchange: &mut dyn Exchange) -> Step {
        if !tenant.extensions.is_empty() {
            exchange.extensions_mut().extend(tenant.extensions.clone());
        }
        match &tenant.outcome {
            Outcome::Limited(policy, key) => self.admit_by_policy(&policy.read(), key.as_ref(), exchange),
            Outcome::Unlimited => Step::Forward(ResponsePlan::NOTHING),
            Outcome::Rejected(error) => self.reject_without_key(error, &UNKNOWN, exchange),
        }
    }
}
