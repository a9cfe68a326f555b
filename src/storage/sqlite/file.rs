//! The database file: its settings, its table, the statements of a transaction, and its growth on a
//! disk that may be full.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, OptionalExtension, params};

use super::Durability;
use super::error::is_busy;
use super::reserve::{self, Kept, Reserve, create};
use crate::storage::listing::NameRange;
use crate::time::Timestamp;

/// The table of the states. `gone_at` is the wall clock's time, in microseconds since the epoch, at
/// which the row can be deleted. It has no index, because every hit would change it.
const SCHEMA: &str = "CREATE TABLE IF NOT EXISTS tower_ratelimit (
    key TEXT PRIMARY KEY, state TEXT NOT NULL, gone_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT";

/// The longest wait for other processes while the file is opened.
const OPENS_WITHIN: Duration = Duration::from_secs(1);

/// The time between two attempts to open the file.
const OPENS_AGAIN: Duration = Duration::from_millis(2);

/// The size of a page of a new file, in bytes. A transaction writes whole pages to the log, and a
/// checkpoint waits until the log is on the disk. With 10,000 keys and 64 hits in flight, 1,024 bytes
/// give 1.2 to 1.5 times the rate of 4,096, SQLite's default. With logs of 200 entries, they give 0.6
/// to 0.8 of it.
const PAGE_SIZE: u32 = 1_024;

/// The size of the write-ahead log, in bytes, at which a commit writes its pages to the database. The
/// worker does that once a second, so this only limits the log under heavy load.
const LOG_BYTES: u32 = 16 << 20;

/// The number of rows that a transaction checks for each hit on the keys that it writes. It must be
/// more than one, so that the table is searched faster than it grows.
const SWEPT_PER_HIT: u32 = 4;

/// A text that is greater than all keys, which are ASCII.
const AFTER_ALL_KEYS: &str = "\u{10ffff}";

/// An open database.
pub(super) struct File {
    pub(super) connection: Connection,
    pub(super) reserve: Reserve,
    /// The identity of the file, to notice that it was replaced.
    identity: Option<Identity>,
    /// The last key that `sweep` checked, or an empty text before the first row of the table.
    swept: String,
    /// The number of pages of a simulated disk.
    #[cfg(test)]
    pub(super) disk: Option<u32>,
}

impl File {
    /// Opens the file, and creates it and its table if necessary. Waits for other processes that
    /// open or create the file.
    pub(super) fn open(path: &Path, durability: Durability) -> rusqlite::Result<Self> {
        let started = Instant::now();
        loop {
            let left = OPENS_WITHIN.saturating_sub(started.elapsed());
            match Self::open_once(path, durability, left) {
                // `PRAGMA journal_mode` does not wait for the lock of another process.
                Err(error) if is_busy(&error) && !left.is_zero() => thread::sleep(OPENS_AGAIN),
                opened => return opened,
            }
        }
    }

    fn open_once(path: &Path, durability: Durability, wait: Duration) -> rusqlite::Result<Self> {
        create(path);
        // `SQLITE_OPEN_URI` is not set, because a file may be called `file:a?b`.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_EXRESCODE;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(wait)?;
        connection.pragma_update(None, "page_size", PAGE_SIZE)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "wal_autocheckpoint", LOG_BYTES / page_size(&connection)?)?;
        let synchronous = match durability {
            Durability::EveryCommit => "full",
            Durability::EverySecond => "normal",
        };
        connection.pragma_update(None, "synchronous", synchronous)?;
        connection.execute(SCHEMA, [])?;
        // From here on, the worker itself waits and retries while another process holds the lock.
        connection.busy_timeout(Duration::ZERO)?;
        let mut file = Self {
            connection,
            reserve: Reserve::of(path),
            identity: Identity::of(path),
            swept: String::new(),
            #[cfg(test)]
            disk: None,
        };
        file.allow_growth()?;
        Ok(file)
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
    /// Checks [`SWEPT_PER_HIT`] rows for each of the `hits`.
    pub(super) fn sweep(&mut self, hits: u32) -> rusqlite::Result<()> {
        self.sweep_rows(hits.saturating_mul(SWEPT_PER_HIT)).map(drop)
    }

    /// Checks the next `rows` rows of the table. Returns the number of rows that were deleted.
    pub(super) fn sweep_rows(&mut self, rows: u32) -> rusqlite::Result<usize> {
        let next = "SELECT key FROM tower_ratelimit WHERE key > ?1 ORDER BY key LIMIT 1 OFFSET ?2";
        let mut next = self.connection.prepare_cached(next)?;
        let last: Option<String> =
            next.query_row(params![self.swept, rows.saturating_sub(1)], |row| row.get(0)).optional()?;
        let range = params![self.swept, last.as_deref().unwrap_or(AFTER_ALL_KEYS), wall_clock()];
        // Searching is much faster than deleting.
        let find = "SELECT EXISTS (SELECT 1 FROM tower_ratelimit WHERE key > ?1 AND key <= ?2 AND gone_at < ?3)";
        let mut deleted = 0;
        if self.connection.prepare_cached(find)?.query_row(range, |row| row.get(0))? {
            let delete = "DELETE FROM tower_ratelimit WHERE key > ?1 AND key <= ?2 AND gone_at < ?3";
            deleted = self.connection.prepare_cached(delete)?.execute(range)?;
        }
        self.swept = last.unwrap_or_default();
        Ok(deleted)
    }

