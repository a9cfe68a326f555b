//! Executes jobs on the states of their keys, one after another.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::job::{Command, JobResult, JobWork, same_key};
use super::skew::View;
use crate::decision::Decision;
use crate::policy::{Member, Op, Policy};
use crate::storage::text::{self, TextHead};
use crate::storage::{StorageError, StorageRequest};
use crate::strategy::State;
use crate::time::Timestamp;

/// The shortest time for which the store keeps states after they expire. If `max_skew` is longer,
/// it applies instead. A node whose clock is behind must still find the instant of the last
/// decision.
const GRACE: Duration = Duration::from_millis(500);

/// A text to store, and the time to keep it.
pub(in crate::storage) type NewText = (String, Duration);

/// The states of a key during a batch of jobs.
///
/// The text is parsed for the policy of the current job. If the next job has a different policy
/// with the same name, the states are written back and parsed again for that policy.
#[derive(Debug)]
pub(in crate::storage) struct Batch<'a> {
    /// The stored states before the first job.
    loaded: &'a str,
    now: Timestamp,
    /// The microseconds by which this node's clock is behind `now`.
    behind: u64,
    /// The time of the key to store.
    head: Option<TextHead>,
    /// `true` if the text must be stored even if no state has changed.
    must_store: bool,
    /// The error of all commands before a clear, if the text has an unknown version.
    unknown: Option<StorageError>,
    text: String,
    /// The instant at which the last state in `text` expires. `None` before the states are written back.
    until: Option<Timestamp>,
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
    pub(in crate::storage) fn new(view: View<'a>) -> Self {
        let View { at: now, behind, states: loaded, head, has_new_offset: must_store, unknown } = view;
        let behind = behind.micros;
        let (parsed, changed, cleared) = (None, must_store, false);
        let text = loaded.to_owned();
        Self { loaded, now, behind, head, must_store, unknown, text, until: None, parsed, changed, cleared }
    }

    /// Executes one command. Returns the decision if the command is a hit or a charge, and `None`
    /// for a settlement or a clear.
    ///
    /// # Errors
    ///
    /// Returns an error if the text has an unknown version, unless the command is a clear.
    pub(in crate::storage) fn execute(
        &mut self,
        policy: &Policy,
        command: &Command,
    ) -> Result<Option<Decision>, StorageError> {
        let (now, behind) = (self.now, self.behind);
        if matches!(command, Command::Clear) {
            self.cleared = true;
            self.must_store |= self.unknown.take().is_some();
        }
        if let Some(error) = &self.unknown {
            return Err(error.clone());
        }
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
                let decision = (**decision).clone();
                let at = decision.at().plus(behind);
                policy.settle(&mut parsed.states, now, &decision.with_at(at), *actual);
                (None, true)
            }
            Command::Clear => {
                parsed.states.fill(State::Fresh);
                (None, true)
            }
        };
        parsed.changed |= changed;
        self.changed |= changed;
        Ok(decision.map(|decision| decision.with_at(now.minus(behind))))
    }

    /// Decides on several keys together, as [`Policy::decide_all`] does. Each batch is of the key of the
    /// request in the same place.
    ///
    /// # Errors
    ///
    /// Returns an error if a text has an unknown version. Then nothing is spent.
    pub(in crate::storage) fn decide_all(
        batches: &mut [Self],
        requests: &[StorageRequest<'_>],
    ) -> Result<Vec<Decision>, StorageError> {
        batches.iter().find_map(|batch| batch.unknown.clone()).map_or(Ok(()), Err)?;
        let mut before = Vec::with_capacity(batches.len());
        let mut members = Vec::with_capacity(batches.len());
        for (batch, &StorageRequest { policy, op, cost, .. }) in batches.iter_mut().zip(requests) {
            let now = batch.now;
            let states = &mut batch.parse(policy).states;
            before.push(states.clone());
            members.push(Member { policy, states, now, op, cost });
        }
        let decisions = Policy::decide_all(&mut members);
        for (batch, before) in batches.iter_mut().zip(before) {
            if let Some(parsed) = batch.parsed.as_mut().filter(|parsed| parsed.states != before) {
                (parsed.changed, batch.changed) = (true, true);
            }
        }
        let own_time = |(decision, batch): (Decision, &Self)| decision.with_at(batch.now.minus(batch.behind));
        Ok(decisions.into_iter().zip(&*batches).map(own_time).collect())
    }

    /// Returns `true` if there is a change to store.
    pub(super) fn is_changed(&self) -> bool {
        self.changed
    }

    /// Returns the text to store and the time to keep it, or `None` if nothing has changed. A new offset of
    /// a text that no command has read is stored with the next one.
    ///
    /// The text begins with the time of the key. Without it, a node whose clock is behind could
    /// decide at an earlier time. After a refund of all units, the text has only this time. The
    /// text has no time if `max_skew` is zero, or if a clear has removed all states.
    pub(in crate::storage) fn finish(mut self, max_skew: Duration) -> Option<NewText> {
        self.write_back();
        if !self.changed || self.text == self.loaded && !self.must_store {
            return None;
        }
        let keep = Duration::from_micros(self.until?.since(self.now)) + max_skew.max(GRACE);
        let head = self.head.filter(|_| !(self.cleared && self.text.is_empty()));
        Some((text::join(head.as_ref(), &self.text), keep))
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
        let must_store = self.must_store;
        if let Some(parsed) = self.parsed.take().filter(|parsed| parsed.changed || must_store) {
            let (text, until) = text::write(&parsed.policy, &parsed.states, &self.text, self.now);
            (self.text, self.until) = (text, Some(until));
        }
    }
}

