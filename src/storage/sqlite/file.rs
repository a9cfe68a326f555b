//! The database file: its settings, its table, and the statements of a transaction.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension, params};

use super::Durability;
use crate::Timestamp;

/// The table of the states. `gone_at` is the wall clock's time, in microseconds since the epoch, at
/// which the row can be deleted. It has no index, because every hit would change it.
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS tower_ratelimit (
    key TEXT PRIMARY KEY, state TEXT NOT NULL, gone_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT";

/// The longest wait for other processes while the file is opened.
const OPENS_WITHIN: Duration = Duration::from_secs(1);

/// The number of pages in the write-ahead log at which a commit writes them to the database. With
/// [`Durability::EverySecond`], the worker does that once a second, so this number only limits the
/// log under heavy load.
const LOG_PAGES: u32 = 4_000;

/// The number of rows that a transaction checks for each key that it writes. It must be more than
/// one, so that the table is searched faster than it grows.
const SWEPT_PER_WRITE: u32 = 4;

/// An open database.
pub(super) struct File {
    connection: Connection,
    /// The identity of the file, to notice that it was replaced.
    identity: Option<Identity>,
    /// The last key that `sweep` checked, or an empty text before the first row of the table.
    swept: String,
}

impl File {
    /// Opens the file, and creates it and its table if necessary.
    pub(super) fn open(path: &Path, durability: Durability) -> rusqlite::Result<Self> {
        // `SQLITE_OPEN_URI` is not set, because a file may be called `file:a?b`.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_EXRESCODE;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(OPENS_WITHIN)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
        let synchronous = match durability {
            Durability::EveryCommit => "full",
            Durability::EverySecond => "normal",
        };
        connection.pragma_update(None, "synchronous", synchronous)?;
        connection.execute(SCHEMA, [])?;
        // From here on, the worker itself waits and retries while another process holds the lock.
        connection.busy_timeout(Duration::ZERO)?;
        Ok(Self { connection, identity: Identity::of(path), swept: String::new() })
    }

    /// Limits the file to this number of pages, to simulate a full disk.
    #[cfg(test)]
    pub(super) fn limit_pages(&self, pages: u32) {
        self.connection.pragma_update(None, "max_page_count", pages).unwrap();
    }

    /// Returns `true` if the path still names the opened file. SQLite would continue to write to a
    /// deleted file.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        Identity::of(path) == self.identity
    }

    /// Begins a transaction. If `writes` is `true`, it takes the write lock, which only one process
    /// can hold.
    pub(super) fn begin(&self, writes: bool) -> rusqlite::Result<()> {
        self.connection.prepare_cached(if writes { "BEGIN IMMEDIATE" } else { "BEGIN" })?.execute([])?;
        Ok(())
    }

    /// Commits the open transaction.
    pub(super) fn commit(&self) -> rusqlite::Result<()> {
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    /// Rolls back the transaction, if one is open.
    pub(super) fn roll_back(&self) -> rusqlite::Result<()> {
        if self.connection.is_autocommit() { Ok(()) } else { self.connection.execute_batch("ROLLBACK") }
    }

    /// Returns the text of a key. It is empty if the key does not exist.
    pub(super) fn load(&self, key: &str) -> rusqlite::Result<String> {
        let mut select = self.connection.prepare_cached("SELECT state FROM tower_ratelimit WHERE key = ?1")?;
        let found = select.query_row([key], |row| row.get(0)).optional()?;
        Ok(found.unwrap_or_default())
    }

    /// Stores the text of a key for `keep`. An empty text deletes the key.
    pub(super) fn save(&self, key: &str, text: &str, keep: Duration) -> rusqlite::Result<()> {
        if text.is_empty() {
            self.connection.prepare_cached("DELETE FROM tower_ratelimit WHERE key = ?1")?.execute([key])?;
            return Ok(());
        }
        let gone_at = i64::try_from(keep.as_micros()).unwrap_or(i64::MAX).saturating_add(wall_clock());
        let upsert = "INSERT INTO tower_ratelimit VALUES (?1, ?2, ?3) \
                      ON CONFLICT (key) DO UPDATE SET state = excluded.state, gone_at = excluded.gone_at";
        self.connection.prepare_cached(upsert)?.execute(params![key, text, gone_at])?;
        Ok(())
    }

    /// Deletes the expired rows among the next rows of the table, in the order of their keys.
    /// Checks [`SWEPT_PER_WRITE`] rows for each of the `writes` keys that the transaction has
    /// written.
    pub(super) fn sweep(&mut self, writes: u32) -> rusqlite::Result<()> {
        let rows = writes.saturating_mul(SWEPT_PER_WRITE);
        let next = "SELECT max(key), count(*), min(gone_at) FROM \
                    (SELECT key, gone_at FROM tower_ratelimit WHERE key > ?1 ORDER BY key LIMIT ?2)";
        let (last, count, first_gone): (Option<String>, u32, Option<i64>) = self
            .connection
            .prepare_cached(next)?
            .query_row(params![self.swept, rows], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        let (Some(last), Some(first_gone)) = (last, first_gone) else {
            self.swept.clear();
            return Ok(());
        };
        let now = wall_clock();
        if first_gone < now {
            let delete = "DELETE FROM tower_ratelimit WHERE key > ?1 AND key <= ?2 AND gone_at < ?3";
            self.connection.prepare_cached(delete)?.execute(params![self.swept, last, now])?;
        }
        self.swept = if count < rows { String::new() } else { last };
        Ok(())
    }

    /// Deletes all keys with this prefix, and returns their number.
    pub(super) fn delete_all(&self, prefix: &str) -> rusqlite::Result<u64> {
        // `;` is the character after `:`.
        let bounds = [format!("{prefix}:"), format!("{prefix};")];
        let deleted = self.connection.execute("DELETE FROM tower_ratelimit WHERE key >= ?1 AND key < ?2", bounds)?;
        Ok(deleted as u64)
    }

    /// Makes a checkpoint: writes the write-ahead log to the disk, and its pages to the database.
    /// Does not block other processes. Returns `false` if the log still has pages that are not in
    /// the database, because another process makes a checkpoint or still reads older pages.
    pub(super) fn checkpoint(&self) -> rusqlite::Result<bool> {
        self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| {
            let (is_busy, in_log, written): (bool, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
            Ok(!is_busy && in_log == written)
        })
    }
}

fn wall_clock() -> i64 {
    i64::try_from(Timestamp::wall_clock().as_micros()).unwrap_or(i64::MAX)
}

/// The device and the inode of a file. Needed only on Unix, where a file can be deleted or replaced
/// while it is open.
#[derive(PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).ok().map(|file| Self(file.dev(), file.ino()))
    }

    #[cfg(not(unix))]
    fn of(_: &Path) -> Option<Self> {
        None
    }
}
