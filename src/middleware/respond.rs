//! The responses to requests that are not admitted.

use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};

use super::config::{LayerConfig, OnError};
use super::exchange::Exchange;
use super::post_response::ResponsePlan;
use super::step::Step;
use crate::decision::{Decision, shown_position};
use crate::extract::KeyError;
use crate::headers::{self, Numbers};
use crate::key::Key;
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::rejection::{LimitExceeded, RejectReason};
use crate::storage::{StorageError, StorageRequest};

impl LayerConfig {
    /// Reports the decisions that refuse, and builds the response.
    pub(crate) fn refuse(&self, decisions: &[Decision], requests: &[StorageRequest<'_>], exchange: &mut dyn Exchange) {
        for (decision, request) in decisions.iter().zip(requests).filter(|(decision, _)| decision.is_refused()) {
            self.report(EventKind::Decided(decision), request.policy, Some(request.key));
            if let Some(lock) = decision.new_lock() {
                self.report(EventKind::Locked(lock), request.policy, Some(request.key));
            }
        }
        self.respond_to_refused(decisions, requests, exchange);
    }

    /// Builds the response to a refused request. It has the decision in its extensions that header
    /// fields report.
    pub(crate) fn respond_to_refused(
        &self,
        decisions: &[Decision],
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) {
        let shown = shown_position(decisions);
        let (decision, StorageRequest { policy, key, .. }) = (&decisions[shown], requests[shown]);
        let fields = self.headers;
        let wait = fields.retry_after(decision, key);
        let refusal = LimitExceeded::new(decision, policy, key, wait);
        let written = exchange.reject(RejectReason::Limit(refusal));
        let numbers = fields.numbers_of_refusal(decisions);
        let numbers = if refusal.counts_in_flight { numbers.map(Numbers::without_reset) } else { numbers };
        let other_fields = fields.other_fields_of(decisions, requests);
        headers::write_refused(written, wait, numbers, other_fields);
        // Outer layers recognize the refusal by its decision.
        exchange.response_extensions().insert(decision.clone());
    }

    /// Reports a failure of the storage, and forwards or rejects the request as [`OnError`] selects.
    #[cold]
    pub(crate) fn on_failure<W>(
        &self,
        error: &StorageError,
        requests: &[StorageRequest<'_>],
        exchange: &mut dyn Exchange,
    ) -> Step<W> {
        // A request that costs nothing always passes.
        let is_free = requests.iter().all(|request| request.cost == 0);
        let admitted = is_free || self.shadow || self.on_error == OnError::Admit;
        self.report(EventKind::Failed { error, admitted }, requests[0].policy, Some(requests[0].key));
        if admitted { Step::Forward(ResponsePlan::NOTHING) } else { unavailable(exchange) }
    }

    /// Forwards a request that is not limited, or rejects one whose key is missing.
    #[cold]
    pub(crate) fn forward_or_reject<W>(
        &self,
        extracted: Result<Option<Key>, KeyError>,
        policy: &Policy,
        exchange: &mut dyn Exchange,
    ) -> Step<W> {
        match extracted {
            Ok(_) => Step::Forward(ResponsePlan::NOTHING),
            Err(missing) => self.reject_without_key(&missing, policy, exchange),
        }
    }

    /// Rejects a request without a key or a cost. A shadow layer forwards it.
    #[cold]
    pub(crate) fn reject_without_key<W>(
        &self,
        missing: &KeyError,
        policy: &Policy,
        exchange: &mut dyn Exchange,
    ) -> Step<W> {
        self.report(EventKind::KeyError(missing), policy, None);
        if self.shadow {
            return Step::Forward(ResponsePlan::NOTHING);
        }
        let written = exchange.reject(RejectReason::Key(missing));
        if let Some(challenge) = missing.www_authenticate() {
            written.entry(WWW_AUTHENTICATE).or_insert_with(|| challenge.clone());
        }
        exchange.response_extensions().insert(missing.clone());
        Step::Respond
    }
}

/// Builds the response to a request that cannot be decided because the storage or the lookup
/// failed.
pub(super) fn unavailable<W>(exchange: &mut dyn Exchange) -> Step<W> {
    exchange.reject(RejectReason::Storage).insert(RETRY_AFTER, HeaderValue::from_static("1"));
    Step::Respond
}
