//! The states of a key while jobs are done on them, one after another.

use std::time::Duration;

use super::job::Command;
use super::skew::View;
use crate::storage::text;
use crate::strategy::State;
use crate::{Decision, Op, Policy, Timestamp};

/// States are kept for longer than they matter, by this or by `max_skew` if that is more. A node whose
/// clock is behind must still find the instant of the last decision.
const GRACE: Duration = Duration::from_millis(500);

/// What stands under a key, taken apart for the policy that is being asked, and put together again for another one of that name.
#[derive(Debug)]
pub(super) struct BatchQueue<'a> {
    loaded: &'a str,
    is_moved: bool,
    now: Timestamp,
    text: String,
    until: Timestamp,
    open: Option<Open>,
    changed: bool,
    cleared: bool,
}

#[derive(Debug)]
struct Open {
    policy: Policy,
    states: Vec<State>,
    changed: bool,
}

impl<'a> BatchQueue<'a> {
    pub(super) fn new(loaded: &'a str, view: View<'_>) -> Self {
        let View { at: now, states, is_moved } = view;
        let (loaded, text) = (text::states(loaded), states.into_owned());
        Self { loaded, is_moved, now, text, until: now, open: None, changed: is_moved, cleared: false }
    }

    /// Does one job.
    pub(super) fn work(&mut self, policy: &Policy, want: &Command) -> Option<Decision> {
        let now = self.now;
        self.cleared |= matches!(want, Command::Clear);
        let open = self.open(policy);
        let (decision, changed) = match want {
            Command::Hit(cost) => {
                let before = open.states.clone();
                let decision = policy.decide(&mut open.states, now, Op::Hit, *cost);
                let changed = decision.is_admitted() || open.states != before;
                (Some(decision), changed)
            }
            Command::Refund(decision) => {
                policy.refund(&mut open.states, now, decision);
                (None, true)
            }
            Command::Clear => {
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

    /// Returns the text to store and how long to keep it, or `None` if the states are as they were loaded.
    ///
    /// The text has the instant of the decision. A refund of all units leaves nothing but that instant: a
    /// node whose clock is behind could decide earlier otherwise. Clearing a key removes the instant.
    pub(super) fn finish(mut self, max_skew: Duration) -> Option<(String, Duration)> {
        self.close();
        if !self.changed || self.text == self.loaded {
            return None;
        }
        let keep = Duration::from_micros(self.until.since(self.now)) + max_skew.max(GRACE);
        let is_bare = max_skew.is_zero() || self.cleared && self.text.is_empty();
        Some((if is_bare { self.text } else { text::with_instant(self.now, &self.text) }, keep))
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
        let is_moved = self.is_moved;
        if let Some(open) = self.open.take().filter(|open| open.changed || is_moved) {
            (self.text, self.until) = text::write(&open.policy, &open.states, &self.text, self.now);
        }
    }
}
