//! Waiting for the look-up of a policy.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use tower_service::Service;

use super::{State, Waiting};
use crate::lookup;
use crate::middleware::admission::{Action, Hold};
use crate::middleware::state::LayerState;
use crate::{Rejection, Storage};

/// A request that waits for the look-up of its policy. It keeps the service that was polled ready.
pub(super) struct Finding<S, B, St, R> {
    call: Option<(S, Request<B>)>,
    shared: Arc<LayerState<St, R>>,
    tenant: lookup::Finding,
}

impl<S, B, St: Storage, R> Finding<S, B, St, R> {
    pub(super) fn new(ready: S, request: Request<B>, shared: Arc<LayerState<St, R>>, tenant: lookup::Finding) -> Self {
        Self { call: Some((ready, request)), shared, tenant }
    }

    /// Polls the look-up. Then decides the request, and returns its next state.
    pub(super) fn poll<ResBody>(&mut self, cx: &mut Context<'_>) -> Poll<State<S, B, St, R>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        let found = ready!(self.tenant.as_mut().poll(cx));
        let (mut service, mut request) = self.call.take().expect("polled after completion");
        Poll::Ready(match self.shared.admit_found(found, &mut request) {
            Action::Forward(plan) => State::Calling { inner: service.call(request), plan },
            Action::Respond(response) => State::Refused { response: Some(response) },
            Action::Wait(Hold::Queue(slot, deciding)) => {
                let waiting = Waiting::new(service, request, Arc::clone(&self.shared), deciding, slot);
                State::Waiting { waiting: Box::pin(waiting) }
            }
            Action::Wait(Hold::Lookup(tenant)) => {
                let finding = Self::new(service, request, Arc::clone(&self.shared), tenant);
                State::Finding { finding: Box::new(finding) }
            }
        })
    }
}
