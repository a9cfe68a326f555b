//! The [`CasStorage`], on single statements, also for several keys.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::types::FromSqlOwned;

use super::link::Link;
use super::server_time::ServerTime;
use super::sweep::Sweep;
use super::table::{self, Query, Statement, number};
use crate::storage::cas::{
    KeySwap, RecentTexts, ServerStore, SeveralFuture, SeveralKeys, SwapCombiner, SwapEach, SwappedAll, TextSwap,
};
use crate::storage::listing::NameRange;
use crate::storage::net::MOST;
use crate::storage::{CasStorage, Loaded, StorageError, Swapped, names};
use crate::time::{Timestamp, micros};

/// The longest text, in bytes. Each hit sends it to the server.
const MAX_LEN: usize = 1_000_000;

/// The rows of a table.
#[derive(Clone)]
pub(super) struct PostgresStore {
    pub(super) link: Link,
    recent: Arc<RecentTexts<()>>,
    time: Arc<ServerTime>,
    sweep: Arc<Sweep>,
    /// A connection executes one statement at a time, so each of them is a lane.
    combiner: SwapCombiner<String>,
}

/// The row that each statement returns. `T` is a text, or the texts of several keys.
struct RowReply<T = String> {
    /// The number of rows that were written or deleted.
    written: i64,
    /// The text of the key before the statement.
    text: T,
    now: Timestamp,
}

impl PostgresStore {
    pub(super) fn new(link: Link) -> Self {
        let combiner = SwapCombiner::new(link.connections());
        Self { link, recent: Arc::default(), time: Arc::default(), sweep: Arc::default(), combiner }
    }

    /// Returns a store on other connections to the same table.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn with_link(&self, link: Link) -> Self {
        Self { combiner: SwapCombiner::new(link.connections()), link, ..self.clone() }
    }
}

impl CasStorage for PostgresStore {
    type Error = StorageError;
    /// The text itself, which is empty for a missing key. A text contains the instant of the last
    /// decision, so it rarely repeats, and a text that repeats is the same state.
    type Version = String;

    fn recall(&self, key: &str) -> Option<Loaded<String>> {
        let now = self.time.now()?;
        // Most unknown keys do not exist on the server.
        let (text, ()) = self.recent.recall(key, Duration::MAX).unwrap_or_default();
        Some(Loaded { version: text.clone(), text, now: Some(now) })
    }

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<String>, StorageError> {
        let Some(RowReply { text, now, .. }) = self.read(key, deadline).await? else {
            return Err(self.rolled_back_read());
        };
        self.recent.record(key, &text, ());
        Ok(Loaded { version: text.clone(), text, now: Some(now) })
    }

    async fn swap(
        &self,
        key: &str,
        version: &String,
        text: &str,
        time_to_live: Duration,
        deadline: Instant,
    ) -> Result<Swapped<String>, StorageError> {
        self.recent.forget(key);
        let swap = TextSwap { key: key.into(), version: version.clone(), text: text.to_owned(), time_to_live };
        if text.is_empty() {
            return self.swap_alone(&swap, deadline).await;
        }
        self.combiner.swap(self, swap, deadline).await
    }

    fn max_text_len(&self) -> Option<usize> {
        Some(MAX_LEN)
    }
}

impl SwapEach for PostgresStore {
    const IS_CANCELLED: bool = true;

    fn name(&self) -> String {
        self.link.server().to_owned()
    }

    async fn swap_alone(&self, swap: &TextSwap<String>, deadline: Instant) -> Result<Swapped<String>, StorageError> {
        let TextSwap { key, version, text, time_to_live } = swap;
        let within = time_until(deadline);
        let time_to_live = whole_micros(*time_to_live);
        let query = match (version.is_empty(), text.is_empty()) {
            (true, true) => {
                let is_missing = self.load(key, deadline).await?.text.is_empty();
                return Ok(if is_missing { Swapped::Stored } else { Swapped::Lost(None) });
            }
            (true, false) => Query::new(Statement::Insert, [table::text(key), table::text(text), number(time_to_live)]),
            (false, true) => Query::new(Statement::Delete, [table::text(key), table::text(version)]),
            (false, false) => Query::new(
                Statement::Update,
                [table::text(key), table::text(text), number(time_to_live), table::text(version)],
            ),
        };
        let reply = self.query(query, deadline).await?;
        let Some(RowReply { written, text: found, now }): Option<RowReply> = reply else {
            return Ok(Swapped::Lost(None));
        };
        if written > 0 {
            self.recent.record(key, text, ());
            self.sweep.after_write(&self.link, within);
            return Ok(Swapped::Stored);
        }
        if found == *version {
            // Another transaction has changed the text during this statement. `found` is the text
            // at the start of the statement, so it is outdated.
            return Ok(Swapped::Lost(None));
        }
        Ok(self.lost(key, found, now))
    }

