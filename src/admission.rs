//! What becomes of a request.

use std::mem;
use std::sync::Arc;
use std::task::Poll;

use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Request, Response};

use crate::aftermath::{Account, After, Place, Trial, poll_once};
use crate::extract::{Head, Missing};
use crate::headers::Numbers;
use crate::lint::{Lint, Lints};
use crate::observe::{Event, What};
use crate::rules::{OnError, Rules};
use crate::storage::{Ask, Shown};
use crate::strategy::Strategy;
use crate::{BoxError, Decision, ElasticWindow, Key, Limit, Op, Policy, Refusal, Refused, Rejection, Storage, headers};

fn is_elastic(limit: &Limit) -> bool {
    limit.strategy().name() == ElasticWindow::new().name()
}

/// What all services of a layer share.
pub(crate) struct Shared<St, R> {
    pub(crate) rules: Rules,
    pub(crate) storage: St,
    pub(crate) rejection: Arc<R>,
    pub(crate) lints: Lints,
}

/// A layer warns of a storage that fewer exhausted clients fill.
const FEW_CLIENTS: u64 = 10_000;

/// What is to be done with a request.
pub(crate) enum Considered<St: Storage, ResBody> {
    PassOn(Told<St>),
    Answer(Response<ResBody>),
    /// For the storage, or for its turn.
    Wait(Place<St>, St::Decided),
}

/// What a decision means for a request.
pub(crate) enum Verdict<St: Storage, ResBody> {
    Admitted(Told<St>),
    /// It has not been reported yet.
    Delayed(Box<Decision>),
    Refused(Response<ResBody>),
}

/// What an admitted request's response is told, and what else is done then.
pub(crate) struct Told<St: Storage> {
    pub(crate) numbers: Option<Numbers>,
    pub(crate) after: Option<Box<After<St>>>,
}

impl<St: Storage> Told<St> {
    pub(crate) const NOTHING: Self = Self { numbers: None, after: None };

    #[inline]
    pub(crate) fn only(numbers: Option<Numbers>) -> Self {
        Self { numbers, after: None }
    }
}

impl<St, R> Shared<St, R> {
    pub(crate) fn new(rules: Rules, storage: St, rejection: Arc<R>) -> Arc<Self> {
        Arc::new(Self { rules, storage, rejection, lints: Lints::default() })
    }
}

impl<St: Storage, R> Shared<St, R> {
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

impl<St: Storage, R> Shared<St, R> {
    /// What is to be done with a request.
    ///
    /// The key is looked at where it is, and moved only when it has to wait: handing things on costs more than making them.
    #[inline]
    pub(crate) fn consider<B, ResBody>(&self, request: &mut Request<B>) -> Considered<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        let (rules, head) = (&self.rules, Head::of(request));
        if rules.skips(&head) {
            return Considered::PassOn(Told::NOTHING);
        }
        let Some(policy) = rules.policies.of(&head) else { return Considered::PassOn(Told::NOTHING) };
        let extracted = rules.key.extract(&head);
        let key = match &extracted {
            Ok(Some(key)) => key,
            Ok(None) => return Considered::PassOn(Told::NOTHING),
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
        let ask = Ask::new(&policy, key, op, cost);
        if rules.shadow {
            return Considered::PassOn(self.try_out(ask, request));
        }
        // Nearly always the answer is there at once, is yes, and nobody wants to know more.
        if op == Op::Hit && !rules.want_decisions() && policy.shadows().is_empty() {
            let mut shown = rules.headers.tell_numbers().then(Shown::default);
            if self.storage.hit_at_once(ask, shown.as_mut()) {
                let numbers = shown.and_then(|shown| rules.headers.numbers(shown.at, &shown.limit, cost));
                return Considered::PassOn(Told::only(numbers));
            }
        }
        // A storage that knows the answer is not made to wait for the first poll of a future.
        let mut deciding = self.storage.decide(ask);
        let delayed = match poll_once(&mut deciding) {
            Poll::Ready(decided) => match self.judge(decided, ask, request) {
                Verdict::Admitted(told) => return Considered::PassOn(told),
                Verdict::Refused(response) => return Considered::Answer(response),
                Verdict::Delayed(decision) => Some(decision),
            },
            Poll::Pending => None,
        };
        let place = Place::new(self.account(&policy, key, false), cost, delayed);
        self.tell_delayed(&place);
        Considered::Wait(place, deciding)
    }

    /// Reports a delayed decision. Its place is already in a guard, which gives it back if the
    /// observer panics.
    pub(crate) fn tell_delayed(&self, place: &Place<St>) {
        if let Some(decision) = &place.taken {
            let ask = place.ask();
            self.tell(What::Decided(decision), ask.policy, Some(ask.key));
        }
    }

