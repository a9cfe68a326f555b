//! The states of a key while jobs are done on them, one after another.

use std::time::Duration;

use super::job::Want;
use crate::storage::text;
use crate::strategy::State;
use crate::{Decision, Op, Policy, Timestamp};

/// How much longer than a state matters it is kept: the clocks of two machines may differ.
const GRACE: Duration = Duration::from_millis(500);

/// What stands under a key, taken apart for the policy that is being asked, and put together again for another one of that name.
#[derive(Debug)]
pub(super) struct Desk<'a> {
    loaded: &'a str,
    now: Timestamp,
    text: String,
    until: Timestamp,
    open: Option<Open>,
    changed: bool,
}

#[derive(Debug)]
struct Open {
    policy: Policy,
    states: Vec<State>,
    changed: bool,
}

impl<'a> Desk<'a> {
    pub(super) fn new(loaded: &'a str, now: Timestamp) -> Self {
        Self { loaded, now, text: loaded.to_owned(), until: now, open: None, changed: false }
    }

    /// Does one job.
    pub(super) fn work(&mut self, policy: &Policy, want: &Want) -> Option<Decision> {
        let now = self.now;
        let open = self.open(policy);
        let (decision, changed) = match want {
            Want::Hit(cost) => {
                let decision = policy.decide(&mut open.states, now, Op::Hit, *cost);
                let counts = || policy.limits().iter().any(|limit| limit.strategy().counts_refusals());
                let changed = decision.is_admitted() || counts();
                (Some(decision), changed)
            }
            Want::Refund(decision) => {
                policy.refund(&mut open.states, now, decision);
                (None, true)
            }
            Want::Clear => {
                open.states.fill(State::Fresh);
                (None, true)
            }
        };
        open.changed |= changed;
        self.changed |= changed;
        decision
    }

    /// Whether anything done so far has to be stored.
    pub(super) fn is_changed(&self) -> bool {
        self.changed
    }

    /// What is to be stored instead of what was loaded, and for how long; `None` when it is the same.
    pub(super) fn finish(mut self) -> Option<(String, Duration)> {
        self.close();
        let keep = Duration::from_micros(self.until.since(self.now)) + GRACE;
        (self.changed && self.text != self.loaded).then_some((self.text, keep))
    }

    fn open(&mut self, policy: &Policy) -> &mut Open {
        if self.open.as_ref().is_none_or(|open| open.policy != *policy) {
            self.close();
        }
        let text = &self.text;
        self.open.get_or_insert_with(|| Open {
            policy: policy.clone(),
            states: text::read(policy, text),
            changed: false,
        })
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take().filter(|open| open.changed) {
            (self.text, self.until) = text::write(&open.policy, &open.states, &self.text, self.now);
        }
    }
}
