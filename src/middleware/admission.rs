//! Admission of a request: key, cost, decision and response.

use http::{Request, Response};
use tokio::time::Instant;

use crate::decision::Decision;
use crate::extract::Head;
use crate::headers::Numbers;
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::Finding;
use crate::middleware::options::Settling;
use crate::middleware::post_response::{PostResponse, QueueSlot, Settlement};
use crate::middleware::state::LayerState;
use crate::middleware::waiting_room::{Deciding, Pause};
use crate::observe::{Event, EventKind};
use crate::policy::{Op, Policy, SharedPolicy};
use crate::rejection::Rejection;
use crate::reservation::{Account, Hits, ObservedAccount, ShadowCheck};
use crate::storage::{Storage, StorageError, StorageRequest, Summary};

/// The next step for a request.
pub(crate) enum Action<ResBody, W = Hold> {
    Forward(ResponsePlan),
    Respond(Response<ResBody>),
    Wait(W),
}

/// The reason for which a request waits.
#[cfg_attr(
    feature = "lookup",
    expect(clippy::large_enum_variant, reason = "boxing it would cost an allocation per waiting request")
)]
pub(crate) enum Hold {
    /// Waits for the storage, for the request's turn, or for the delay of the slot's decision.
    Queue(QueueSlot, Deciding),
    /// Waits for the look-up of the policy.
    #[cfg(feature = "lookup")]
    Lookup(Finding),
}

/// The work that is left for the response of an admitted request.
pub(crate) struct ResponsePlan {
    pub(crate) numbers: Option<Numbers>,
    pub(crate) after: Option<Box<PostResponse>>,
}

impl ResponsePlan {
    pub(crate) const NOTHING: Self = Self { numbers: None, after: None };

    /// Returns `true` if the response is forwarded unchanged.
    #[inline]
    pub(crate) fn is_nothing(&self) -> bool {
        self.numbers.is_none() && self.after.is_none()
    }

    #[inline]
    pub(crate) fn only(numbers: Option<Numbers>) -> Self {
        Self { numbers, after: None }
    }
}

impl<R> LayerState<R> {
    /// Decides a request as far as possible without waiting.
    ///
    /// The key is borrowed from the extraction and cloned only if the request waits, because moving
    /// it costs more than building it in place.
    #[inline]
    pub(crate) fn admit<B, ResBody>(&self, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let plain = self.config.plain.as_ref().and_then(SharedPolicy::plain);
        let Some(policy) = plain else { return self.admit_by_options(request) };
        let extracted = self.config.key.extract(&Head::of(request));
        let Ok(Some(key)) = &extracted else { return self.forward_or_reject(extracted, policy, request) };
        if self.lints.is_inspecting() {
            self.inspect(request, policy);
        }
        self.try_hit(StorageRequest::new(policy, key, Op::Hit, 1), request)
    }

    /// Like [`admit`](Self::admit), for a layer that is not plain (see `LayerConfig::plain`).
    #[inline(never)]
    fn admit_by_options<B, ResBody>(&self, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let (config, head) = (&self.config, Head::of(request));
        if config.skips(&head) {
            return Action::Forward(ResponsePlan::NOTHING);
        }
        #[cfg(feature = "lookup")]
        if let Some(lookup) = config.policies.lookup() {
            return self.admit_by_lookup(lookup.find(&head), request);
        }
        let Some(policy) = config.policies.of(&head) else { return Action::Forward(ResponsePlan::NOTHING) };
        if config.policies.shared().is_some_and(SharedPolicy::take_changed) {
            self.lint_policy(&policy);
        }
        self.admit_by_policy(&policy, None, request)
    }