    /// What becomes of a request on which the storage has answered. If it is refused, what was attached to it is taken.
    #[inline]
    pub(crate) fn judge<B, ResBody>(
        &self,
        decided: Result<Decision, St::Error>,
        ask: Ask<'_>,
        request: &mut Request<B>,
    ) -> Verdict<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        let decision = match decided {
            Ok(ref decision) => decision,
            Err(error) => return self.without_storage(&error.into(), ask, &Head::of(request)),
        };
        if decision.is_admitted() && !decision.is_at_once() {
            return Verdict::Delayed(Box::new(decision.clone()));
        }
        self.tell(What::Decided(decision), ask.policy, Some(ask.key));
        if decision.is_admitted() {
            Verdict::Admitted(self.admitted(decision, ask, request))
        } else {
            let refused = Refused::Limit(Refusal::new(decision, ask.policy));
            let mut response = self.rejection.reject(refused, &Head::of(request));
            let (fields, numbers) = (self.rules.headers, self.rules.headers.numbers_of(decision));
            headers::write_refused(&mut response, decision, numbers, fields.more_of(decision, ask.policy, ask.key));
            headers::attach(&mut response, decision, mem::take(request.extensions_mut()));
            Verdict::Refused(response)
        }
    }

    /// What a request's response is told that goes on now.
    #[inline]
    pub(crate) fn admitted<B>(&self, decision: &Decision, ask: Ask<'_>, request: &mut Request<B>) -> Told<St> {
        self.admitted_after(decision, decision, ask, request)
    }

    /// The same after a delay: `now` has the numbers of this instant.
    #[inline]
    pub(crate) fn admitted_after<B>(
        &self,
        decision: &Decision,
        now: &Decision,
        ask: Ask<'_>,
        request: &mut Request<B>,
    ) -> Told<St> {
        let rules = &self.rules;
        if rules.shares_decision {
            request.extensions_mut().insert(decision.clone());
        }
        let numbers = rules.headers.numbers_of(now);
        let (shadows, is_free) = (ask.policy.shadows(), ask.cost == 0);
        if is_free && !rules.headers.tell_more()
            || rules.charge.is_none() && !rules.headers.tell_more() && shadows.is_empty()
        {
            return Told::only(numbers);
        }
        let begin = |policy| Trial::begin(self.account(policy, ask.key, true), ask.cost);
        let charge = rules.charge.as_ref().filter(|_| !is_free);
        let after = After {
            headers: rules.headers,
            more: rules.headers.more_of(now, ask.policy, ask.key),
            charge: charge.cloned(),
            spent: charge.map(|_| (self.account(ask.policy, ask.key, false), decision.clone())),
            trials: if is_free { Vec::new() } else { shadows.iter().map(begin).collect() },
        };
        Told { numbers, after: Some(Box::new(after)) }
    }

    /// Only tries the policy out, beside a request that goes on whatever comes of it.
    #[cold]
    fn try_out<B>(&self, ask: Ask<'_>, request: &mut Request<B>) -> Told<St> {
        if ask.cost == 0 {
            return Told::NOTHING;
        }
        let trial = Trial::begin(self.account(ask.policy, ask.key, true), ask.cost);
        if let Some(decision) = trial.decision().filter(|_| self.rules.shares_decision) {
            request.extensions_mut().insert(decision.clone());
        }
        let (headers, charge) = (self.rules.headers, self.rules.charge.clone());
        let after = After { headers, more: None, charge, spent: None, trials: vec![trial] };
        Told { numbers: None, after: Some(Box::new(after)) }
    }

    fn account(&self, policy: &Policy, key: &Key, shadow: bool) -> Account<St> {
        let (storage, reporter) = (self.storage.clone(), self.rules.reporter.clone());
        Account { storage, policy: policy.clone(), key: key.clone(), reporter, shadow }
    }

    #[cold]
    fn without_storage<ResBody>(&self, error: &BoxError, ask: Ask<'_>, head: &Head<'_>) -> Verdict<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        // What is free passes.
        let admitted = ask.cost == 0 || self.rules.on_error == OnError::Admit;
        self.tell(What::Failed { error, admitted }, ask.policy, Some(ask.key));
        if admitted {
            return Verdict::Admitted(Told::NOTHING);
        }
        let mut response = self.rejection.reject(Refused::Storage, head);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        Verdict::Refused(response)
    }

    /// What is to be done with a request that has no key, or no cost.
    #[cold]
    fn without<ResBody>(&self, missing: &Missing, policy: &Policy, head: &Head<'_>) -> Considered<St, ResBody>
    where
        R: Rejection<ResBody>,
    {
        self.tell(What::Missing(missing), policy, None);
        if self.rules.shadow {
            return Considered::PassOn(Told::NOTHING);
        }
        let mut response = self.rejection.reject(Refused::Missing(missing), head);
        if let Some(challenge) = missing.www_authenticate() {
            response.headers_mut().entry(WWW_AUTHENTICATE).or_insert_with(|| challenge.clone());
        }
        response.extensions_mut().insert(missing.clone());
        Considered::Answer(response)
    }

    #[inline]
    fn tell(&self, what: What<'_>, policy: &Policy, key: Option<&Key>) {
        self.rules.reporter.tell(&Event { what, policy, key, shadow: self.rules.shadow });
    }
}
