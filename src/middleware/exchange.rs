//! A request, and the response to it, without the types of their bodies.

use std::mem;

use http::{Extensions, HeaderMap, Request, Response};

use crate::extract::Head;
use crate::rejection::{RejectReason, Rejection};

/// The head of a request, and its extensions.
pub(crate) trait RequestHead {
    fn head(&self) -> Head<'_>;

    fn extensions_mut(&mut self) -> &mut Extensions;
}

impl<B> RequestHead for Request<B> {
    #[inline]
    fn head(&self) -> Head<'_> {
        Head::from_request(self)
    }

    fn extensions_mut(&mut self) -> &mut Extensions {
        Request::extensions_mut(self)
    }
}

/// A request, and the response to it if it is not forwarded.
///
/// The trait hides the types of the bodies and of the rejection, so that the middleware is compiled
/// once instead of for each service.
pub(crate) trait Exchange: RequestHead {
    /// Builds the response with the rejection of the layer, and returns its header fields.
    fn reject(&mut self, reason: RejectReason<'_>) -> &mut HeaderMap;

    /// Returns the extensions of the response, which must have been built. If it has none, they
    /// take over the memory of the request's extensions, which are empty afterwards.
    fn response_extensions(&mut self) -> &mut Extensions;
}

/// The exchange of a service with these bodies and this rejection.
pub(crate) struct HttpExchange<'a, R, B, ResBody> {
    pub(crate) rejection: &'a R,
    pub(crate) request: &'a mut Request<B>,
    pub(crate) response: &'a mut Option<Response<ResBody>>,
}

impl<R, B, ResBody> RequestHead for HttpExchange<'_, R, B, ResBody> {
    #[inline]
    fn head(&self) -> Head<'_> {
        Head::from_request(self.request)
    }

    fn extensions_mut(&mut self) -> &mut Extensions {
        self.request.extensions_mut()
    }
}

impl<R: Rejection<ResBody>, B, ResBody> Exchange for HttpExchange<'_, R, B, ResBody> {
    fn reject(&mut self, reason: RejectReason<'_>) -> &mut HeaderMap {
        self.response.insert(self.rejection.reject(reason, &Head::from_request(self.request))).headers_mut()
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
