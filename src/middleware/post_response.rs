//! The plan for the response of an admitted request: its header fields, and the work besides.

use std::task::Context;

use http::Response;

use super::options::ResponseHead;
use super::settlement::Settlement;
use crate::headers;
use crate::headers::{Headers, Numbers, OtherFields};
use crate::policy::Op;
use crate::reservation::RequestHits;

/// The plan for the response of an admitted request: `X-RateLimit-*`, and more work if there is any.
pub(crate) struct ResponsePlan {
    pub(crate) numbers: Option<Numbers>,
    pub(crate) after: Option<Box<PostResponse>>,
}

impl ResponsePlan {
    pub(crate) const NOTHING: Self = Self { numbers: None, after: None };

    /// Returns `true` if the response is forwarded unchanged.
    #[inline]
    pub(super) fn is_nothing(&self) -> bool {
        self.numbers.is_none() && self.after.is_none()
    }

    #[inline]
    pub(crate) fn only(numbers: Option<Numbers>) -> Self {
        Self { numbers, after: None }
    }
}

/// The work on a response besides `X-RateLimit-*`: other header fields, the settlement, and the shadow
/// checks.
pub(crate) struct PostResponse {
    pub(crate) headers: Headers,
    pub(crate) other_fields: Option<OtherFields>,
    pub(crate) settlement: Settlement,
}

impl PostResponse {
    /// Returns the work for a response that only gets these header fields.
    pub(crate) fn of_fields(headers: Headers, other_fields: OtherFields) -> Self {
        Self { headers, other_fields: Some(other_fields), settlement: Settlement::ByResponse(RequestHits::NONE, None) }
    }

    /// Polls the shadow checks.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) {
        match &mut self.settlement {
            Settlement::ByResponse(hits, _) => hits.poll(cx),
            Settlement::Later(hits, _) => hits.poll(cx),
        }
    }

    /// Settles the hits of the request, unless a [`Reservation`](crate::Reservation) does, and writes the
    /// header fields of its response.
    pub(super) fn finish<B>(self, response: &mut Response<B>, mut numbers: Option<Numbers>) {
        let Self { headers, mut other_fields, settlement } = self;
        let settled: Vec<_> = match settlement {
            Settlement::ByResponse(hits, settling) => {
                let settled = hits
                    .settle(settling.and_then(|settling| settling.correction(&ResponseHead::from_response(response))));
                // A task continues a settlement that is dropped before its end.
                settled.into_iter().map(|(hit, _)| hit).collect()
            }
            Settlement::Later(hits, settling) => {
                if settling.is_by_response() {
                    hits.settle_abandoned(|| settling.correction(&ResponseHead::from_response(response)));
                }
                hits.settled()
            }
        };
        if settled.iter().any(|hit| hit.is_refunded) {
            numbers = numbers.map(Numbers::without_wait);
            other_fields = other_fields.map(OtherFields::without_wait);
        }
        if !settled.is_empty()
            && settled.iter().all(|hit| hit.is_complete)
            && (headers.writes_x_rate_limit() || headers.writes_other_fields())
            && let Some(shown) = settled.iter().map(|hit| hit.observed.peek_now(hit.cost)).collect::<Option<Vec<_>>>()
        {
            let requests: Vec<_> = settled.iter().map(|hit| hit.observed.limited.request(Op::Peek, hit.cost)).collect();
            numbers = headers.numbers_of(&shown, &requests);
            other_fields = headers.other_fields_of(&shown, &requests);
        }
        headers::write_admitted(response, numbers, other_fields);
    }
}