/// The states of each key of a batch.
#[derive(Debug, Default)]
pub(super) struct Batches<'a>(HashMap<&'a Arc<str>, Batch<'a>>);

impl<'a> Batches<'a> {
    pub(super) fn add(&mut self, key: &'a Arc<str>, view: View<'a>) {
        self.0.insert(key, Batch::new(view));
    }

    /// Executes a job, whose keys were added.
    pub(super) fn execute(&mut self, work: &JobWork) -> JobResult {
        match work {
            JobWork::One { key, policy, command } => {
                let batch = self.0.get_mut(key).ok_or_else(same_key)?;
                Ok(batch.execute(policy, command)?.into_iter().collect())
            }
            JobWork::All(members) => {
                let (mut keys, mut batches) = (Vec::new(), Vec::new());
                for (key, batch) in members.iter().filter_map(|(key, _)| self.0.remove_entry(key)) {
                    keys.push(key);
                    batches.push(batch);
                }
                let requests: Vec<_> = members.iter().map(|(_, request)| request.borrow()).collect();
                let is_complete = batches.len() == members.len();
                let decided = if is_complete { Batch::decide_all(&mut batches, &requests) } else { Err(same_key()) };
                self.0.extend(keys.into_iter().zip(batches));
                decided
            }
        }
    }

    /// Returns `true` if there is a change to store.
    pub(super) fn is_changed(&self) -> bool {
        self.0.values().any(Batch::is_changed)
    }

    /// Returns each key, with the text to store and the time to keep it, or `None` if the text has not
    /// changed.
    pub(super) fn finish(self, max_skew: Duration) -> Vec<(&'a Arc<str>, Option<NewText>)> {
        self.0.into_iter().map(|(key, batch)| (key, batch.finish(max_skew))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::skew::Skew;
    use super::*;
    use crate::quota::Quota;

    /// Guards against this defect: a text that no command has read is stored again, for the time of
    /// `max_skew` only.
    #[test]
    fn new_offset_is_stored_only_with_states_that_a_command_has_read() {
        let policy = Policy::from(Quota::per_day(10));
        let batch = || {
            let view = Skew::new(Duration::ZERO).view("k", "", Timestamp::from_micros(1_000_000));
            Batch::new(View { has_new_offset: true, ..view })
        };
        assert_eq!(batch().finish(Duration::ZERO), None);
        let mut used = batch();
        used.execute(&policy, &Command::Hit(1)).unwrap();
        let (_, keep) = used.finish(Duration::ZERO).unwrap();
        assert!(keep > Duration::from_secs(3_600), "{keep:?}");
    }
}
