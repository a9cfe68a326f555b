//! What becomes of a request.

use std::mem;
use std::sync::Arc;
use std::task::Poll;

use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Request, Response};

use crate::extract::{Head, KeyError};
use crate::headers::Numbers;
use crate::lint::{Lint, Lints};
use crate::middleware::config::{LayerConfig, OnError};
use crate::middleware::post_response::{ChargeContext, PostResponse, QueueSlot, ShadowCheck, poll_once};
use crate::observe::{Event, EventKind};
use crate::storage::{StorageRequest, Summary};
use crate::strategy::Strategy;
use crate::{
    BoxError, Decision, ElasticWindow, Key, Limit, LimitExceeded, Op, Policy, RejectReason, Rejection, Storage, headers,
};

fn is_elastic(limit: &Limit) -> bool {
    limit.strategy().name() == ElasticWindow::new().name()
}

/// What all services of a layer share.
pub(crate) struct LayerState<St, R> {
    pub(crate) rules: LayerConfig,
    pub(crate) storage: St,
    pub(crate) rejection: Arc<R>,
    pub(crate) lints: Lints,
}

/// A layer warns of a storage that fewer exhausted clients fill.
const FEW_CLIENTS: u64 = 10_000;

/// What is to be done with a request.
pub(crate) enum Action<St: Storage, ResBody> {
    Forward(ResponsePlan<St>),
    Respond(Response<ResBody>),
    /// For the storage, or for its turn.
    Wait(QueueSlot<St>, St::DecideFuture),
}

/// What a decision means for a request.
pub(crate) enum AdmissionResult<St: Storage, ResBody> {
    Admitted(ResponsePlan<St>),
    /// It has not been reported yet.
    Delayed(Box<Decision>),
    Refused(Response<ResBody>),
}

/// What an admitted request's response is told, and what else is done then.
pub(crate) struct ResponsePlan<St: Storage> {
    pub(crate) numbers: Option<Numbers>,
    pub(crate) after: Option<Box<PostResponse<St>>>,
}

impl<St: Storage> ResponsePlan<St> {
    pub(crate) const NOTHING: Self = Self { numbers: None, after: None };

    #[inline]
    pub(crate) fn only(numbers: Option<Numbers>) -> Self {
        Self { numbers, after: None }
    }
}

impl<St, R> LayerState<St, R> {
    pub(crate) fn new(rules: LayerConfig, storage: St, rejection: Arc<R>) -> Arc<Self> {
        Arc::new(Self { rules, storage, rejection, lints: Lints::default() })
    }
}

impl<St: Storage, R> LayerState<St, R> {
    /// Reports the lints that can be known before the first request.
    pub(crate) fn start(&self) {
        self.lints.at_start(|| self.rules.caveats(), |lint| self.rules.reporter.warn(lint));
        if let Some(policy) = self.rules.policies.only() {
            self.lint_policy(policy);
        }
    }

    /// Reports the lints that the first requests show.
    #[cold]
    pub(crate) fn look_at<B>(&self, request: &mut Request<B>, policy: &Policy) {
        let rules = &self.rules;
        self.lints.look(request, &*rules.key, || rules.caveats(), |lint| rules.reporter.warn(lint));
        self.lint_policy(policy);
    }

    fn lint_policy(&self, policy: &Policy) {
        if self.rules.charge.is_some() && policy.limits().iter().any(is_elastic) {
            self.lints.report_once(Lint::ElasticWindowRefunded, |lint| self.rules.reporter.warn(lint));
        }
        if let Some(clients) = self.storage.clients_to_fill(policy).filter(|clients| *clients < FEW_CLIENTS) {
            self.lints.report_once(Lint::SmallStorage { clients }, |lint| self.rules.reporter.warn(lint));
        }
    }
}