    async fn swap_each(
        &self,
        swaps: &[TextSwap<String>],
        deadline: Instant,
    ) -> Result<Vec<Option<Swapped<String>>>, StorageError> {
        let within = time_until(deadline);
        let query = Query::new(
            Statement::SwapEach,
            [
                table::texts(swaps.iter().map(|swap| &*swap.key)),
                table::texts(swaps.iter().map(|swap| swap.version.as_str())),
                table::texts(swaps.iter().map(|swap| swap.text.as_str())),
                table::numbers(swaps.iter().map(|swap| whole_micros(swap.time_to_live))),
            ],
        );
        let reply: Option<RowReply<Vec<Option<String>>>> = self.query(query, deadline).await?;
        // A statement that was rolled back has swapped nothing.
        let Some(RowReply { text: found, now, .. }) = reply else { return Ok(Vec::new()) };
        self.require_all(found.len(), swaps.len())?;
        let swapped = swaps.iter().zip(found).map(|(swap, found)| match found {
            None => {
                self.recent.record(&swap.key, &swap.text, ());
                self.sweep.after_write(&self.link, within);
                Some(Swapped::Stored)
            }
            Some(found) if found.is_empty() => None,
            Some(found) => Some(self.lost(&swap.key, found, now)),
        });
        Ok(swapped.collect())
    }
}

impl SeveralKeys<String> for PostgresStore {
    fn load_all<'a>(&'a self, keys: &'a [Arc<str>], deadline: Instant) -> SeveralFuture<'a, Vec<Loaded<String>>> {
        Box::pin(async move {
            let query = Query::new(Statement::LoadAll, [table::texts(keys.iter().map(|key| &**key))]);
            let reply = self.query(query, deadline).await?.ok_or_else(|| self.rolled_back_read())?;
            self.all_loaded(keys.iter(), reply)
        })
    }

    fn swap_all<'a>(
        &'a self,
        swaps: &'a [KeySwap<'a, String>],
        deadline: Instant,
    ) -> SeveralFuture<'a, SwappedAll<String>> {
        Box::pin(async move {
            let within = time_until(deadline);
            for swap in swaps {
                self.recent.forget(swap.key);
            }
            let new = |swap: &KeySwap<'a, String>| swap.change.map_or(swap.version.as_str(), |(text, _)| text);
            let time_to_live =
                |swap: &KeySwap<'_, _>| swap.change.map_or(0, |(_, time_to_live)| whole_micros(time_to_live));
            let query = Query::new(
                Statement::SwapAll,
                [
                    table::texts(swaps.iter().map(|swap| &**swap.key)),
                    table::texts(swaps.iter().map(|swap| swap.version.as_str())),
                    table::texts(swaps.iter().map(new)),
                    table::numbers(swaps.iter().map(time_to_live)),
                ],
            );
            let reply: Option<RowReply<Vec<String>>> = self.query(query, deadline).await?;
            let Some(reply) = reply else { return Ok(SwappedAll::Lost(None)) };
            if reply.written == 0 {
                return Ok(SwappedAll::Lost(Some(self.all_loaded(swaps.iter().map(|swap| swap.key), reply)?)));
            }
            for swap in swaps {
                self.recent.record(swap.key, new(swap), ());
                self.sweep.after_write(&self.link, within);
            }
            Ok(SwappedAll::Stored)
        })
    }
}

impl ServerStore for PostgresStore {
    const LABEL: &'static str = "postgres";

    fn name(&self) -> String {
        SwapEach::name(self)
    }

    fn several(&self) -> Option<Arc<dyn SeveralKeys<String>>> {
        Some(Arc::new(self.clone()))
    }

    fn overload(&self, busy_keys: usize) -> Option<StorageError> {
        let is_busy = busy_keys >= MOST * self.link.connections().max(1);
        let error = || StorageError::overloaded(self.link.server(), busy_keys);
        is_busy.then(error).or_else(|| self.link.overload())
    }

    async fn first_connection(&self) {
        self.link.first_connection().await;
    }

    /// A read that the server has rolled back is a reply, too.
    async fn ping(&self, prefix: &str, deadline: Instant) -> Result<(), StorageError> {
        self.read(prefix, deadline).await.map(drop)
    }

    async fn delete_all(&self, prefix: &str, deadline: Instant) -> Result<u64, StorageError> {
        // The collation "C" orders keys by their bytes.
        let query = Query::new(Statement::DeleteAll, [table::text(prefix), table::text(&names::after(prefix))]);
        let reply: Option<RowReply> = self.query(query, deadline).await?;
        let Some(reply) = reply else {
            return Err(StorageError::refused(self.link.server(), "other transactions changed the same rows"));
        };
        Ok(u64::try_from(reply.written).unwrap_or(0))
    }

