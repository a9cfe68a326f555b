//! Executes the calls of a transaction.

use std::collections::HashMap;

use super::file::File;
use super::job::{Job, Work, WorkResult};
use crate::storage::cas::Batch;
use crate::storage::cas::skew::Skew;
use crate::storage::{Clock, StorageError};
use crate::time::Timestamp;

/// The answer to a call. A call fails alone if the text of its key has an unknown version.
type Reply = Result<WorkResult, StorageError>;

/// Executes the calls and returns their answers, in the same order. The state of each key is loaded
/// once, and stored once if it has changed.
pub(super) fn execute(file: &mut File, skew: &Skew, jobs: &[Job]) -> rusqlite::Result<Vec<Reply>> {
    let mut answers: Vec<Option<Reply>> = jobs.iter().map(|_| None).collect();
    let mut keys: Vec<(&str, Vec<usize>)> = Vec::new();
    let mut positions: HashMap<&str, usize> = HashMap::new();
    for (index, job) in jobs.iter().enumerate() {
        match &job.work {
            Work::Peek { key, .. } | Work::Change { key, .. } => {
                let position = *positions.entry(key).or_insert_with(|| {
                    keys.push((key, Vec::new()));
                    keys.len() - 1
                });
                keys[position].1.push(index);
            }
            Work::Check => answers[index] = Some(Ok(WorkResult::Done(0))),
            Work::DeleteAll { prefix } => answers[index] = Some(Ok(WorkResult::Done(file.delete_all(prefix)?))),
        }
    }
    let mut written = 0;
    for (key, indices) in keys {
        let jobs = indices.into_iter().map(|index| (index, &jobs[index]));
        written += execute_key(file, skew, key, jobs, &mut answers)?;
    }
    if written > 0 {
        file.sweep(written)?;
    }
    Ok(answers.into_iter().map(|answer| answer.unwrap_or(Ok(WorkResult::Done(0)))).collect())
}

/// Executes the calls on one key. If they have changed its states, returns the number of calls that
/// can change states, otherwise 0.
fn execute_key<'a>(
    file: &File,
    skew: &Skew,
    key: &str,
    jobs: impl Iterator<Item = (usize, &'a Job)>,
    answers: &mut [Option<Reply>],
) -> rusqlite::Result<u32> {
    let loaded = file.load(key)?;
    let (mut batch, mut changes): (Option<Batch<'_>>, u32) = (None, 0);
    for (index, job) in jobs {
        let now = || job.clock.as_ref().map_or_else(Timestamp::wall_clock, Clock::now);
        answers[index] = match &job.work {
            // A peek is concurrent with the hits of the same transaction, so it may ignore them.
            Work::Peek { policy, op, cost, .. } => {
                Some(skew.peek(key, &loaded, now()).peek(policy, *op, *cost).map(WorkResult::Decided))
            }
            Work::Change { policy, command, .. } => {
                changes += 1;
                let batch = batch.get_or_insert_with(|| Batch::new(skew.view(key, &loaded, now())));
                let executed = batch.execute(policy, command);
                Some(executed.map(|decision| decision.map_or(WorkResult::Done(0), WorkResult::Decided)))
            }
            Work::Check | Work::DeleteAll { .. } => None,
        };
    }
    let Some((text, keep)) = batch.and_then(|batch| batch.finish(skew.max())) else { return Ok(0) };
    file.save(key, &text, keep)?;
    Ok(changes)
}
