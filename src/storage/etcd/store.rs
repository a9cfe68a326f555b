//! Comparing and swapping, as etcd does it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::EtcdStorageError;
use super::lease::Leases;
use super::link::Members;
use super::wire::{Act, Compare, Delete, DeleteRange, Put, Range, RangeAnswer, Txn};
use crate::storage::{CasStorage, Loaded, Swapped};

/// What etcd takes in one call is 1,572,864 bytes unless it is told otherwise (`--max-request-bytes`), of which some are the key's.
const LONGEST: usize = 1_500_000;

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) members: Members,
    pub(super) leases: Arc<Leases>,
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
}

impl CasStorage for Store {
    type Error = EtcdStorageError;
    /// The revision of the last change, 0 of what is not there. It never comes again.
    type Version = i64;

    async fn load(&self, key: &str) -> Result<Loaded<i64>, EtcdStorageError> {
        let answer = self.members.ask(&Range { key: self.key(key) }, self.deadline()).await;
        answer.map(loaded).map_err(EtcdStorageError::that_counts_nothing)
    }

    async fn swap(
        &self,
        key: &str,
        version: &i64,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<i64>, EtcdStorageError> {
        let (key, deadline) = (self.key(key), self.deadline());
        let mut first = true;
        loop {
            let lease = if text.is_empty() {
                None
            } else {
                let lease = self.leases.take(keep, &self.members, deadline).await;
                Some(lease.map_err(EtcdStorageError::that_counts_nothing)?)
            };
            let change = match &lease {
                None => Act::Delete(Delete { key: key.clone() }),
                Some(lease) => Act::Put(Put { key: key.clone(), value: text.into(), lease: lease.id() }),
            };
            // What was lost to somebody else comes along at once.
            let txn = Txn {
                when: vec![Compare::last_changed_in(&key, *version)],
                then: vec![change.into()],
                otherwise: vec![Act::Range(Range { key: key.clone() }).into()],
            };
            match (self.members.ask(&txn, deadline).await, lease) {
                (Ok(answer), _) if answer.succeeded => return Ok(Swapped::Stored),
                (Ok(answer), _) => {
                    let found = answer.answers.into_iter().next().and_then(|answer| answer.range);
                    return Ok(Swapped::Lost(found.map(loaded)));
                }
                // A lease that etcd does not know (any more): nothing was written.
                (Err(error), Some(lease)) if error.is_of_the_lease() && first => lease.give_up(),
                (Err(error), _) => return Err(error),
            }
            first = false;
        }
    }

    fn longest(&self) -> Option<usize> {
        Some(LONGEST)
    }
}

impl Store {
    /// Whether etcd answers, and lets us read.
    pub(super) async fn look(&self, deadline: Instant) -> Result<(), EtcdStorageError> {
        let answer = self.members.ask(&Range { key: self.key("") }, deadline).await;
        answer.map(drop).map_err(EtcdStorageError::that_counts_nothing)
    }

    /// Deletes all keys of the prefix. Returns how many there were.
    pub(super) async fn reset(&self) -> Result<u64, EtcdStorageError> {
        let all = DeleteRange { key: self.key(""), end: format!("{};", self.prefix).into() };
        let answer = self.members.ask(&all, self.deadline()).await?;
        Ok(u64::try_from(answer.deleted).unwrap_or(0))
    }

    fn key(&self, key: &str) -> Vec<u8> {
        format!("{}:{key}", self.prefix).into()
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.deadline
    }
}

/// Nothing found is version 0 of nothing.
fn loaded(answer: RangeAnswer) -> Loaded<i64> {
    let found = answer.found.into_iter().next();
    let (value, version) = found.map_or((Vec::new(), 0), |found| (found.value, found.mod_revision));
    Loaded { text: String::from_utf8_lossy(&value).into_owned(), version, now: None }
}
