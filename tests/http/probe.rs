//! A service that checks its own readiness.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::{Request, Response};
use tower::Service;

/// A service that panics if it is called without being polled ready. A new clone is never ready.
/// The body of a response is the number of the clone, or 0 for the original.
pub(crate) struct Probe {
    id: usize,
    ready: bool,
    pub(crate) clones: Arc<AtomicUsize>,
    pub(crate) calls: Arc<AtomicUsize>,
}

impl Probe {
    pub(crate) fn new() -> Self {
        Self { id: 0, ready: false, clones: Arc::default(), calls: Arc::default() }
    }
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        let id = self.clones.fetch_add(1, Ordering::SeqCst) + 1;
        Self { id, ready: false, clones: Arc::clone(&self.clones), calls: Arc::clone(&self.calls) }
    }
}

impl Service<Request<()>> for Probe {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without being polled ready");
        self.calls.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(self.id.to_string())))
    }
}
