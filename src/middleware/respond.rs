//! The responses to requests that are not admitted.

use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};

use super::config::OnError;
use super::exchange::{Exchange, ResponsePlan, Step};
use super::state::LayerState;
use crate::decision::Decision;
use crate::extract::KeyError;
use crate::headers;
use crate::key::Key;
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::rejection::{LimitExceeded, RejectReason};
use crate::reservation::{Hits, Reservation, Reservations, ReservedHits};
use crate::storage::{StorageError, StorageRequest};

impl LayerState {
    /// Reports a refusal and builds its response, which has the decision in its extensions.
    pub(super) fn refuse(&self, decision: &Decision, storage_request: StorageRequest<'_>, exchange: &mut dyn Exchange) {
        let StorageRequest { policy, key, .. } = storage_request;
        self.report(EventKind::Decided(decision), policy, Some(key));
        if let Some(lock) = decision.new_lock() {
            self.report(EventKind::Locked(lock), policy, Some(key));
        }
        let written = exchange.reject(RejectReason::Limit(LimitExceeded::new(decision, policy)));
        let fields = self.config.headers;
        let (numbers, other_fields) = (fields.numbers_of(decision), fields.other_fields_of(decision, policy, key));
        headers::write_refused(written, decision, numbers, other_fields);
        // Outer layers recognize the refusal by its decision.
        exchange.response_extensions().insert(decision.clone());
    }

    /// Reports a failure of the storage, and forwards or rejects the request as [`OnError`]
    /// selects. A handler that settles the request gets a reservation that does nothing.
    #[cold]
    pub(super) fn on_storage_error<W>(
        &self,
        error: &StorageError,
        storage_request: StorageRequest<'_>,
        exchange: &mut dyn Exchange,
    ) -> Step<W> {
        // A request that costs nothing always passes.
        let admitted = storage_request.cost == 0 || self.config.on_error == OnError::Admit;
        self.report(EventKind::Failed { error, admitted }, storage_request.policy, Some(storage_request.key));
        if !admitted {
            return unavailable(exchange);
        }
        if self.config.settling.as_ref().is_some_and(|settling| settling.is_later) {
            let StorageRequest { policy, cost, .. } = storage_request;
            let hits = ReservedHits::new(policy.clone(), cost, Hits::NONE);
            Reservations::insert(Reservation::of_layer(policy.unspent(cost), hits), exchange.extensions_mut());
        }
        Step::Forward(ResponsePlan::NOTHING)
    }

    /// Forwards a request that is not limited, or rejects one whose key is missing.
    #[cold]
    pub(super) fn forward_or_reject(
        &self,
        extracted: Result<Option<Key>, KeyError>,
        policy: &Policy,
        exchange: &mut dyn Exchange,
    ) -> Step {
        match extracted {
            Ok(_) => Step::Forward(ResponsePlan::NOTHING),
            Err(missing) => self.reject_without_key(&missing, policy, exchange),
        }
    }

    /// Rejects a request without a key or a cost. A shadow layer forwards it.
    #[cold]
    pub(super) fn reject_without_key(&self, missing: &KeyError, policy: &Policy, exchange: &mut dyn Exchange) -> Step {
        self.report(EventKind::KeyError(missing), policy, None);
        if self.config.shadow {
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
