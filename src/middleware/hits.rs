//! The hits of one request, which are settled together.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Context;

use tokio::runtime::Handle;

use super::context::ChargeContext;
use super::shadow_check::ShadowCheck;
use crate::decision::{Decision, OpenCharge, SettleError};
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::sync::unpoisoned;

/// The hit of a request on the policy, and its hits on shadow limits.
pub(crate) struct Hits {
    /// The hit on the policy. `None` if it is never settled, or in shadow mode.
    pub(crate) spent: Option<(ChargeContext, Decision)>,
    pub(crate) shadow_checks: Vec<ShadowCheck>,
}

/// A hit on the policy whose cost was corrected.
pub(crate) struct SettledHit {
    pub(crate) context: ChargeContext,
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
    pub(crate) fn settle(self, actual: Option<u32>) -> Option<SettledHit> {
        for shadow_check in self.shadow_checks {
            shadow_check.settle(actual);
        }
        let ((context, decision), actual) = self.spent.zip(actual)?;
        let (cost, is_complete) = (decision.cost(), context.settle(&decision, actual));
        Some(SettledHit { context, cost, is_refunded: actual < cost, is_complete })
    }

    /// Keeps the cost of all hits, and reports that nothing has settled them.
    fn keep(self) {
        if let Some((context, decision)) = self.spent {
            context.report(EventKind::Unsettled(&decision));
        }
        self.shadow_checks.into_iter().for_each(ShadowCheck::keep);
    }
}

/// The hits of a request that a [`Charge`](crate::Charge) settles.
pub(crate) struct PendingCharge {
    policy: Policy,
    cost: u32,
    /// The runtime of the request. The charge may be settled in a thread outside of it.
    runtime: Option<Handle>,
    state: Mutex<ChargeState>,
}

enum ChargeState {
    Open(Hits),
    Settled {
        actual: u32,
        /// The settled hit, until the response has reported it.
        hit: Option<SettledHit>,
    },
}

impl PendingCharge {
    pub(crate) fn new(policy: Policy, cost: u32, hits: Hits) -> Arc<Self> {
        let runtime = Handle::try_current().ok();
        Arc::new(Self { policy, cost, runtime, state: Mutex::new(ChargeState::Open(hits)) })
    }

    fn state(&self) -> MutexGuard<'_, ChargeState> {
        unpoisoned(self.state.lock())
    }

    /// Puts back a shadow check that was taken out to be polled. If the charge was settled
    /// meanwhile, settles the check immediately.
    fn put_back(&self, shadow_check: ShadowCheck) {
        let mut state = self.state();
        match &mut *state {
            ChargeState::Open(hits) => hits.shadow_checks.push(shadow_check),
            &mut ChargeState::Settled { actual, .. } => {
                drop(state);
                shadow_check.settle(Some(actual));
            }
        }
    }

    /// Calls `f` in the runtime of the request if the current thread has no runtime.
    fn in_runtime<T>(&self, f: impl FnOnce() -> T) -> T {
        let outside = self.runtime.as_ref().filter(|_| Handle::try_current().is_err());
        let _entered = outside.map(Handle::enter);
        f()
    }
}

impl OpenCharge for PendingCharge {
    fn settle(&self, actual: u32) -> Result<(), SettleError> {
        if self.cost == 0 {
            return Err(SettleError::NothingSpent);
        }
        let hits = {
            let mut state = self.state();
            if matches!(*state, ChargeState::Settled { .. }) {
                return Err(SettleError::AlreadySettled);
            }
            let ChargeState::Open(hits) = mem::replace(&mut *state, ChargeState::Settled { actual, hit: None }) else {
                unreachable!("checked above")
            };
            hits
        };
        // The lock is not held, because the storage may take long, and the observer may use the
        // charge.
        let settled = self.in_runtime(|| hits.settle(Some(actual)));
        *self.state() = ChargeState::Settled { actual, hit: settled };
        Ok(())
    }

    fn cost(&self) -> u32 {
        self.cost
    }

    fn policy(&self) -> &str {
        self.policy.identity()
    }
}

/// A charge that nothing has settled keeps its estimated cost.
impl Drop for PendingCharge {
    fn drop(&mut self) {
        let closed = ChargeState::Settled { actual: self.cost, hit: None };
        let state = mem::replace(unpoisoned(self.state.get_mut()), closed);
        if let ChargeState::Open(hits) = state {
            self.in_runtime(|| hits.keep());
        }
    }
}

/// The response's handle to a charge.
pub(crate) struct ChargeOfResponse(pub(crate) Arc<PendingCharge>);

impl ChargeOfResponse {
    pub(crate) fn poll(&self, cx: &mut Context<'_>) {
        // The lock is not held, because the storage may take long, and the observer may use the
        // charge.
        for mut shadow_check in self.undecided() {
            shadow_check.poll(cx);
            self.0.put_back(shadow_check);
        }
    }

    /// Takes out the shadow checks that are not decided yet.
    fn undecided(&self) -> Vec<ShadowCheck> {
        match &mut *self.0.state() {
            ChargeState::Open(hits) => hits.shadow_checks.extract_if(.., |check| check.is_undecided()).collect(),
            ChargeState::Settled { .. } => Vec::new(),
        }
    }

    /// Takes the settled hit, for the response to report it. Returns `None` if the charge is not
    /// settled yet, if it has no hit on the policy (cost 0 or shadow mode), or at a second call.
    pub(crate) fn settled(&self) -> Option<SettledHit> {
        match &mut *self.0.state() {
            ChargeState::Open(_) => None,
            ChargeState::Settled { hit, .. } => hit.take(),
        }
    }
}

/// After the response, nothing polls the request's shadow checks any more. Tasks continue the
/// undecided ones.
impl Drop for ChargeOfResponse {
    fn drop(&mut self) {
        for shadow_check in self.undecided() {
            let charge = Arc::clone(&self.0);
            shadow_check.decide_in_task(move |decided| charge.put_back(decided));
        }
    }
}
