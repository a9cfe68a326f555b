//! The next step of a request, and what it waits for.

use std::time::Duration;

use super::post_response::ResponsePlan;
use super::waiting_hits::{DelayedHits, WaitingHits};
use crate::decision::Decision;
#[cfg(feature = "lookup")]
use crate::lookup::{AllLookups, LookupResult};
use crate::storage::StorageFuture;
use crate::waiting::QueueFuture;

/// The next step for a request.
pub(crate) enum Step<W = Wait> {
    Forward(ResponsePlan),
    /// The exchange has the response.
    Respond,
    Wait(W),
}

/// The reason for which a request waits.
pub(crate) enum Wait {
    /// The policies are looked up.
    #[cfg(feature = "lookup")]
    Lookup(AllLookups),
    /// The policies were looked up. The request is decided when the inner service is ready.
    #[cfg(feature = "lookup")]
    LookedUp(Vec<LookupResult>),
    /// The storage decides.
    Decision(WaitingHits, StorageFuture<Decision>),
    /// The storage decides on several keys.
    Decisions(WaitingHits, StorageFuture<Vec<Decision>>),
    /// Other hits in its queue have their turns first.
    Turn(WaitingHits, QueueFuture),
    /// The hits are admitted. The request is forwarded after the longest delay of the decisions, which
    /// may be zero, and when the inner service is ready.
    Delay(DelayedHits),
    /// The request is forwarded when the inner service is ready, because the storage has failed.
    Service(ResponsePlan),
}

impl Wait {
    /// Returns `true` if the request keeps a ready inner service, because the storage decides
    /// first.
    pub(crate) fn keeps_service_ready(&self) -> bool {
        matches!(self, Self::Decision(..) | Self::Decisions(..))
    }

    /// Returns the delay of admitted hits, unless it is zero.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let Self::Delay(hits) = self else { return None };
        hits.decisions().iter().map(Decision::delay).max().filter(|delay| !delay.is_zero())
    }
}
