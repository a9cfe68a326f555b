//! Waiting for the lookup of a policy.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use tower_service::Service;

use super::{AfterWaiting, ResponseState, WaitingRequest, unready};
use crate::lookup;
use crate::middleware::exchange::{Hold, HttpExchange, Step};
use crate::middleware::state::Shared;
use crate::rejection::Rejection;

/// A request that waits for the lookup of its policy, and then for the inner service.
pub(super) struct Finding<S, B, R> {
    // The service is a clone, which has to be polled ready before it is called.
    call: Option<(S, Request<B>)>,
    shared: Arc<Shared<R>>,
    tenant: lookup::Finding,
    /// The result of the lookup.
    found: Option<lookup::LookupResult>,
}

impl<S, B, R> Finding<S, B, R> {
    pub(super) fn new(ready: &S, request: Request<B>, shared: Arc<Shared<R>>, tenant: lookup::Finding) -> Self
    where
        S: Clone,
    {
        Self { call: Some((unready(ready), request)), shared, tenant, found: None }
    }

    /// Polls the lookup and the service. Then decides the request like a new one, and returns its
    /// next state. Nothing is spent before that.
    pub(super) fn poll<ResBody>(&mut self, cx: &mut Context<'_>) -> Poll<AfterWaiting<S, B, R>>
    where
        S: Service<Request<B>, Response = Response<ResBody>> + Clone,
        R: Rejection<ResBody>,
    {
        if self.found.is_none() {
            self.found = Some(ready!(self.tenant.as_mut().poll(cx)));
        }
        let (service, _) = self.call.as_mut().expect("polled after completion");
        ready!(service.poll_ready(cx))?;
        let (mut service, mut request) = self.call.take().expect("checked above");
        let found = self.found.take().expect("set above");
        let mut response = None;
        let rejection = &*self.shared.rejection;
        let mut exchange = HttpExchange { rejection, request: &mut request, response: &mut response };
        Poll::Ready(Ok(match self.shared.admit_found(found, &mut exchange) {
            Step::Forward(plan) => ResponseState::Calling { inner: service.call(request), plan },
            Step::Respond => ResponseState::Refused { response },
            Step::Wait(Hold::Hit(hit, stage)) => {
                let waiting = WaitingRequest::new(service, request, Arc::clone(&self.shared), hit, stage);
                ResponseState::Waiting { waiting: Box::pin(waiting) }
            }
            Step::Wait(Hold::Lookup(tenant)) => {
                let finding = Self::new(&service, request, Arc::clone(&self.shared), tenant);
                ResponseState::Finding { finding: Box::new(finding) }
            }
        }))
    }
}
