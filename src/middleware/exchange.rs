//! A request, and its next step.

use std::mem;
use std::time::Duration;

use http::{Extensions, HeaderMap, Request, Response};

use super::post_response::PostResponse;
use crate::decision::Decision;
use crate::extract::Head;
use crate::headers::Numbers;
#[cfg(feature = "lookup")]
use crate::lookup::{LookupFuture, LookupResult};
use crate::observe::EventKind;
use crate::policy::{Op, Policy};
use crate::rejection::{RejectReason, Rejection};
use crate::reservation::{Correction, ObservedKey};
use crate::storage::{StorageFuture, StorageRequest};
use crate::waiting::QueueFuture;

/// A request, and the response to it if it is not forwarded.
///
/// The trait hides the types of the bodies and of the rejection, so that the middleware is compiled
/// once instead of for each service.
pub(crate) trait Exchange {
    fn head(&self) -> Head<'_>;

    fn extensions_mut(&mut self) -> &mut Extensions;

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
pub(crate) enum Step<W = Wait> {
    Forward(ResponsePlan),
    /// The exchange has the response.
    Respond,
    Wait(W),
}

/// The reason for which a request waits.
#[expect(clippy::large_enum_variant, reason = "boxing it would cost an allocation per waiting request")]
pub(crate) enum Wait {
    /// The policy is looked up.
    #[cfg(feature = "lookup")]
    Lookup(LookupFuture),
    /// The policy was looked up. The request is decided when the inner service is ready.
    #[cfg(feature = "lookup")]
    LookedUp(LookupResult),
    /// The hit of the request waits.
    Hit(WaitingHit),
    /// The request is forwarded when the inner service is ready, because the storage has failed.
    Service(ResponsePlan),
}

/// A hit that waits. Dropping this during its delay refunds the hit, which frees the hit's slot in
/// the queue of a leaky bucket if no later hit is in the queue.
pub(crate) struct WaitingHit {
    pub(crate) observed: ObservedKey,
    pub(crate) cost: u32,
    pub(crate) waits_for: HitWait,
}

/// The reason for which a hit waits.
pub(crate) enum HitWait {
    /// The storage decides.
    Decision(StorageFuture<Decision>),
    /// Other hits in its queue have their turns first.
    Turn(QueueFuture),
    /// The hit is admitted after the delay of the decision, which may be zero, and when the inner
    /// service is ready. `None` after the request was forwarded.
    Delay(Option<Box<Decision>>),
}

impl Wait {
    /// Returns `true` if the request keeps a ready inner service, because the storage decides
    /// first.
    pub(crate) fn keeps_service_ready(&self) -> bool {
        matches!(self, Self::Hit(WaitingHit { waits_for: HitWait::Decision(_), .. }))
    }

    /// Returns the delay of an admitted hit, unless it is zero.
    pub(crate) fn delay(&self) -> Option<Duration> {
        match self {
            Self::Hit(WaitingHit { waits_for: HitWait::Delay(Some(decision)), .. }) => {
                Some(decision.delay()).filter(|delay| !delay.is_zero())
            }
            _ => None,
        }
    }
}

impl WaitingHit {
    /// Creates a hit that waits for its delay. Reports its decision when this has it, so that the
    /// drop of this refunds the hit if the observer panics.
    pub(super) fn delayed(observed: ObservedKey, cost: u32, decision: Decision) -> Self {
        let hit = Self { observed, cost, waits_for: HitWait::Delay(Some(Box::new(decision))) };
        if let HitWait::Delay(Some(decision)) = &hit.waits_for {
            hit.observed.report(EventKind::Decided(decision));
        }
        hit
    }

    /// Sets the policy, which may have changed while the request waited.
    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.observed.limited.policy = policy;
    }

    pub(crate) fn storage_request(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.observed.limited.request(op, self.cost)
    }

    /// Takes the decision of an admitted hit, which is not refunded after that.
    pub(crate) fn take_decision(&mut self) -> Option<Box<Decision>> {
        match &mut self.waits_for {
            HitWait::Delay(decision) => decision.take(),
            HitWait::Decision(_) | HitWait::Turn(_) => None,
        }
    }
}

impl Drop for WaitingHit {
    fn drop(&mut self) {
        if let Some(decision) = self.take_decision() {
            drop(self.observed.settle(&decision, Correction::Cost(0)));
        }
    }
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
