//! A request in progress, from its first step to its response.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;
use pin_project_lite::pin_project;

use super::post_response::ResponsePlan;
use crate::headers;

pin_project! {
    /// A request in progress.
    #[project = ProgressProj]
    pub(crate) enum Progress<F, W, T> {
        /// The inner service works on the request.
        Calling {
            #[pin]
            inner: F,
            plan: ResponsePlan,
        },
        /// The rejection has built the response.
        Responded {
            response: Option<T>,
        },
        /// The request waits before the inner service is called.
        Waiting {
            waiting: W,
        },
    }
}

impl<F, W, ResBody, E> Progress<F, W, Response<ResBody>>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
{
    /// Polls until the response is ready. `poll_waiting` polls a request that waits, and returns its
    /// progress after that.
    #[inline]
    pub(crate) fn poll(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut poll_waiting: impl FnMut(&mut W, &mut Context<'_>) -> Poll<Result<Self, E>>,
    ) -> Poll<F::Output> {
        loop {
            match self.as_mut().project() {
                ProgressProj::Calling { inner, plan } => return poll_inner(inner, plan, cx),
                ProgressProj::Responded { response } => {
                    return Poll::Ready(Ok(response.take().expect("polled after completion")));
                }
                ProgressProj::Waiting { waiting } => {
                    let next = ready!(poll_waiting(waiting, cx))?;
                    self.set(next);
                }
            }
        }
    }
}

/// Polls the inner future. When it is ready, settles the request and writes the header fields into
/// the response in place. Until then, also polls the shadow checks.
///
/// Responses are large. The function is not inlined, so that the compiler does not move them.
#[inline(never)]
fn poll_inner<F, ResBody, E>(inner: Pin<&mut F>, plan: &mut ResponsePlan, cx: &mut Context<'_>) -> Poll<F::Output>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
{
    if plan.is_nothing() {
        return inner.poll(cx);
    }
    let mut polled = inner.poll(cx);
    if let Poll::Ready(Ok(response)) = &mut polled {
        match plan.after.take() {
            None => headers::write_admitted(response, plan.numbers, None),
            Some(after) => after.finish(response, plan.numbers),
        }
    } else if let Some(after) = &mut plan.after {
        after.poll(cx);
    }
    polled
}

/// Returns a clone to keep during a wait. The caller drops the ready service, because it may hold a
/// permit or a slot that another request needs.
pub(crate) fn unready<S: Clone>(readied: &S) -> S {
    readied.clone()
}
