//! The next step of a request, and what it waits for.

use std::iter::once;
use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::post_response::PostResponse;
use crate::decision::Decision;
use crate::headers::Numbers;
#[cfg(feature = "lookup")]
use crate::lookup::{AllLookups, LookupResult};
use crate::observe::EventKind;
use crate::policy::{Op, Policy};
use crate::reservation::{Correction, ObservedKey};
use crate::storage::{StorageFuture, StorageRequest};
use crate::waiting::QueueFuture;

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
    /// The policies are looked up.
    #[cfg(feature = "lookup")]
    Lookup(AllLookups),
    /// The policies were looked up. The request is decided when the inner service is ready.
    #[cfg(feature = "lookup")]
    LookedUp(Vec<LookupResult>),
    /// The hit of the request waits.
    Hit(WaitingHit),
    /// The request is forwarded when the inner service is ready, because the storage has failed.
    Service(ResponsePlan),
}

/// A hit that waits, or the hits of a request with several keys. Dropping this during its delay
/// refunds the hits, which frees their slots in the queues of leaky buckets if no later hits are in the
/// queues.
pub(crate) struct WaitingHit {
    first: WaitingMember,
    others: Vec<WaitingMember>,
    pub(crate) waits_for: HitWait,
}

/// A hit on one key.
struct WaitingMember {
    observed: ObservedKey,
    cost: u32,
}

impl WaitingMember {
    fn request(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.observed.limited.request(op, self.cost)
    }
}

/// The reason for which a hit waits.
pub(crate) enum HitWait {
    /// The storage decides.
    Decision(StorageFuture<Decision>),
    /// The storage decides on several keys.
    Decisions(StorageFuture<Vec<Decision>>),
    /// Other hits in its queue have their turns first.
    Turn(QueueFuture),
    /// The hits are admitted after the longest delay of the decisions, which may be zero, and when the
    /// inner service is ready. Empty after the request was forwarded.
    Delay(Vec<Decision>),
}

impl Wait {
    /// Returns `true` if the request keeps a ready inner service, because the storage decides
    /// first.
    pub(crate) fn keeps_service_ready(&self) -> bool {
        matches!(self, Self::Hit(WaitingHit { waits_for: HitWait::Decision(_) | HitWait::Decisions(_), .. }))
    }

    /// Returns the delay of an admitted hit, unless it is zero.
    pub(crate) fn delay(&self) -> Option<Duration> {
        match self {
            Self::Hit(WaitingHit { waits_for: HitWait::Delay(decisions), .. }) => {
                decisions.iter().map(Decision::delay).max().filter(|delay| !delay.is_zero())
            }
            _ => None,
        }
    }
}

impl WaitingHit {
    /// Creates the hits of the requests, of which there is at least one. `observed` returns what
    /// belongs to a request. Reports decisions that wait for their delay when this has them, so that
    /// the drop of this refunds the hits if the observer panics.
    pub(super) fn new(
        requests: &[StorageRequest<'_>],
        observed: impl Fn(&StorageRequest<'_>) -> ObservedKey,
        waits_for: HitWait,
    ) -> Self {
        let member = |request: &StorageRequest<'_>| WaitingMember { observed: observed(request), cost: request.cost };
        let hit = Self { first: member(&requests[0]), others: requests[1..].iter().map(member).collect(), waits_for };
        if let HitWait::Delay(decisions) = &hit.waits_for {
            for (member, decision) in hit.members().zip(decisions) {
                member.observed.report(EventKind::Decided(decision));
            }
        }
        hit
    }

    fn members(&self) -> impl Iterator<Item = &WaitingMember> {
        once(&self.first).chain(&self.others)
    }

    /// Sets the policy, which may have changed while the request waited in a queue. A request with
    /// several keys does not.
    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.first.observed.limited.policy = policy;
    }

    /// Returns the time of the decision, or a little later.
    pub(super) fn since(&self) -> Instant {
        self.first.observed.since
    }

    /// Calls `f` with a request for each key.
    pub(crate) fn with_requests<T>(&self, f: impl FnOnce(&[StorageRequest<'_>]) -> T) -> T {
        if self.others.is_empty() {
            return f(&[self.first.request()]);
        }
        f(&self.members().map(WaitingMember::request).collect::<Vec<_>>())
    }

    /// Peeks at the keys. Returns `None` if the storage fails or is not immediately ready.
    pub(super) fn peek_now(&self) -> Option<Vec<Decision>> {
        self.members().map(|member| member.observed.peek_now(member.cost)).collect()
    }

    /// Takes the decisions of admitted hits, which are not refunded after that.
    pub(super) fn take_decisions(&mut self) -> Vec<Decision> {
        match &mut self.waits_for {
            HitWait::Delay(decisions) => mem::take(decisions),
            HitWait::Decision(_) | HitWait::Decisions(_) | HitWait::Turn(_) => Vec::new(),
        }
    }
}

impl Drop for WaitingHit {
    fn drop(&mut self) {
        let decisions = self.take_decisions();
        for (member, decision) in self.members().zip(&decisions) {
            drop(member.observed.settle(decision, Correction::Cost(0)));
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
