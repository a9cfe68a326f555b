//! The responses to requests that are not admitted.

use std::mem;

use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Request, Response};

use super::admission::{Action, ResponsePlan};
use super::config::OnError;
use super::state::LayerState;
use super::waiting_room::Pause;
use crate::decision::Decision;
use crate::extract::{Head, KeyError};
use crate::headers;
use crate::key::Key;
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::rejection::{LimitExceeded, RejectReason, Rejection};
use crate::storage::{StorageError, StorageRequest};

impl<R> LayerState<R> {
    /// Reports a refusal and builds its response. The response takes over the memory of the
    /// request's extensions, which are empty afterwards.
    #[inline(never)]
    pub(super) fn refuse<B, ResBody>(
        &self,
        decision: &Decision,
        storage_request: StorageRequest<'_>,
        request: &mut Request<B>,
    ) -> Response<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let StorageRequest { policy, key, .. } = storage_request;
        self.report(EventKind::Decided(decision), policy, Some(key));
        let reason = RejectReason::Limit(LimitExceeded::new(decision, policy));
        let mut response = self.rejection.reject(reason, &Head::of(request));
        let fields = self.config.headers;
        let (numbers, other_fields) = (fields.numbers_of(decision), fields.other_fields_of(decision, policy, key));
        headers::write_refused(&mut response, decision, numbers, other_fields);
        headers::attach(&mut response, decision, mem::take(request.extensions_mut()));
        response
    }

    /// Reports a failure of the storage, and forwards or rejects the request as [`OnError`]
    /// selects.
    #[cold]
    pub(super) fn on_storage_error<ResBody>(
        &self,
        error: &StorageError,
        storage_request: StorageRequest<'_>,
        head: &Head<'_>,
    ) -> Action<ResBody, Pause>
    where
        R: Rejection<ResBody>,
    {
        // A request that costs nothing always passes.
        let admitted = storage_request.cost == 0 || self.config.on_error == OnError::Admit;
        self.report(EventKind::Failed { error, admitted }, storage_request.policy, Some(storage_request.key));
        if admitted {
            return Action::Forward(ResponsePlan::NOTHING);
        }
        Action::Respond(self.unavailable(head))
    }

    /// Builds the response to a request that cannot be decided because the storage or the look-up
    /// failed.
    pub(super) fn unavailable<ResBody>(&self, head: &Head<'_>) -> Response<ResBody>
    where
        R: Rejection<ResBody>,
    {
        let mut response = self.rejection.reject(RejectReason::Storage, head);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        response
    }

    /// Forwards a request that is not limited, or rejects one whose key is missing.
    #[cold]
    pub(super) fn forward_or_reject<B, ResBody>(
        &self,
        extracted: Result<Option<Key>, KeyError>,
        policy: &Policy,
        request: &Request<B>,
    ) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match extracted {
            Ok(_) => Action::Forward(ResponsePlan::NOTHING),
            Err(missing) => self.reject_without_key(&missing, policy, &Head::of(request)),
        }
    }

    /// Rejects a request without a key or a cost. A shadow layer forwards it.
    #[cold]
    pub(super) fn reject_without_key<ResBody>(
        &self,
        missing: &KeyError,
        policy: &Policy,
        head: &Head<'_>,
    ) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        self.report(EventKind::KeyError(missing), policy, None);
        if self.config.shadow {
            return Action::Forward(ResponsePlan::NOTHING);
        }
        let mut response = self.rejection.reject(RejectReason::Key(missing), head);
        if let Some(challenge) = missing.www_authenticate() {
            response.headers_mut().entry(WWW_AUTHENTICATE).or_insert_with(|| challenge.clone());
        }
        response.extensions_mut().insert(missing.clone());
        Action::Respond(response)
    }
}
