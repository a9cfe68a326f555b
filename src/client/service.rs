//! The middleware service, and its requests in progress.

use std::fmt;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tower_service::Service;

use super::gate::Gate;
use crate::error::BoxError;
use crate::extract::Head;
use crate::key::Key;
use crate::middleware::progress::unready;

/// Copies a request, to send it again after a refusal. Implemented for closures that return a copy, or
/// `None` if the request must not be sent again. See
/// [`ClientLimitLayer::retry_once`](crate::ClientLimitLayer::retry_once).
pub trait CopyRequest<B>: Clone + Send + Sync + 'static {
    /// Returns a copy of the request, or `None` if it must not be sent again.
    fn copy(&self, request: &Request<B>) -> Option<Request<B>>;
}

/// Sends no request again. The default of a [`ClientLimitLayer`](crate::ClientLimitLayer).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NoRetry;

impl<B> CopyRequest<B> for NoRetry {
    fn copy(&self, _: &Request<B>) -> Option<Request<B>> {
        None
    }
}

impl<F, B> CopyRequest<B> for F
where
    F: Fn(&Request<B>) -> Option<Request<B>> + Clone + Send + Sync + 'static,
{
    fn copy(&self, request: &Request<B>) -> Option<Request<B>> {
        self(request)
    }
}

/// The middleware of a client that keeps to the limits of other servers. Created by
/// [`ClientLimitLayer`](crate::ClientLimitLayer).
///
/// It calls the inner service that was polled ready, except for a request that waits. Such a
/// request keeps a clone of the inner service, which is polled ready after the wait. Responses are
/// returned unchanged. The error is that of the inner service, or a
/// [`ClientLimitError`](crate::ClientLimitError).
#[derive(Clone)]
pub struct ClientLimit<S, R = NoRetry> {
    inner: S,
    gate: Arc<Gate>,
    retry: R,
}

impl<S, R> ClientLimit<S, R> {
    pub(super) fn new(inner: S, gate: Arc<Gate>, retry: R) -> Self {
        Self { inner, gate, retry }
    }
}

impl<S, R, B, ResBody> Service<Request<B>> for ClientLimit<S, R>
where
    S: Service<Request<B>, Response = Response<ResBody>, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static,
    R: CopyRequest<B>,
    B: Send + 'static,
    ResBody: Send,
{
    type Response = Response<ResBody>;
    type Error = BoxError;
    type Future = ClientLimitFuture<Response<ResBody>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let clone = unready(&self.inner);
        let mut service = mem::replace(&mut self.inner, clone);
        let (gate, retry) = (Arc::clone(&self.gate), self.retry.clone());
        let key = gate.key_of(&Head::from_request(&request));
        ClientLimitFuture(Box::pin(async move {
            let Some(key) = key? else {
                return service.call(request).await.map_err(Into::into);
            };
            let (copy, deadline) = (retry.copy(&request), gate.deadline());
            let place = gate.pass(&key, deadline, || service = unready(&service)).await?;
            if place.is_some() {
                make_ready(&mut service, &gate, &key, deadline).await?;
            }
            drop(place);
            let response = service.call(request).await.map_err(Into::into)?;
            let can_wait = gate.record(&key, &response);
            let copy = copy.filter(|_| can_wait && response.status() == StatusCode::TOO_MANY_REQUESTS);
            let Some((copy, place)) = copy.and_then(|copy| Some((copy, gate.place()?))) else {
                return Ok(response);
            };
            // The connection is free during the wait.
            drop(response);
            let deadline = gate.deadline();
            gate.turn(&key, deadline).await?;
            make_ready(&mut service, &gate, &key, deadline).await?;
            drop(place);
            let response = service.call(copy).await.map_err(Into::into)?;
            gate.record(&key, &response);
            Ok(response)
        }))
    }
}

/// Replaces the service by a clone that was polled ready, at a time at which the key is not paused.
async fn make_ready<S, B>(service: &mut S, gate: &Gate, key: &Key, deadline: Instant) -> Result<(), BoxError>
where
    S: Service<Request<B>, Error: Into<BoxError>> + Clone,
{
    loop {
        *service = unready(service);
        poll_fn(|cx| service.poll_ready(cx)).await.map_err(Into::into)?;
        // Another response may have begun a pause while the service became ready.
        if !gate.is_paused(key) {
            return Ok(());
        }
        *service = unready(service);
        gate.pause_over(key, deadline).await?;
    }
}

impl<S: fmt::Debug, R> fmt::Debug for ClientLimit<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientLimit").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The response future of [`ClientLimit`]. Dropping it while the request waits gives up its place,
/// and spends nothing of the client's own limit. Only a request that has passed this limit, and
/// waits until the inner service is ready, has spent its unit.
#[must_use = "futures do nothing unless they are polled"]
pub struct ClientLimitFuture<T>(Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>);

impl<T> Future for ClientLimitFuture<T> {
    type Output = Result<T, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<T> fmt::Debug for ClientLimitFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientLimitFuture").finish_non_exhaustive()
    }
}
