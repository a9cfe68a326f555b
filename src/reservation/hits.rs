//! The hits of one request, which are settled together.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Context;

use tokio::runtime::Handle;

use super::account::ObservedAccount;
use super::settling::Settling;
use super::shadow_check::ShadowCheck;
use crate::background::in_runtime;
use crate::decision::Decision;
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::storage::StorageFuture;
use crate::sync::unpoisoned;

/// The hit of a request on the policy, and its hits on shadow limits.
pub(crate) struct Hits {
    /// The hit on the policy. `None` if it is never settled, or in shadow mode.
    pub(crate) spent: Option<(ObservedAccount, Decision)>,
    pub(crate) shadow_checks: Vec<ShadowCheck>,
}

/// A hit on the policy whose cost was corrected.
pub(crate) struct SettledHit {
    pub(crate) account: ObservedAccount,
    /// The estimated cost, which is that of the next request like this one.
    pub(crate) cost: u32,
    /// `true` if the hit was refunded in part or entirely.
    pub(crate) is_refunded: bool,
    /// `true` if the storage replied immediately.
    pub(crate) is_complete: bool,
}

impl Hits {
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        for shadow_check in &mut self.shadow_checks {
            shadow_check.poll(cx);
        }
    }

    /// Corrects the cost of all hits to `actual` units. `None` keeps their cost. Returns the hit on
    /// the policy, if its cost was corrected.
    pub(crate) fn settle(self, actual: Option<u32>) -> Option<(SettledHit, Settling)> {
        for shadow_check in self.shadow_checks {
            shadow_check.settle(actual);
        }
        let ((account, decision), actual) =
            self.spent.zip(actual).filter(|((_, hit), actual)| *actual != hit.cost())?;
        let (cost, settling) = (decision.cost(), account.settle(&decision, actual));
        let is_complete = settling.is_done();
        Some((SettledHit { account, cost, is_refunded: actual < cost, is_complete }, settling))
    }

    /// Keeps the cost of all hits, and reports that nothing has settled them.
    fn keep(self) {
        if let Some((account, decision)) = self.spent {
            account.report(EventKind::Unsettled(&decision));
        }
        self.shadow_checks.into_iter().for_each(ShadowCheck::keep);
    }
}

/// The hits of a request that a [`Reservation`](crate::Reservation) settles. The reservation and
/// the response share them.
pub(crate) struct ReservedHits {
    policy: Policy,
    cost: u32,
    /// The runtime of the request. The reservation may be settled in a thread outside of it.
    runtime: Option<Handle>,
    state: Mutex<ReservedState>,
}

enum ReservedState {
    Open(Hits),
    Settled {
        actual: u32,
        /// The settled hit, until the response has reported it.
        hit: Option<SettledHit>,
    },
}

impl ReservedHits {
    pub(crate) fn new(policy: Policy, cost: u32, hits: Hits) -> Arc<Self> {
        let runtime = Handle::try_current().ok();
        Arc::new(Self { policy, cost, runtime, state: Mutex::new(ReservedState::Open(hits)) })
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Corrects the cost of the hits. The reservation calls it at most once. A request that costs
    /// nothing has nothing to settle.
    pub(super) fn settle(&self, actual: u32) -> Settling {
        let actual = if self.cost == 0 { 0 } else { actual };
        let settled = ReservedState::Settled { actual, hit: None };
        let ReservedState::Open(hits) = mem::replace(&mut *self.state(), settled) else {
            unreachable!("settled by value")
        };
        // The lock is not held, because the storage may take long, and the observer may use the
        // response.
        let settled = in_runtime(self.runtime.as_ref(), || hits.settle(Some(actual)));
        let Some((hit, settling)) = settled else { return Settling::done(StorageFuture::ok(())) };
        *self.state() = ReservedState::Settled { actual, hit: Some(hit) };
        settling.in_runtime(self.runtime.as_ref())
    }

    fn state(&self) -> MutexGuard<'_, ReservedState> {
        unpoisoned(self.state.lock())
    }

    /// Puts back a shadow check that was taken out to be polled. If the hits were settled
    /// meanwhile, settles the check immediately.
    fn put_back(&self, shadow_check: ShadowCheck) {
        let mut state = self.state();
        match &mut *state {
            ReservedState::Open(hits) => hits.shadow_checks.push(shadow_check),
            &mut ReservedState::Settled { actual, .. } => {
                drop(state);
                shadow_check.settle(Some(actual));
            }
        }
    }
}

/// Hits that nothing has settled keep their estimated cost.
impl Drop for ReservedHits {
    fn drop(&mut self) {
        let closed = ReservedState::Settled { actual: self.cost, hit: None };
        let state = mem::replace(unpoisoned(self.state.get_mut()), closed);
        if let ReservedState::Open(hits) = state {
            in_runtime(self.runtime.as_ref(), || hits.keep());
        }
    }
}

/// The response's handle to the hits of a reservation.
pub(crate) struct HitsOfResponse(pub(crate) Arc<ReservedHits>);

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
            ReservedState::Open(hits) => hits.shadow_checks.extract_if(.., |check| check.is_undecided()).collect(),
            ReservedState::Settled { .. } => Vec::new(),
        }
    }

    /// Takes the settled hit, for the response to report it. Returns `None` if the reservation is
    /// not settled yet, if it has no hit on the policy (cost 0 or shadow mode), or at a second call.
    pub(crate) fn settled(&self) -> Option<SettledHit> {
        match &mut *self.0.state() {
            ReservedState::Open(_) => None,
            ReservedState::Settled { hit, .. } => hit.take(),
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
