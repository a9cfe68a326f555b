//! Admission of a request: its policy, key and cost, and the call of the storage.

use std::slice;
#[cfg(feature = "lookup")]
use std::sync::LazyLock;

#[cfg(feature = "lookup")]
use super::config::OnError;
use super::exchange::Exchange;
#[cfg(feature = "lookup")]
use super::members::{AllTenants, look_up};
use super::members::{Applying, Undecided, applying};
use super::post_response::ResponsePlan;
#[cfg(feature = "lookup")]
use super::respond::unavailable;
use super::state::LayerState;
use super::step::{Step, Wait};
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{LookupError, LookupResult, Tenant, TenantLookup, TenantPolicy};
use crate::meter::Meter;
#[cfg(feature = "lookup")]
use crate::observe::EventKind;
use crate::policy::{Op, Policy, SharedPolicy};
#[cfg(feature = "lookup")]
use crate::quota::Quota;
use crate::reservation::Reservations;
use crate::storage::{Storage, StorageRequest, Summary};

impl LayerState {
    /// Decides a request as far as possible without waiting.
    ///
    /// The key is borrowed from the extraction and cloned only if the request waits, because moving
    /// it costs more than building it in place.
    #[inline]
    pub(crate) fn admit(&self, exchange: &mut impl Exchange) -> Step {
        let plain = self.config.plain.as_ref().and_then(SharedPolicy::plain);
        let Some(policy) = plain else { return self.admit_by_options(exchange) };
        let extracted = self.config.first.key.extract(&exchange.head());
        let Ok(Some(key)) = &extracted else { return self.config.forward_or_reject(extracted, policy, exchange) };
        if self.lints.is_inspecting() {
            self.lints.inspect(&self.config, Some(&self.storage), exchange, [(&self.config.first, policy)]);
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
        if config.meters {
            Meter::begin(exchange.extensions_mut());
        }
        let head = exchange.head();
        if config.skips(&head) {
            return Step::Forward(ResponsePlan::NOTHING);
        }
        if config.decides_all() {
            return self.admit_members(exchange);
        }
        let policies = &config.first.policies;
        #[cfg(feature = "lookup")]
        if let Some(tenants) = policies.lookup() {
            return match tenants.find(&head) {
                TenantLookup::Ready(found) => self.admit_found(slice::from_ref(&found), exchange),
                TenantLookup::Pending(lookup) => Step::Wait(Wait::Lookup(Box::pin(async { vec![lookup.await] }))),
            };
        }
        let Some(policy) = policies.of(&head) else { return Step::Forward(ResponsePlan::NOTHING) };
        if policies.shared().is_some_and(SharedPolicy::take_changed) {
            self.lints.report_policy(&self.config, Some(&self.storage), &self.config.first, &policy);
        }
        self.admit_by_policy(&policy, None, exchange)
    }

    /// Decides a request under a policy. `key` replaces the key of the extractor if it is `Some`.
    #[inline]
    fn admit_by_policy(&self, policy: &Policy, key: Option<&Key>, exchange: &mut dyn Exchange) -> Step {
        let (config, head) = (&self.config, exchange.head());
        let extracted;
        let key = if let Some(key) = key {
            key
        } else {
            extracted = config.first.key.extract(&head);
            let Ok(Some(key)) = &extracted else { return self.config.forward_or_reject(extracted, policy, exchange) };
            key
        };
        let cost = match config.cost_of(&head) {
            Ok(cost) => cost,
            Err(missing) => return self.config.reject_without_key(&missing, policy, exchange),
        };
        if self.lints.is_inspecting() {
            self.lints.inspect(&self.config, Some(&self.storage), exchange, [(&self.config.first, policy)]);
        }
        if config.meters {
            let member = (config.first.policy_of_later_hits(policy), key.clone());
            Meter::insert(self.metered(vec![member]), exchange.extensions_mut());
        }
        // A request that costs nothing peeks, so that its header fields report the state of the
        // limits.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let storage_request = StorageRequest::new(policy, key, op, cost);
        if config.shadow {
            return Step::Forward(self.check_in_shadow(storage_request, exchange));
        }
        let room = self.room.as_ref();
        if let Some(turn) = room.and_then(|room| room.wait_behind(storage_request, || self.waiter(storage_request))) {
            return Step::Wait(Wait::Turn(self.waiting_hits(slice::from_ref(&storage_request)), turn));
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
        if !storage_request.policy.suits_summary(storage_request.cost) {
            return self.decide(storage_request, exchange);
        }
        let mut summary = Summary::default();
        if self.storage.try_admit(storage_request, Some(&mut summary)) {
            return Step::Forward(ResponsePlan::only(headers.numbers(&summary, &storage_request)));
        }
        match summary.refusal(&storage_request) {
            Some(refusal) => {
                self.refuse_or_wait(slice::from_ref(&refusal), slice::from_ref(&storage_request), exchange)
            }
            None => self.decide(storage_request, exchange),
        }
    }

    #[inline(never)]
    fn decide(&self, storage_request: StorageRequest<'_>, exchange: &mut dyn Exchange) -> Step {
        // Polls once here, because many storages need no round trip for a decision.
        let deciding = self.storage.decide(storage_request).polled_once_in_runtime();
        let requests = slice::from_ref(&storage_request);
        let Some(decided) = deciding.as_ready() else {
            return Step::Wait(Wait::Decision(self.waiting_hits(requests), deciding));
        };
        self.apply(decided.map(slice::from_ref), requests, exchange)
    }

    /// Decides a request of a layer with several keys.
    #[inline(never)]
    fn admit_members(&self, exchange: &mut dyn Exchange) -> Step {
        for member in self.config.members() {
            if let Some(policy) = member.policies.shared().filter(|policy| policy.take_changed()) {
                self.lints.report_policy(&self.config, Some(&self.storage), member, &policy.read());
            }
        }
        #[cfg(feature = "lookup")]
        return match look_up(&self.config, &exchange.head()) {
            AllTenants::Ready(found) => self.admit_found(&found, exchange),
            AllTenants::Pending(lookups) => Step::Wait(Wait::Lookup(lookups)),
        };
        #[cfg(not(feature = "lookup"))]
        self.admit_applying(applying(&self.config, exchange), exchange)
    }

    fn admit_applying(&self, applying: Result<Vec<Applying<'_>>, Undecided>, exchange: &mut dyn Exchange) -> Step {
        let applying = match applying {
            Ok(applying) => applying,
            Err(Undecided::Key(missing, policy)) => return self.config.reject_without_key(&missing, &policy, exchange),
            #[cfg(feature = "lookup")]
            Err(Undecided::Rejected(error)) => return self.config.reject_without_key(&error, &UNKNOWN, exchange),
            #[cfg(feature = "lookup")]
            Err(Undecided::Lookup(error)) => return self.on_lookup_error(&error, exchange),
        };
        if applying.is_empty() {
            return Step::Forward(ResponsePlan::NOTHING);
        }
        if self.lints.is_inspecting() {
            let members = applying.iter().map(|applying| (applying.member, &applying.policy));
            self.lints.inspect(&self.config, Some(&self.storage), exchange, members);
        }
        let mut requests = Vec::with_capacity(applying.len());
        for member in &applying {
            match member.cost(&exchange.head()) {
                Ok(cost) => requests.push(member.request(cost)),
                Err(missing) => return self.config.reject_without_key(&missing, &member.policy, exchange),
            }
        }
        if self.config.meters {
            let members = applying.iter().map(Applying::of_later_hits).collect();
            Meter::insert(self.metered(members), exchange.extensions_mut());
        }
        let deciding = self.storage.decide_all(&requests).polled_once_in_runtime();
        let Some(decided) = deciding.as_ready() else {
            return Step::Wait(Wait::Decisions(self.waiting_hits(&requests), deciding));
        };
        self.apply(decided.map(Vec::as_slice), &requests, exchange)
    }
}

/// The placeholder policy in events about requests whose policy is unknown.
#[cfg(feature = "lookup")]
static UNKNOWN: LazyLock<Policy> = LazyLock::new(|| Policy::from(Quota::per_second(1)).with_name("unknown"));

/// Requests whose policy is looked up.
#[cfg(feature = "lookup")]
impl LayerState {
    /// Decides a request after its lookups.
    pub(crate) fn admit_found(&self, found: &[LookupResult], exchange: &mut dyn Exchange) -> Step {
        if self.config.decides_all() {
            return self.admit_applying(applying(&self.config, found, exchange), exchange);
        }
        match &found[0] {
            Ok(tenant) => self.admit_tenant(tenant, exchange),
            Err(error) => self.on_lookup_error(error, exchange),
        }
    }

    #[cold]
    fn on_lookup_error(&self, error: &LookupError, exchange: &mut dyn Exchange) -> Step {
        let admitted = self.config.on_error == OnError::Admit || self.config.shadow;
        self.report(EventKind::Failed { error, admitted }, &UNKNOWN, None);
        if admitted {
            self.reserve_nothing(vec![UNKNOWN.clone()], 1, exchange);
            return Step::Forward(ResponsePlan::NOTHING);
        }
        unavailable(exchange)
    }

    fn admit_tenant(&self, tenant: &Tenant, exchange: &mut dyn Exchange) -> Step {
        if !tenant.extensions.is_empty() {
            exchange.extensions_mut().extend(tenant.extensions.clone());
        }
        match &tenant.policy {
            TenantPolicy::Limited(policy, key) => self.admit_by_policy(&policy.read(), key.as_ref(), exchange),
            TenantPolicy::Unlimited => Step::Forward(ResponsePlan::NOTHING),
            TenantPolicy::Rejected(error) => self.config.reject_without_key(error, &UNKNOWN, exchange),
        }
    }
}
