//! The settlement of a request: by the head of its response, or by a [`Reservation`] in its extensions.

use std::sync::Arc;

use http::Extensions;

use super::options::SettleOptions;
use crate::decision::Decision;
use crate::policy::Policy;
use crate::reservation::{HitsOfResponse, RequestHits, Reservation, Reservations, SharedHits};

/// The settlement of a request.
pub(crate) enum Settlement {
    /// The head of the response settles the request. Without `SettleOptions`, the request keeps its
    /// estimated cost.
    ByResponse(RequestHits, Option<Arc<SettleOptions>>),
    /// A [`Reservation`] settles the request. If it was dropped, the head of the response does.
    Later(HitsOfResponse, Arc<SettleOptions>),
}

impl Settlement {
    /// Returns the settlement of a request. If a handler settles the request, inserts a
    /// [`Reservation`] into `extensions`, with the decision and the policies that `decided` returns. The
    /// first policy has made the decision.
    pub(super) fn begin(
        settling: Option<&Arc<SettleOptions>>,
        hits: RequestHits,
        decided: impl FnOnce() -> (Decision, Vec<Policy>),
        extensions: &mut Extensions,
    ) -> Self {
        match settling {
            Some(settling) if settling.is_later => {
                let (decision, policies) = decided();
                let hits = SharedHits::new(policies, hits);
                let reservation = Reservation::of_layer(decision, Arc::clone(&hits));
                Reservations::insert(reservation, extensions);
                Self::Later(HitsOfResponse(hits), Arc::clone(settling))
            }
            settling => Self::ByResponse(hits, settling.cloned()),
        }
    }
}
