use std::collections::HashMap;

use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::strategy::State;
use crate::time::Timestamp;

/// The reference implementation of a storage: a map of states in memory, without a clock.
///
/// A state belongs to the [identity](Policy::identity) of a policy, a key, and the
/// [digest](Policy::limit_digests) of a limit. Limits that differ in strategy, period or position
/// in the policy have separate states.
#[derive(Clone, Debug, Default)]
pub struct Model(HashMap<(String, Key, u32), State>);

impl Model {
    /// Decides on `cost` units of the key at the time `now`, like
    /// [`Storage::decide`](crate::Storage::decide).
    pub fn decide(&mut self, policy: &Policy, key: &Key, op: Op, cost: u32, now: Timestamp) -> Decision {
        self.with_states(policy, key, |states| policy.decide(states, now, op, cost))
    }

    /// Corrects the cost of the hit that returned `decision` to `actual` units at the time `now`,
    /// like [`Policy::settle`].
    pub fn settle(&mut self, policy: &Policy, key: &Key, decision: &Decision, actual: u32, now: Timestamp) {
        self.with_states(policy, key, |states| policy.settle(states, now, decision, actual));
    }

    /// Removes the states of the key in all limits of the policy.
    pub fn clear(&mut self, policy: &Policy, key: &Key) {
        self.with_states(policy, key, |states| states.fill(State::Fresh));
    }

    fn with_states<T>(&mut self, policy: &Policy, key: &Key, change: impl FnOnce(&mut [State]) -> T) -> T {
        let name = |digest: &u32| (policy.identity().to_owned(), key.clone(), *digest);
        let names: Vec<_> = policy.limit_digests().iter().map(name).collect();
        let mut states: Vec<State> = names.iter().map(|name| self.0.remove(name).unwrap_or_default()).collect();
        let answer = change(&mut states);
        self.0.extend(names.into_iter().zip(states));
        answer
    }
}