    async fn list(&self, range: &NameRange, deadline: Instant) -> Result<Vec<String>, StorageError> {
        let [first, after, end] = [&range.first, &range.after, &range.end].map(|name| table::text(name));
        let limit = number(i64::try_from(range.limit).unwrap_or(i64::MAX));
        let reply = self.query(Query::new(Statement::List, [first, after, end, limit]), deadline).await?;
        reply.map(|reply| reply.text).ok_or_else(|| self.rolled_back_read())
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("connections", &self.link)
            .field("table", self.link.table())
            .finish_non_exhaustive()
    }
}

impl PostgresStore {
    /// Reads the row of a key. Returns `None` if the read was rolled back because of another
    /// transaction.
    async fn read(&self, key: &str, deadline: Instant) -> Result<Option<RowReply>, StorageError> {
        self.query(Query::new(Statement::Load, [table::text(key)]), deadline).await.map_err(StorageError::uncounted)
    }

    /// Returns the result of a swap that was lost to the text `found`, and records the text.
    fn lost(&self, key: &str, found: String, now: Timestamp) -> Swapped<String> {
        self.recent.record(key, &found, ());
        Swapped::Lost(Some(Loaded { version: found.clone(), text: found, now: Some(now) }))
    }

    /// Returns the texts of several keys, and records them.
    fn all_loaded<'a>(
        &self,
        keys: impl ExactSizeIterator<Item = &'a Arc<str>>,
        reply: RowReply<Vec<String>>,
    ) -> Result<Vec<Loaded<String>>, StorageError> {
        self.require_all(reply.text.len(), keys.len())?;
        let load = |(key, text): (&Arc<str>, String)| {
            self.recent.record(key, &text, ());
            Loaded { version: text.clone(), text, now: Some(reply.now) }
        };
        Ok(keys.zip(reply.text).map(load).collect())
    }

    /// Returns an error unless a statement has returned the texts of all keys.
    fn require_all(&self, texts: usize, keys: usize) -> Result<(), StorageError> {
        let message = "the statement has not returned the texts of all keys";
        let error = || StorageError::unexpected_reply(self.link.server(), message);
        (texts == keys).then_some(()).ok_or_else(error)
    }

    fn rolled_back_read(&self) -> StorageError {
        let message = format!("{} rolled back a read because of other transactions", self.link.server());
        StorageError::refused(self.link.server(), message)
    }

    /// Executes a statement, and records the server's time. Returns `None` if the statement was
    /// rolled back because of another transaction.
    async fn query<T>(&self, query: Query, deadline: Instant) -> Result<Option<RowReply<T>>, StorageError>
    where
        T: FromSqlOwned + Default,
    {
        let Some(row) = self.link.query(query, deadline.into()).await? else { return Ok(None) };
        let read = || -> Result<RowReply<T>, tokio_postgres::Error> {
            let now: i64 = row.try_get(2)?;
            let text: Option<T> = row.try_get(1)?;
            let now = Timestamp::from_micros(u64::try_from(now).unwrap_or(0));
            Ok(RowReply { written: row.try_get(0)?, text: text.unwrap_or_default(), now })
        };
        let reply = read().map_err(|error| StorageError::unexpected_reply(self.link.server(), error))?;
        self.time.record(reply.now);
        Ok(Some(reply))
    }
}

fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(tokio::time::Instant::now().into_std())
}

fn whole_micros(time_to_live: Duration) -> i64 {
    i64::try_from(micros(time_to_live)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::key::Key;
    use crate::policy::{Op, Policy};
    use crate::quota::Quota;
    use crate::storage::net::CONNECT_WITHIN;
    use crate::storage::{PostgresStorage, Storage, StorageRequest};

    const DEADLINE: Duration = Duration::from_millis(160);

    /// The time is virtual, so only timers take time.
    #[tokio::test(start_paused = true)]
    async fn connection_times_out_before_the_storage() {
        // The server accepts connections and never replies.
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("postgres://app@{}/app?timeout={DEADLINE:?}", server.local_addr().unwrap());
        let storage = PostgresStorage::new(&url).unwrap();
        let (policy, key) = (Policy::from(Quota::per_day(5)), Key::from("k"));
        let decide = |op| storage.decide(StorageRequest::new(&policy, &key, op, 1));
        let begun = tokio::time::Instant::now();
        let error = decide(Op::Hit).await.unwrap_err();
        assert!(format!("{error:#}").contains("connecting took longer than 1s"), "{error:?}");
        assert!(begun.elapsed() < CONNECT_WITHIN + DEADLINE, "the first attempt: {:?}", begun.elapsed());
        for op in [Op::Peek, Op::Hit] {
            // The backoff after the failed attempt ends.
            tokio::time::sleep(CONNECT_WITHIN).await;
            let begun = tokio::time::Instant::now();
            let error = decide(op).await.unwrap_err();
            assert!(error.is_timeout() && error.to_string().starts_with("no connection to 127.0.0.1:"), "{error:?}");
            assert!(begun.elapsed() < DEADLINE, "{op:?}: {:?}", begun.elapsed());
        }
    }
}
