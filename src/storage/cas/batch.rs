//! Executes the jobs of a key on its states, one after another.

use std::time::Duration;

use super::job::Command;
use super::skew::View;
use crate::storage::text;
use crate::strategy::State;
use crate::{Decision, Op, Policy, Timestamp};

/// The shortest time for which the store keeps states after they expire. If `max_skew` is longer,
/// it applies instead. A node whose clock is behind must still find the instant of the last
/// decision.
const GRACE: Duration = Duration::from_millis(500);

/// The states of a key during a batch of jobs.
///
/// The text is parsed for the policy of the current job. If the next job has a different policy
/// with the same name, the states are written back and parsed again for that policy.
#[derive(Debug)]
pub(in crate::storage) struct Batch<'a> {
    /// The stored states before the first job.
    loaded: &'a str,
    /// `true` if the states were moved back in time, so that they differ from the stored ones.
    is_moved: bool,
    now: Timestamp,
    text: String,
    /// The instant at which the last state in `text` expires.
    until: Timestamp,
    parsed: Option<Parsed>,
    changed: bool,
    cleared: bool,
}

/// The states of one policy.
#[derive(Debug)]
struct Parsed {
    policy: Policy,
    states: Vec<State>,
    changed: bool,
}

impl<'a> Batch<'a> {
    pub(in crate::storage) fn new(loaded: &'a str, view: View<'_>) -> Self {
        let View { at: now, states, is_moved } = view;
        let (loaded, text) = (text::states(loaded), states.into_owned());
        Self { loaded, is_moved, now, text, until: now, parsed: None, changed: is_moved, cleared: false }
    }

    /// Executes one command. Returns the decision if the command is a hit or a charge, and `None`
    /// for a settlement or a clear.
    pub(in crate::storage) fn execute(&mut self, policy: &Policy, command: &Command) -> Option<Decision> {
        let now = self.now;
        self.cleared |= matches!(command, Command::Clear);
        let parsed = self.parse(policy);
        let (decision, changed) = match command {
            Command::Hit(cost) => {
                let before = parsed.states.clone();
                let decision = policy.decide(&mut parsed.states, now, Op::Hit, *cost);
                let changed = decision.is_admitted() || parsed.states != before;
                (Some(decision), changed)
            }
            Command::Charge(units) => (Some(policy.decide(&mut parsed.states, now, Op::Charge, *units)), true),
            Command::Settle(decision, actual) => {
                policy.settle(&mut parsed.states, now, decision, *actual);
                (None, true)
            }
            Command::Clear => {
                parsed.states.fill(State::Fresh);
                (None, true)
            }
        };
        parsed.changed |= changed;
        self.changed |= changed;
        decision
    }

    /// Returns `true` if there is a change to store.
    pub(super) fn is_changed(&self) -> bool {
        self.changed
    }

    /// Returns the text to store and the time to keep it, or `None` if nothing has changed.
    ///
    /// The text begins with the instant of the decision. Without this instant, a node whose clock
    /// is behind could decide at an earlier time. After a refund of all units, the text is only the
    /// instant. The text has no instant if `max_skew` is zero, or if a clear has removed all
    /// states.
    pub(in crate::storage) fn finish(mut self, max_skew: Duration) -> Option<(String, Duration)> {
        self.write_back();
        if !self.changed || self.text == self.loaded {
            return None;
        }
        let keep = Duration::from_micros(self.until.since(self.now)) + max_skew.max(GRACE);
        let is_bare = max_skew.is_zero() || self.cleared && self.text.is_empty();
        Some((if is_bare { self.text } else { text::with_instant(self.now, &self.text) }, keep))
    }

    /// Returns the states of this policy. Writes back those of the previous policy.
    fn parse(&mut self, policy: &Policy) -> &mut Parsed {
        if self.parsed.as_ref().is_none_or(|parsed| parsed.policy != *policy) {
            self.write_back();
        }
        let text = &self.text;
        self.parsed.get_or_insert_with(|| Parsed {
            policy: policy.clone(),
            states: text::read(policy, text),
            changed: false,
        })
    }

    /// Writes the states of the current policy back to the text.
    fn write_back(&mut self) {
        let is_moved = self.is_moved;
        if let Some(parsed) = self.parsed.take().filter(|parsed| parsed.changed || is_moved) {
            (self.text, self.until) = text::write(&parsed.policy, &parsed.states, &self.text, self.now);
        }
    }
}
