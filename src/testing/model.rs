use std::collections::HashMap;

use crate::{Decision, Key, Op, Policy, Timestamp};

/// What every storage must agree with: a map and the pure function.
#[derive(Clone, Debug, Default)]
pub struct Model(HashMap<(String, Key), Vec<crate::strategy::State>>);

impl Model {
    /// Decides at `now`.
    pub fn decide(&mut self, policy: &Policy, key: &Key, op: Op, cost: u32, now: Timestamp) -> Decision {
        policy.decide(self.states(policy, key), now, op, cost)
    }

    /// Gives back at `now`.
    pub fn refund(&mut self, policy: &Policy, key: &Key, decision: &Decision, now: Timestamp) {
        policy.refund(self.states(policy, key), now, decision);
    }

    /// Forgets the key.
    pub fn clear(&mut self, policy: &Policy, key: &Key) {
        self.states(policy, key).fill_with(Default::default);
    }

    fn states(&mut self, policy: &Policy, key: &Key) -> &mut [crate::strategy::State] {
        let states = self.0.entry((policy.identity().to_owned(), key.clone())).or_default();
        states.resize_with(policy.limits().len(), Default::default);
        states
    }
}
