//! The [`CasStorage`], on single statements.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::link::{Link, Outcome};
use super::query::Query;
use super::recent::Recent;
use super::sweep::Sweep;
use super::table::Statement;
use crate::storage::{CasStorage, Loaded, StorageError, Swapped};
use crate::time::{Timestamp, micros};

/// The longest text, in bytes. Each hit sends it to the server.
const MAX_LEN: usize = 1_000_000;

#[derive(Clone, Debug)]
pub(super) struct Store {
    pub(super) link: Link,
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
    pub(super) recent: Arc<Recent>,
    pub(super) sweep: Arc<Sweep>,
}

/// The row that each statement returns.
struct Reply {
    /// The number of rows that were written or deleted.
    written: i64,
    /// The text of the key before the statement.
    text: String,
    now: Timestamp,
}

impl CasStorage for Store {
    type Error = StorageError;
    /// The text itself, which is empty for a missing key. A text contains the instant of the last
    /// decision, so it rarely repeats, and a text that repeats is the same state.
    type Version = String;

    fn recall(&self, key: &str) -> Option<Loaded<String>> {
        let (text, now) = self.recent.recall(&self.key(key))?;
        Some(Loaded { version: text.clone(), text, now: Some(now) })
    }

    async fn load(&self, key: &str) -> Result<Loaded<String>, StorageError> {
        let key = self.key(key);
        let reply = self
            .query(Query::new(Statement::Load, [(&*key).into()]), self.deadline())
            .await
            .map_err(StorageError::uncounted)?;
        let Some(Reply { text, now, .. }) = reply else {
            let message = format!("{} rolled back a read because of other transactions", self.link.server());
            return Err(StorageError::refused(self.link.server(), message));
        };
        self.recent.record(&key, &text);
        Ok(Loaded { version: text.clone(), text, now: Some(now) })
    }

    async fn swap(
        &self,
        key: &str,
        version: &String,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<String>, StorageError> {
        let key = self.key(key);
        let keep = i64::try_from(micros(keep)).unwrap_or(i64::MAX);
        // Removes the recorded text first. If the statement fails, the stored text is unknown.
        self.recent.record(&key, "");
        let query = match (version.is_empty(), text.is_empty()) {
            (true, true) => {
                let is_missing = self.load(&key[self.prefix.len() + 1..]).await?.text.is_empty();
                return Ok(if is_missing { Swapped::Stored } else { Swapped::Lost(None) });
            }
            (true, false) => Query::new(Statement::Insert, [(&*key).into(), text.into(), keep.into()]),
            (false, true) => Query::new(Statement::Delete, [(&*key).into(), (&**version).into()]),
            (false, false) => {
                Query::new(Statement::Update, [(&*key).into(), text.into(), keep.into(), (&**version).into()])
            }
        };
        let reply = self.query(query, self.deadline()).await?;
        let Some(Reply { written, text: found, now }) = reply else { return Ok(Swapped::Lost(None)) };
        if written > 0 {
            self.recent.record(&key, text);
            self.sweep.after_write(&self.link, self.deadline);
            return Ok(Swapped::Stored);
        }
        if found == *version {
            // Another transaction has changed the text during this statement. `found` is the text
            // at the start of the statement, so it is outdated.
            return Ok(Swapped::Lost(None));
        }
        self.recent.record(&key, &found);
        Ok(Swapped::Lost(Some(Loaded { version: found.clone(), text: found, now: Some(now) })))
    }

    async fn check(&self) -> Result<(), StorageError> {
        self.ping(self.deadline()).await
    }

    fn longest(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl Store {
    /// Checks that the server replies, and that the table can be read.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        let query = Query::new(Statement::Load, [(&*self.key("")).into()]);
        self.query(query, deadline).await.map(drop).map_err(StorageError::uncounted)
    }

    /// Deletes all keys with the prefix, and returns their number.
    pub(super) async fn delete_all(&self) -> Result<u64, StorageError> {
        // The range of all keys that begin with the prefix and `:`. In the collation "C", `;` is
        // the character after `:`.
        let (from, to) = (self.key(""), format!("{};", self.prefix));
        let query = Query::new(Statement::DeleteAll, [(&*from).into(), (&*to).into()]);
        let reply = self.query(query, self.deadline()).await?;
        let Some(reply) = reply else {
            return Err(StorageError::refused(self.link.server(), "other transactions changed the same rows"));
        };
        Ok(u64::try_from(reply.written).unwrap_or(0))
    }

    /// Executes a statement, and records the server's time. Returns `None` if the statement was
    /// rolled back because of another transaction.
    async fn query(&self, query: Query, deadline: Instant) -> Result<Option<Reply>, StorageError> {
        let Outcome::Row(row) = self.link.query(query, deadline).await? else { return Ok(None) };
        let read = || -> Result<Reply, tokio_postgres::Error> {
            let now: i64 = row.try_get(2)?;
            let text: Option<String> = row.try_get(1)?;
            let now = Timestamp::from_micros(u64::try_from(now).unwrap_or(0));
            Ok(Reply { written: row.try_get(0)?, text: text.unwrap_or_default(), now })
        };
        let reply = read().map_err(|error| StorageError::unexpected_reply(self.link.server(), error))?;
        self.recent.record_time(reply.now);
        Ok(Some(reply))
    }

    fn key(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    /// Returns the deadline of a call that begins now. It is shortly before the timeout of `Cas`,
    /// so that the connection notices a missing reply.
    fn deadline(&self) -> Instant {
        Instant::now() + self.deadline * 15 / 16
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::key::Key;
    use crate::policy::{Op, Policy};
    use crate::quota::Quota;
    use crate::storage::{PostgresStorage, Storage, StorageRequest};

    const DEADLINE: Duration = Duration::from_millis(160);

    /// The time is virtual, so only timers take time.
    #[tokio::test(start_paused = true)]
    async fn connection_times_out_before_the_storage() {
        // The server accepts connections and never replies.
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("postgres://app@{}/app", server.local_addr().unwrap());
        let storage = PostgresStorage::new(&url).unwrap().timeout(DEADLINE);
        let (policy, key) = (Policy::from(Quota::per_day(5)), Key::from("k"));
        for op in [Op::Peek, Op::Hit] {
            let begun = Instant::now();
            let error = storage.decide(StorageRequest::new(&policy, &key, op, 1)).await.unwrap_err();
            assert!(error.is_timeout() && error.to_string().starts_with("no connection to 127.0.0.1:"), "{error:?}");
            assert!(begun.elapsed() < DEADLINE, "{op:?}: {:?}", begun.elapsed());
        }
    }
}
