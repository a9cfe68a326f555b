//! The growth of the database, and a disk that is full.

use super::file::File;
use super::reserve::{self, Kept};

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
        let size: u32 = self.connection.query_row("PRAGMA page_size", [], |row| row.get(0))?;
        Ok(u32::try_from(reserve::SIZE / 2 / u64::from(size.max(1))).unwrap_or(u32::MAX))
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