    /// Returns the next keys of a range.
    pub(super) fn list(&self, range: &NameRange) -> rusqlite::Result<Vec<String>> {
        let list = "SELECT key FROM tower_ratelimit WHERE key >= ?1 AND key > ?2 AND key < ?3 ORDER BY key LIMIT ?4";
        let limit = i64::try_from(range.limit).unwrap_or(i64::MAX);
        let mut list = self.connection.prepare_cached(list)?;
        list.query_map(params![range.first, range.after, range.end, limit], |row| row.get(0))?.collect()
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

/// Returns the size of a page in bytes.
fn page_size(connection: &Connection) -> rusqlite::Result<u32> {
    connection.query_row("PRAGMA page_size", [], |row| row.get(0)).map(|size: u32| size.max(1))
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

/// The rows that are checked for one failed transaction.
const SWEPT_WHEN_FULL: u32 = 1_000;

/// The largest `max_page_count` of every version of SQLite.
const UNLIMITED: u32 = 1_073_741_823;

/// The number of times that a transaction is tried again when the database must not grow further,
/// or the disk is full.
pub(super) const ATTEMPTS: u32 = 4;

/// The attempt from which on the disk counts as full.
pub(super) const FULL: u32 = 2;

impl File {
    /// Lets the database grow by half of the [reserve], after a checkpoint. Without a reserve, the
    /// database no longer grows.
    ///
    /// [reserve]: super::reserve
    pub(super) fn allow_growth(&mut self) -> rusqlite::Result<()> {
        match self.reserve.keep() {
            Kept::Full => self.limit_pages(self.pages()?.saturating_add(self.growth()?)),
            Kept::NoSpace => self.limit_pages(self.pages()?),
            Kept::Forbidden => self.limit_pages(UNLIMITED),
        }
    }

    /// Makes room for a transaction that failed because the database must not grow further, or
    /// because the disk is full. `attempt` counts the failures of this transaction, from 0. Returns
    /// `false` if it made none.
    ///
    /// | attempt | cause | action |
    /// |---|---|---|
    /// | 0 | the database has grown since the last checkpoint | a checkpoint |
    /// | 1 | the transaction is longer than the growth between two checkpoints | no limit |
    /// | 2 and later, or no reserve | the disk is full | deletes the reserve, then expired rows |
    pub(super) fn make_room(&mut self, attempt: u32) -> rusqlite::Result<bool> {
        if self.checkpoint().is_ok() && attempt < FULL && self.reserve.keep() != Kept::NoSpace {
            if attempt == 0 {
                self.allow_growth()?;
            } else {
                self.limit_pages(UNLIMITED)?;
            }
            return Ok(true);
        }
        let has_room = self.reserve.delete();
        // The rest of a log that could not be written to the database fits now.
        let _ = self.checkpoint();
        self.limit_pages(self.pages()?)?;
        self.begin(true)?;
        let swept = self.sweep_rows(SWEPT_WHEN_FULL).and_then(|deleted| self.commit().map(|()| deleted));
        if swept.is_err() {
            self.roll_back()?;
        }
        // The next transaction writes to the log from its beginning.
        let _ = self.checkpoint();
        Ok(has_room || swept? > 0)
    }

    /// Returns the number of pages in the database.
    fn pages(&self) -> rusqlite::Result<u32> {
        self.connection.query_row("PRAGMA page_count", [], |row| row.get(0))
    }

    /// Returns the number of pages by which the database may grow between two checkpoints.
    fn growth(&self) -> rusqlite::Result<u32> {
        Ok(u32::try_from(reserve::SIZE / 2 / u64::from(page_size(&self.connection)?)).unwrap_or(u32::MAX))
    }

    /// Sets the number of pages beyond which a transaction fails.
    fn limit_pages(&self, pages: u32) -> rusqlite::Result<()> {
        #[cfg(test)]
        let pages = pages.min(self.disk.unwrap_or(UNLIMITED));
        // The reply is the new limit.
        self.connection.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))
    }

    /// Simulates a full disk, whose database has at most this number of pages.
    #[cfg(test)]
    pub(super) fn set_disk(&mut self, pages: u32) {
        self.disk = Some(pages);
        self.limit_pages(pages).unwrap();
    }
}
