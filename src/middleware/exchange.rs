//! A request, and its next step.

use std::mem;

use http::{Extensions, HeaderMap, Request, Response};

use super::post_response::{HeldHit, PostResponse};
use crate::extract::Head;
use crate::headers::Numbers;
#[cfg(feature = "lookup")]
use crate::lookup::Finding;
use crate::rejection::{RejectReason, Rejection};
use crate::waiting::Stage;

/// A request, and the response to it if it is not forwarded.
///
/// The trait hides the types of the bodies and of the rejection, so that the middleware is compiled
/// once instead of for each service.
pub(crate) trait Exchange {
    fn head(&self) -> Head<'_>;

    fn extensions_mut(&mut self) -> &mut Extensions;

    /// Builds the response with the rejection of the layer, and returns its header fields.
    fn reject(&mut self, reason: RejectReason<'_>) -> &mut HeaderMap;

    /// Returns the extensions of the response, which must have been built. If it has none, they take
    /// over the memory of the request's extensions, which are empty afterwards.
    fn response_extensions(&mut self) -> &mut Extensions;
}

/// The exchange of a service with these bodies and this rejection.
pub(crate) struct HttpExchange<'a, R, B, ResBody> {
    pub(crate) rejection: &'a R,
    pub(crate) request: &'a mut Request<B>,
    pub(crate) response: &'a mut Option<Response<ResBody>>,
}

impl<R: Rejection<ResBody>, B, ResBody> Exchange for HttpExchange<'_, R, B, ResBody> {
    #[inline]
    fn head(&self) -> Head<'_> {
        Head::of(self.request)
    }

    fn extensions_mut(&mut self) -> &mut Extensions {
        self.request.extensions_mut()
    }

    fn reject(&mut self, reason: RejectReason<'_>) -> &mut HeaderMap {
        self.response.insert(self.rejection.reject(reason, &Head::of(self.request))).headers_mut()
    }

    fn response_extensions(&mut self) -> &mut Extensions {
        let extensions = self.response.as_mut().expect("the response was built").extensions_mut();
        let mut spare = mem::take(self.request.extensions_mut());
        if extensions.is_empty() {
            spare.clear();
            *extensions = spare;
        }
        extensions
    }
}

/// The next step for a request.
pub(crate) enum Step<W = Hold> {
    Forward(ResponsePlan),
    /// The exchange has the response.
    Respond,
    Wait(W),
}

/// The reason for which a request waits.
#[cfg_attr(
    feature = "lookup",
    expect(clippy::large_enum_variant, reason = "boxing it would cost an allocation per waiting request")
)]
pub(crate) enum Hold {
    /// Waits for the storage, for the request's turn, or for the delay of its hit.
    Hit(HeldHit, Stage),
    /// Waits for the lookup of the policy.
    #[cfg(feature = "lookup")]
    Lookup(Finding),
}

/// The work that is left for the response of an admitted request.
pub(crate) struct ResponsePlan {
    pub(crate) numbers: Option<Numbers>,
    pub(crate) after: Option<Box<PostResponse>>,
}

impl ResponsePlan {
    pub(crate) const NOTHING: Self = Self { numbers: None, after: None };

    /// Returns `true` if the response is forwarded unchanged.
    #[inline]
    pub(crate) fn is_nothing(&self) -> bool {
        self.numbers.is_none() && self.after.is_none()
    }

    #[inline]
    pub(crate) fn only(numbers: Option<Numbers>) -> Self {
        Self { numbers, after: None }
    }
}
