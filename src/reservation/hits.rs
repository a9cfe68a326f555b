//! The hits of one request, which are settled together: those on its policies, and its shadow checks.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Context;

use tokio::runtime::Handle;

use super::future::{SettleFuture, in_runtime};
use super::limited_key::ObservedKey;
use super::settle::{Correction, StartedLock};
use super::shadow::ShadowCheck;
use crate::decision::Decision;
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::storage::StorageFuture;
use crate::sync::unpoisoned;

/// The hits of a request on its policies, and its hits on shadow limits.
pub(crate) struct RequestHits {
    /// The hits on the policies. Empty if they are never settled, or in shadow mode. A hit of cost 0 is
    /// never corrected. It is kept for the header fields.
    pub(crate) spent: Vec<SpentHit>,
    pub(crate) shadow_checks: Vec<ShadowCheck>,
}

/// A hit on a policy. Its cost may be 0.
pub(crate) struct SpentHit {
    pub(crate) observed: ObservedKey,
    pub(crate) decision: Decision,
    /// The lock that the hit has started.
    pub(crate) started_lock: Option<StartedLock>,
}

/// A hit on a policy whose request was settled.
pub(crate) struct SettledHit {
    pub(crate) observed: ObservedKey,
    /// The estimated cost, which is that of the next request like this one.
    pub(crate) cost: u32,
    /// `true` if the hit was refunded in part or entirely.
    pub(crate) is_refunded: bool,
    /// `true` if the storage replied immediately.
    pub(crate) is_complete: bool,
}

impl RequestHits {
    /// No hits. A settlement does nothing.
    pub(crate) const NONE: Self = Self { spent: Vec::new(), shadow_checks: Vec::new() };

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        for shadow_check in &mut self.shadow_checks {
            shadow_check.poll(cx);
        }
    }

    /// Corrects all hits. `None` keeps their cost. Returns the hits on the policies, if one of them was
    /// corrected.
    pub(crate) fn settle(self, correction: Option<Correction>) -> Vec<(SettledHit, SettleFuture)> {
        for shadow_check in self.shadow_checks {
            shadow_check.settle(correction);
        }
        let corrects = |hit: &SpentHit| correction.is_some_and(|by| by != Correction::Cost(hit.decision.cost()));
        let corrects = |hit: &SpentHit| hit.decision.cost() > 0 && corrects(hit);
        let corrects_any = self.spent.iter().any(corrects);
        let settle = |SpentHit { observed, decision, started_lock }| {
            let cost = decision.cost();
            if let Some(lock) = started_lock {
                lock.report_unless_refunded(correction, cost);
            }
            let correction = correction.filter(|_| corrects_any)?;
            let settling = match cost {
                0 => SettleFuture::without_report(StorageFuture::ok(())),
                _ => observed.settle(&decision, correction),
            };
            let (is_refunded, is_complete) = (cost > 0 && correction.refunds(cost), settling.is_done());
            Some((SettledHit { observed, cost, is_refunded, is_complete }, settling))
        };
        self.spent.into_iter().filter_map(settle).collect()
    }

    /// Keeps the cost of all hits, and reports that nothing has settled them.
    fn abandon(self) {
        for SpentHit { observed, decision, .. } in self.spent.into_iter().filter(|hit| hit.decision.cost() > 0) {
            observed.report(EventKind::Unsettled(&decision));
        }
        self.shadow_checks.into_iter().for_each(ShadowCheck::abandon);
    }
}

/// The hits of a request that a [`Reservation`](crate::Reservation) settles, behind a mutex. The
/// reservation and the response share them.
pub(crate) struct SharedHits {
    /// The policies of the request. The first one has made the decision.
    policies: Vec<Policy>,
    /// The runtime of the request. The reservation may be settled in a thread outside of it.
    runtime: Option<Handle>,
    state: Mutex<HitsState>,
}

enum HitsState {
    Open(RequestHits),
    Settled {
        /// `None` if the hits keep their cost.
        correction: Option<Correction>,
        /// The settled hits, until the response has reported them.
        hits: Vec<SettledHit>,
    },
}