impl<St: Storage, R> LayerState<St, R> {
    /// What is to be done with a request.
    ///
    /// The key is looked at where it is, and moved only when it has to wait: handing things on costs more than making them.
    #[inline]
    pub(crate) fn consider<B, ResBody>(&self, request: &mut Request<B>) -> Action<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        let (rules, head) = (&self.rules, Head::of(request));
        if rules.skips(&head) {
            return Action::Forward(ResponsePlan::NOTHING);
        }
        let Some(policy) = rules.policies.of(&head) else { return Action::Forward(ResponsePlan::NOTHING) };
        let extracted = rules.key.extract(&head);
        let key = match &extracted {
            Ok(Some(key)) => key,
            Ok(None) => return Action::Forward(ResponsePlan::NOTHING),
            Err(missing) => return self.without(missing, &policy, &head),
        };
        let cost = match rules.cost.as_ref().map_or(Ok(1), |cost| cost(&head)) {
            Ok(cost) => cost,
            Err(missing) => return self.without(&missing, &policy, &head),
        };
        if self.lints.are_looking() {
            self.look_at(request, &policy);
        }
        // What is free shows how things stand.
        let op = if cost == 0 { Op::Peek } else { Op::Hit };
        let ask = StorageRequest::new(&policy, key, op, cost);
        if rules.shadow {
            return Action::Forward(self.try_out(ask, request));
        }
        // Nearly always the answer is there at once, is yes, and nobody wants to know more.
        if op == Op::Hit && !rules.want_decisions() && policy.shadows().is_empty() {
            let mut shown = rules.headers.tell_numbers().then(Summary::default);
            if self.storage.try_admit(ask, shown.as_mut()) {
                let numbers = shown.and_then(|shown| rules.headers.numbers(shown.at, &shown.limit, cost));
                return Action::Forward(ResponsePlan::only(numbers));
            }
        }
        // A storage that knows the answer is not made to wait for the first poll of a future.
        let mut deciding = self.storage.decide(ask);
        let delayed = match poll_once(&mut deciding) {
            Poll::Ready(decided) => match self.judge(decided, ask, request) {
                AdmissionResult::Admitted(told) => return Action::Forward(told),
                AdmissionResult::Refused(response) => return Action::Respond(response),
                AdmissionResult::Delayed(decision) => Some(decision),
            },
            Poll::Pending => None,
        };
        let place = QueueSlot::new(self.account(&policy, key, false), cost, delayed);
        self.tell_delayed(&place);
        Action::Wait(place, deciding)
    }

    /// Reports a delayed decision. Its place is already in a guard, which gives it back if the
    /// observer panics.
    pub(crate) fn tell_delayed(&self, place: &QueueSlot<St>) {
        if let Some(decision) = &place.taken {
            let ask = place.ask();
            self.report(EventKind::Decided(decision), ask.policy, Some(ask.key));
        }
    }

    /// What becomes of a request on which the storage has answered. If it is refused, what was attached to it is taken.
    #[inline]
    pub(crate) fn judge<B, ResBody>(
        &self,
        decided: Result<Decision, St::Error>,
        ask: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> AdmissionResult<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        let decision = match decided {
            Ok(ref decision) => decision,
            Err(error) => return self.without_storage(&error.into(), ask, &Head::of(request)),
        };
        if decision.is_admitted() && !decision.is_at_once() {
            return AdmissionResult::Delayed(Box::new(decision.clone()));
        }
        self.report(EventKind::Decided(decision), ask.policy, Some(ask.key));
        if decision.is_admitted() {
            AdmissionResult::Admitted(self.admitted(decision, ask, request))
        } else {
            let refused = RejectReason::Limit(LimitExceeded::new(decision, ask.policy));
            let mut response = self.rejection.reject(refused, &Head::of(request));
            let (fields, numbers) = (self.rules.headers, self.rules.headers.numbers_of(decision));
            headers::write_refused(&mut response, decision, numbers, fields.more_of(decision, ask.policy, ask.key));
            headers::attach(&mut response, decision, mem::take(request.extensions_mut()));
            AdmissionResult::Refused(response)
        }
    }

    /// What a request's response is told that goes on now.
    #[inline]
    pub(crate) fn admitted<B>(
        &self,
        decision: &Decision,
        ask: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> ResponsePlan<St> {
        self.admitted_after(decision, decision, ask, request)
    }

    /// The same after a delay: `now` has the numbers of this instant.
    #[inline]
    pub(crate) fn admitted_after<B>(
        &self,
        decision: &Decision,
        now: &Decision,
        ask: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> ResponsePlan<St> {
        let rules = &self.rules;
        if rules.shares_decision {
            request.extensions_mut().insert(decision.clone());
        }
        let numbers = rules.headers.numbers_of(now);
        let (shadows, is_free) = (ask.policy.shadows(), ask.cost == 0);
        if is_free && !rules.headers.tell_more()
            || rules.charge.is_none() && !rules.headers.tell_more() && shadows.is_empty()
        {
            return ResponsePlan::only(numbers);
        }
        let begin = |policy| ShadowCheck::begin(self.account(policy, ask.key, true), ask.cost);
        let charge = rules.charge.as_ref().filter(|_| !is_free);
        let after = PostResponse {
            headers: rules.headers,
            more: rules.headers.more_of(now, ask.policy, ask.key),
            charge: charge.cloned(),
            spent: charge.map(|_| (self.account(ask.policy, ask.key, false), decision.clone())),
            trials: if is_free { Vec::new() } else { shadows.iter().map(begin).collect() },
        };
        ResponsePlan { numbers, after: Some(Box::new(after)) }
    }

    /// Only tries the policy out, beside a request that goes on whatever comes of it.
    #[cold]
    fn try_out<B>(&self, ask: StorageRequest<'_>, request: &mut Request<B>) -> ResponsePlan<St> {
        if ask.cost == 0 {
            return ResponsePlan::NOTHING;
        }
        let trial = ShadowCheck::begin(self.account(ask.policy, ask.key, true), ask.cost);
        if let Some(decision) = trial.decision().filter(|_| self.rules.shares_decision) {
            request.extensions_mut().insert(decision.clone());
        }
        let (headers, charge) = (self.rules.headers, self.rules.charge.clone());
        let after = PostResponse { headers, more: None, charge, spent: None, trials: vec![trial] };
        ResponsePlan { numbers: None, after: Some(Box::new(after)) }
    }

    fn account(&self, policy: &Policy, key: &Key, shadow: bool) -> ChargeContext<St> {
        let (storage, reporter) = (self.storage.clone(), self.rules.reporter.clone());
        ChargeContext { storage, policy: policy.clone(), key: key.clone(), reporter, shadow }
    }

    #[cold]
    fn without_storage<ResBody>(
        &self,
        error: &BoxError,
        ask: StorageRequest<'_>,
        head: &Head<'_>,
    ) -> AdmissionResult<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        // What is free passes.
        let admitted = ask.cost == 0 || self.rules.on_error == OnError::Admit;
        self.report(EventKind::Failed { error, admitted }, ask.policy, Some(ask.key));
        if admitted {
            return AdmissionResult::Admitted(ResponsePlan::NOTHING);
        }
        let mut response = self.rejection.reject(RejectReason::Storage, head);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        AdmissionResult::Refused(response)
    }

    /// What is to be done with a request that has no key, or no cost.
    #[cold]
    fn without<ResBody>(&self, missing: &KeyError, policy: &Policy, head: &Head<'_>) -> Action<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        self.report(EventKind::KeyError(missing), policy, None);
        if self.rules.shadow {
            return Action::Forward(ResponsePlan::NOTHING);
        }
        let mut response = self.rejection.reject(RejectReason::Key(missing), head);
        if let Some(challenge) = missing.www_authenticate() {
            response.headers_mut().entry(WWW_AUTHENTICATE).or_insert_with(|| challenge.clone());
        }
        response.extensions_mut().insert(missing.clone());
        Action::Respond(response)
    }

    #[inline]
    fn report(&self, kind: EventKind<'_>, policy: &Policy, key: Option<&Key>) {
        self.rules.reporter.report(&Event { kind, policy, key, shadow: self.rules.shadow });
    }
}
