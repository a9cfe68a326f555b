//! The body of a response, which holds the slots of its request.

use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::permit::Permit;

pin_project! {
    /// The body of a response of [`InFlight`](crate::InFlight). It holds the slots of the request until
    /// the inner body has ended or failed, or until it is dropped.
    ///
    /// It passes on the frames, trailers, errors and hints of the inner body, and buffers nothing.
    #[derive(Debug)]
    pub struct InFlightBody<B> {
        #[pin]
        inner: B,
        permit: Option<Permit>,
    }
}

impl<B> InFlightBody<B> {
    /// Creates the body of a response that holds `permit`, or no slots.
    pub(super) fn new(inner: B, permit: Option<Permit>) -> Self {
        Self { inner, permit }
    }

    /// Returns a reference to the inner body.
    pub fn get_ref(&self) -> &B {
        &self.inner
    }
}

impl<B: Body> Body for InFlightBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut this = self.project();
        let polled = this.inner.as_mut().poll_frame(cx);
        let has_ended = match &polled {
            Poll::Pending => false,
            // A caller may not poll again after the last frame.
            Poll::Ready(Some(Ok(_))) => this.inner.is_end_stream(),
            Poll::Ready(Some(Err(_)) | None) => true,
        };
        if has_ended {
            *this.permit = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Creates a body that holds no slots, for the rejections of an outer layer.
impl<B: From<String>> From<String> for InFlightBody<B> {
    fn from(text: String) -> Self {
        Self::new(text.into(), None)
    }
}

/// Creates a body that holds no slots, for the rejections of an outer layer.
impl<B: Default> Default for InFlightBody<B> {
    fn default() -> Self {
        Self::new(B::default(), None)
    }
}