impl SharedHits {
    pub(crate) fn new(policies: Vec<Policy>, hits: RequestHits) -> Arc<Self> {
        let runtime = Handle::try_current().ok();
        Arc::new(Self { policies, runtime, state: Mutex::new(HitsState::Open(hits)) })
    }

    pub(super) fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// Corrects the hits. `None` keeps their cost. The reservation calls it at most once.
    pub(super) fn settle(&self, correction: Option<Correction>) -> SettleFuture {
        let settled = HitsState::Settled { correction, hits: Vec::new() };
        let HitsState::Open(hits) = mem::replace(&mut *self.state(), settled) else { unreachable!("settled by value") };
        // The lock is not held, because the storage may take long, and the observer may use the
        // response.
        let settled = in_runtime(self.runtime.as_ref(), || hits.settle(correction));
        let (hits, settling): (Vec<_>, Vec<_>) = settled.into_iter().unzip();
        *self.state() = HitsState::Settled { correction, hits };
        SettleFuture::all(settling, self.runtime.as_ref())
    }

    fn state(&self) -> MutexGuard<'_, HitsState> {
        unpoisoned(self.state.lock())
    }

    /// Puts back a shadow check that was taken out to be polled. If the hits were settled
    /// meanwhile, settles the check immediately.
    fn put_back(&self, shadow_check: ShadowCheck) {
        let mut state = self.state();
        match &mut *state {
            HitsState::Open(hits) => hits.shadow_checks.push(shadow_check),
            &mut HitsState::Settled { correction, .. } => {
                drop(state);
                shadow_check.settle(correction);
            }
        }
    }
}

/// Hits that nothing has settled keep their estimated cost.
impl Drop for SharedHits {
    fn drop(&mut self) {
        let closed = HitsState::Settled { correction: None, hits: Vec::new() };
        let state = mem::replace(unpoisoned(self.state.get_mut()), closed);
        if let HitsState::Open(hits) = state {
            in_runtime(self.runtime.as_ref(), || hits.abandon());
        }
    }
}

/// The response's handle to the hits of a reservation.
pub(crate) struct HitsOfResponse(pub(crate) Arc<SharedHits>);

impl HitsOfResponse {
    pub(crate) fn poll(&self, cx: &mut Context<'_>) {
        // The lock is not held, because the storage may take long, and the observer may use the
        // reservation.
        for mut shadow_check in self.undecided() {
            shadow_check.poll(cx);
            self.0.put_back(shadow_check);
        }
    }

    /// Takes out the shadow checks that are not decided yet.
    fn undecided(&self) -> Vec<ShadowCheck> {
        match &mut *self.0.state() {
            HitsState::Open(hits) => hits.shadow_checks.extract_if(.., |check| check.is_undecided()).collect(),
            HitsState::Settled { .. } => Vec::new(),
        }
    }

    /// Corrects the hits if their reservation was dropped and has not settled them. Without a
    /// correction, they keep their cost.
    pub(crate) fn settle_abandoned(&self, correction: impl FnOnce() -> Option<Correction>) {
        let is_abandoned = Arc::strong_count(&self.0) == 1 && matches!(*self.0.state(), HitsState::Open(_));
        if is_abandoned {
            drop(self.0.settle(correction()));
        }
    }

    /// Takes the settled hits, for the response to report them. Returns none if the reservation is
    /// not settled yet, if it has no hit on a policy (cost 0 or shadow mode), or at a second call.
    pub(crate) fn settled(&self) -> Vec<SettledHit> {
        match &mut *self.0.state() {
            HitsState::Open(_) => Vec::new(),
            HitsState::Settled { hits, .. } => mem::take(hits),
        }
    }
}

/// After the response, nothing polls the request's shadow checks any more. Tasks continue the
/// undecided ones.
impl Drop for HitsOfResponse {
    fn drop(&mut self) {
        for shadow_check in self.undecided() {
            let hits = Arc::clone(&self.0);
            shadow_check.decide_in_task(move |decided| hits.put_back(decided));
        }
    }
}
