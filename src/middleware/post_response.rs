//! The work that is left when a response is ready, and the hit of a request that waits.

use std::sync::Arc;
use std::task::Context;

use http::{Extensions, Response};
use tokio::time::Instant;

use super::options::{ResponseHead, Settling};
use crate::decision::Decision;
use crate::headers;
use crate::headers::{Headers, Numbers, OtherFields};
use crate::observe::EventKind;
use crate::policy::{Op, Policy};
use crate::reservation::{Correction, Hits, HitsOfResponse, ObservedAccount, Reservation, Reservations, ReservedHits};
use crate::storage::StorageRequest;
use crate::waiting::{Pause, Stage};

/// The work that is left when the response of an admitted request is ready.
pub(crate) struct PostResponse {
    pub(crate) headers: Headers,
    pub(crate) other_fields: Option<OtherFields>,
    pub(crate) settlement: Settlement,
}

/// The settlement of a request.
#[expect(clippy::large_enum_variant, reason = "a `PostResponse` is on the heap already")]
pub(crate) enum Settlement {
    /// The head of the response settles the request. Without `Settling`, the request keeps its
    /// estimated cost.
    ByResponse(Hits, Option<Arc<Settling>>),
    /// A [`Reservation`] settles the request. If it was dropped, the head of the response does.
    Later(HitsOfResponse, Arc<Settling>),
}

impl Settlement {
    /// Returns the settlement of a request. If a handler settles the request, inserts a
    /// [`Reservation`] into `extensions`, with the decision that `decide` returns.
    pub(super) fn begin(
        settling: Option<&Arc<Settling>>,
        hits: Hits,
        storage_request: StorageRequest<'_>,
        decide: impl FnOnce() -> Decision,
        extensions: &mut Extensions,
    ) -> Self {
        match settling {
            Some(settling) if settling.is_later => {
                let hits = ReservedHits::new(storage_request.policy.clone(), storage_request.cost, hits);
                let reservation = Reservation::of_layer(decide(), Arc::clone(&hits));
                Reservations::insert(reservation, extensions);
                Self::Later(HitsOfResponse(hits), Arc::clone(settling))
            }
            settling => Self::ByResponse(hits, settling.cloned()),
        }
    }
}

impl PostResponse {
    /// Polls the shadow checks.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        match &mut self.settlement {
            Settlement::ByResponse(hits, _) => hits.poll(cx),
            Settlement::Later(hits, _) => hits.poll(cx),
        }
    }

    /// Settles the hits of the request and writes the header fields of its response.
    pub(crate) fn settle<B>(self, response: &mut Response<B>, mut numbers: Option<Numbers>) {
        let Self { headers, mut other_fields, settlement } = self;
        let settled = match settlement {
            Settlement::ByResponse(hits, settling) => {
                let settled =
                    hits.settle(settling.and_then(|settling| settling.correction(&ResponseHead::of(response))));
                // A task continues a settlement that is dropped before its end.
                settled.map(|(hit, _)| hit)
            }
            Settlement::Later(hits, settling) => {
                if settling.is_by_response() {
                    hits.settle_abandoned(|| settling.correction(&ResponseHead::of(response)));
                }
                hits.settled()
            }
        };
        if let Some(settled) = settled {
            if settled.is_refunded {
                numbers = numbers.map(Numbers::without_wait);
                other_fields = other_fields.map(OtherFields::without_wait);
            }
            if settled.is_complete
                && (headers.writes_x_rate_limit() || headers.writes_other_fields())
                && let Some(now) = settled.account.peek_now(settled.cost)
            {
                numbers = headers.numbers_of(&now);
                other_fields =
                    headers.other_fields_of(&now, &settled.account.account.policy, &settled.account.account.key);
            }
        }
        headers::write_admitted(response, numbers, other_fields);
    }
}

/// The hit of a waiting request. Dropping this while `delayed` is set refunds the hit, which frees
/// the hit's slot in the queue of a leaky bucket if no later hit is in the queue.
pub(crate) struct HeldHit {
    account: ObservedAccount,
    cost: u32,
    /// The decision, while the request waits for its delay and then for the inner service.
    pub(crate) delayed: Option<Box<Decision>>,
}

impl HeldHit {
    pub(crate) fn new(account: ObservedAccount, cost: u32) -> Self {
        Self { account, cost, delayed: None }
    }

    /// Sets the policy, which may have changed while the request waited.
    pub(crate) fn set_policy(&mut self, policy: Policy) {
        self.account.account.policy = policy;
    }

    /// Returns the stage of the waiting request. Reports a delayed decision when this has it, so that
    /// the drop of this refunds the hit if the observer panics.
    pub(crate) fn pause(&mut self, pause: Pause) -> Stage {
        match pause {
            Pause::Turn(turn) => Stage::Turn(turn),
            Pause::Delay(decision) => {
                let decision = self.delayed.insert(decision);
                self.account.since = Instant::now();
                self.account.report(EventKind::Decided(decision));
                Stage::Delay
            }
        }
    }

    pub(crate) fn storage_request(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.account.account.request(op, self.cost)
    }

    /// Returns the time of the decision, or a little later.
    pub(crate) fn since(&self) -> Instant {
        self.account.since
    }

    /// Peeks at the key after the delay. Returns `None` if the storage fails or is not immediately
    /// ready.
    pub(crate) fn peek_now(&self) -> Option<Decision> {
        self.account.peek_now(self.cost)
    }
}

impl Drop for HeldHit {
    fn drop(&mut self) {
        if let Some(decision) = self.delayed.take() {
            drop(self.account.settle(&decision, Correction::Cost(0)));
        }
    }
}
