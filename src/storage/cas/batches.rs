//! The states of all keys during a batch of jobs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::batch::Batch;
use super::job::{JobResult, JobWork, same_key};
use super::skew::View;

/// A text to store, and the time to keep it.
pub(super) type NewText = (String, Duration);

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