    /// Decides a request under a policy. `key` replaces the key of the extractor if it is `Some`.
    #[inline]
    pub(super) fn admit_by_policy<B, ResBody>(
        &self,
        policy: &Policy,
        key: Option<&Key>,
        request: &mut Request<B>,
    ) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let (config, head) = (&self.config, Head::of(request));
        let extracted;
        let key = if let Some(key) = key {
            key
        } else {
            extracted = config.key.extract(&head);
            let Ok(Some(key)) = &extracted else { return self.forward_or_reject(extracted, policy, request) };
            key
        };
        let cost = match config.cost.as_ref().map_or(Ok(1), |cost| cost(&head)) {
            Ok(cost) => cost,
            Err(missing) => return self.reject_without_key(&missing, policy, &head),
        };
        if self.lints.is_inspecting() {
            self.inspect(request, policy);
        }
        // A request that costs nothing peeks, so that its header fields report the state of the
        // limits.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let storage_request = StorageRequest::new(policy, key, op, cost);
        if config.shadow {
            return Action::Forward(self.check_in_shadow(storage_request, request));
        }
        if let Some(turn) = self.wait_behind(storage_request) {
            return self.hold(None, Deciding::Turn(turn), storage_request);
        }
        if op == Op::Peek || config.wants_decisions || !policy.shadows().is_empty() {
            return self.decide(storage_request, request);
        }
        self.try_hit(storage_request, request)
    }

    /// The fast path, for layers that need no full decision to admit a request, but at most the
    /// numbers for `X-RateLimit-*`. Calls `decide` if the storage did not admit the hit and
    /// returned no refusal.
    #[inline(always)]
    fn try_hit<B, ResBody>(&self, storage_request: StorageRequest<'_>, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let headers = self.config.headers;
        if !headers.writes_x_rate_limit() {
            if self.storage.try_admit(storage_request, None) {
                return Action::Forward(ResponsePlan::NOTHING);
            }
            return self.decide(storage_request, request);
        }
        let mut summary = Summary::default();
        if self.storage.try_admit(storage_request, Some(&mut summary)) {
            let numbers = headers.numbers(summary.at, &summary.limit, storage_request.cost);
            return Action::Forward(ResponsePlan::only(numbers));
        }
        match summary.refusal(&storage_request) {
            Some(refusal) => match self.refuse_or_wait(&refusal, storage_request, request) {
                Ok(turn) => self.hold(None, Deciding::Turn(turn), storage_request),
                Err(response) => Action::Respond(response),
            },
            None => self.decide(storage_request, request),
        }
    }

    #[inline(never)]
    fn decide<B, ResBody>(&self, storage_request: StorageRequest<'_>, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        // Polls once here, because many storages need no round trip for a decision.
        let deciding = self.storage.decide(storage_request).polled_once();
        let Some(decided) = deciding.as_ready() else {
            return self.hold(None, Deciding::First(deciding), storage_request);
        };
        match self.apply(decided, storage_request, request) {
            Action::Forward(plan) => Action::Forward(plan),
            Action::Respond(response) => Action::Respond(response),
            Action::Wait(Pause::Delay(decision)) => {
                self.hold(Some(decision), Deciding::First(deciding), storage_request)
            }
            Action::Wait(Pause::Turn(turn)) => self.hold(None, Deciding::Turn(turn), storage_request),
        }
    }

    /// Applies the storage's decision to the request. If the request is refused, its response takes
    /// over the memory of the request's extensions, which are empty afterwards.
    ///
    /// The decision is borrowed, because it is large and most requests need no copy of it.
    #[inline]
    pub(crate) fn apply<B, ResBody>(
        &self,
        decided: Result<&Decision, &StorageError>,
        storage_request: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> Action<ResBody, Pause>
    where
        R: Rejection<ResBody>,
    {
        let decision = match decided {
            Ok(decision) => decision,
            Err(error) => return self.on_storage_error(error, storage_request, &Head::of(request)),
        };
        if decision.is_admitted() && !decision.is_at_once() {
            return Action::Wait(Pause::Delay(Box::new(decision.clone())));
        }
        if decision.is_refused() {
            return match self.refuse_or_wait(decision, storage_request, request) {
                Ok(turn) => Action::Wait(Pause::Turn(turn)),
                Err(response) => Action::Respond(response),
            };
        }
        self.report(EventKind::Decided(decision), storage_request.policy, Some(storage_request.key));
        Action::Forward(self.admitted_after(decision, decision, storage_request, request))
    }

    /// Returns the plan for the response of an admitted request. `now` is the decision that the
    /// header fields report: `decision` itself, or a peek after its delay.
    #[inline]
    pub(crate) fn admitted_after<B>(
        &self,
        decision: &Decision,
        now: &Decision,
        storage_request: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> ResponsePlan {
        let config = &self.config;
        if config.shares_decision {
            request.extensions_mut().insert(decision.clone());
        }
        let (headers, StorageRequest { policy, key, cost, .. }) = (config.headers, storage_request);
        let numbers = headers.numbers_of(now);
        let shadows = if cost == 0 { &[] } else { policy.shadows() };
        // A request that costs nothing has nothing to settle, but its handler may expect a
        // `Reservation`.
        let settling = config.settling.as_ref().filter(|settling| cost > 0 || matches!(settling, Settling::Later));
        if settling.is_none() && shadows.is_empty() && !headers.writes_other_fields() {
            return ResponsePlan::only(numbers);
        }
        let begin = |shadow| ShadowCheck::begin(self.account(shadow, key, true), cost);
        let hits = Hits {
            spent: settling.filter(|_| cost > 0).map(|_| (self.account(policy, key, false), decision.clone())),
            shadow_checks: shadows.iter().map(begin).collect(),
        };
        let after = PostResponse {
            headers,
            other_fields: headers.other_fields_of(now, policy, key),
            settlement: Settlement::begin(settling, hits, storage_request, || decision.clone(), request),
        };
        ResponsePlan { numbers, after: Some(Box::new(after)) }
    }

    /// Decides the request in shadow mode, in which every request is forwarded.
    #[cold]
    fn check_in_shadow<B>(&self, storage_request: StorageRequest<'_>, request: &mut Request<B>) -> ResponsePlan {
        let (config, StorageRequest { policy, key, cost, .. }) = (&self.config, storage_request);
        let shadow_check = (cost > 0).then(|| ShadowCheck::begin(self.account(policy, key, true), cost));
        if let Some(decision) = shadow_check.as_ref().and_then(ShadowCheck::decision)
            && config.shares_decision
        {
            request.extensions_mut().insert(decision.clone());
        }
        let decided = shadow_check.as_ref().and_then(ShadowCheck::decision).cloned();
        let hits = Hits { spent: None, shadow_checks: shadow_check.into_iter().collect() };
        let decide = || decided.unwrap_or_else(|| policy.unspent(cost));
        let settlement = Settlement::begin(config.settling.as_ref(), hits, storage_request, decide, request);
        let after = PostResponse { headers: config.headers, other_fields: None, settlement };
        ResponsePlan { numbers: None, after: Some(Box::new(after)) }
    }

    pub(super) fn account(&self, policy: &Policy, key: &Key, shadow: bool) -> ObservedAccount {
        let account = Account { storage: self.storage.clone(), policy: policy.clone(), key: key.clone() };
        ObservedAccount { account, reporter: self.config.reporter.clone(), shadow, since: Instant::now() }
    }

    #[inline]
    pub(super) fn report(&self, kind: EventKind<'_>, policy: &Policy, key: Option<&Key>) {
        self.config.reporter.report(&Event { kind, policy, key, shadow: self.config.shadow });
    }
}
