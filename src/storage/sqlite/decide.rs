//! The [`Storage`] implementation: sends each call to the worker thread, and waits for the answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

use super::job::{Job, Work, WorkResult};
use super::{SqliteStorage, error};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::calls::measured;
use crate::storage::cas::Command;
use crate::storage::ticket::{Ticket, Unanswered};
use crate::storage::{Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest, names};

/// The label `storage` of the metrics.
const LABEL: &str = "sqlite";

/// The maximum number of waiting calls.
const MAX_WAITING: usize = 1_024;

impl Storage for SqliteStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let StorageRequest { policy, key, op, cost } = request;
        let (policy, key) = (policy.clone(), self.name(policy, key));
        let work = if op == Op::Peek || cost == 0 {
            Work::Peek { policy, key, op, cost }
        } else {
            let command = if op == Op::Charge { Command::Charge(cost) } else { Command::Hit(cost) };
            Work::Change { policy, key, command }
        };
        let answer = self.call(work);
        let path = self.shared.path.clone();
        StorageFuture::new(measured(LABEL, async move {
            match answer.await? {
                WorkResult::Decided(decision) => Ok(decision),
                WorkResult::Done(_) => Err(error::ended(&path)),
            }
        }))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.update(Work::Change { policy: policy.clone(), key: self.name(policy, key), command: Command::Clear })
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let command = Command::Settle(Box::new(decision.clone()), actual);
        self.update(Work::Change { policy: policy.clone(), key: self.name(policy, key), command })
    }

    /// Checks that the file can be written to.
    fn check(&self) -> StorageFuture<()> {
        let checked = self.call(Work::Check);
        StorageFuture::new(async move { checked.await.map(drop) })
    }

    /// Deletes all keys with the prefix in one transaction.
    fn clear_all(&self) -> StorageFuture<u64> {
        let deleted = self.call(Work::DeleteAll { prefix: Arc::clone(&self.prefix) });
        let path = self.shared.path.clone();
        StorageFuture::new(async move {
            match deleted.await? {
                WorkResult::Done(deleted) => Ok(deleted),
                WorkResult::Decided(_) => Err(error::ended(&path)),
            }
        })
    }
}

impl SqliteStorage {
    /// Checks that the file can be written to. If another process holds the lock of the file, waits
    /// for at most `timeout`. Call this method before the program accepts traffic.
    ///
    /// # Errors
    ///
    /// Returns an error immediately if the file cannot be written to, and after `timeout` if the
    /// lock was not free.
    pub async fn ready(&self, timeout: Duration) -> Result<(), StorageError> {
        let longest = Duration::from_secs(365 * 86_400);
        let patient = Self { deadline: timeout.min(longest), ..self.clone() };
        patient.call(Work::Check).await.map(drop)
    }

    fn name(&self, policy: &Policy, key: &Key) -> Arc<str> {
        format!("{}:{}", self.prefix, names::of(policy, key)).into()
    }

    fn update(&self, work: Work) -> StorageFuture<()> {
        let answer = self.call(work);
        StorageFuture::new(measured(LABEL, async move { answer.await.map(drop) }))
    }

    /// Queues a call at the first poll of the returned future, and waits for its answer.
    fn call(&self, work: Work) -> impl Future<Output = Result<WorkResult, StorageError>> + Send + use<> {
        let (shared, clock, timeout) = (Arc::clone(&self.shared), self.clock.clone(), self.deadline);
        async move {
            if Handle::try_current().is_err() {
                let message = "no tokio runtime: await the call inside a tokio runtime";
                return Err(StorageError::new(StorageErrorKind::Cancelled, message).with_may_have_counted(false));
            }
            let started = Instant::now();
            let Some(counted) = shared.waiting.enter(1, MAX_WAITING) else {
                // Without the delay, callers that retry at once would take all processor time.
                sleep_until(started + timeout * 3 / 4).await;
                return Err(error::overloaded(&shared.path, MAX_WAITING));
            };
            let (ticket, caller) = Ticket::new();
            shared.send(Job { work, clock, ticket, _counted: counted })?;
            caller.wait(started + timeout).await.unwrap_or_else(|unanswered| {
                Err(match unanswered {
                    Unanswered::Dropped => error::ended(&shared.path),
                    Unanswered::Late(stage) => error::late(&shared.path, stage.is_begun),
                })
            })
        }
    }
}
