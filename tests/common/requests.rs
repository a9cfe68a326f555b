//! Requests, inner services, and helpers to send requests.

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::{Request, Response};
use tower::{Service, ServiceExt};

/// An inner service that responds with 200, and counts its calls and those of its clones.
#[derive(Clone, Debug, Default)]
pub struct Inner(Arc<AtomicUsize>);

impl Inner {
    pub fn calls(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Service<Request<()>> for Inner {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new("in".to_owned())))
    }
}

/// An inner service that responds with the status in the path: 401 to `/401`.
#[derive(Clone, Copy, Debug)]
pub struct AnswersWithStatus;

impl Service<Request<()>> for AnswersWithStatus {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let mut response = Response::new(String::new());
        *response.status_mut() = request.uri().path()[1..].parse().unwrap();
        ready(Ok(response))
    }
}

pub fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

/// A request with one header field.
pub fn with(name: &str, value: &str) -> Request<()> {
    Request::get("/").header(name, value).body(()).unwrap()
}

/// Polls a clone of the service ready, sends it the request, and returns the response.
pub async fn ask<S, Q, B>(service: &S, request: Request<Q>) -> Response<B>
where
    S: Service<Request<Q>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    service.clone().oneshot(request).await.unwrap()
}

/// Sends a request like [`ask`], and returns the status as a number.
pub async fn status<S, Q, B>(service: &S, request: Request<Q>) -> u16
where
    S: Service<Request<Q>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    ask(service, request).await.status().as_u16()
}

/// Sends requests until one is refused. Returns the number of admitted requests.
pub async fn admitted_at_once<S, B>(service: &S) -> u32
where
    S: Service<Request<()>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    let mut admitted = 0;
    while status(service, get("/")).await == 200 {
        admitted += 1;
        assert!(admitted < 1_000, "nothing is limited");
    }
    admitted
}
