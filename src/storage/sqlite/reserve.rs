//! Space on the disk for the deletion of expired rows when the disk is full.
//!
//! A deletion writes to the write-ahead log first. The log can be written again from its beginning
//! once all its pages are in the database. On a full disk, that fails if the log has pages by which
//! the database grows, and without the log not even a row can be deleted. So the storage keeps a
//! file, and lets the database grow by at most half of its size between two checkpoints. When the
//! disk is full, the storage deletes the file and the database no longer grows.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
#[cfg(unix)]
use std::io::ErrorKind;
use std::io::Write;
use std::path::{Path, PathBuf};
#[cfg(unix)]
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[cfg(unix)]
use crate::sync::unpoisoned;

/// The size of the file in bytes.
pub(super) const SIZE: u64 = 1 << 20;

/// The time between two attempts to create the file on a full disk.
const AGAIN: Duration = Duration::from_secs(1);

/// The maximum number of symbolic links to follow, as on Linux.
#[cfg(unix)]
const MAX_LINKS: usize = 40;

/// The file `-reserve` next to the database.
pub(super) struct Reserve {
    path: PathBuf,
    /// The time at which the disk was found to be full.
    full_at: Option<Instant>,
}

/// The result of [`Reserve::keep`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    Full,
    /// The disk has no space for the file.
    NoSpace,
    /// The file cannot be created for another reason. Then the database grows without it.
    Forbidden,
}

impl Reserve {
    pub(super) fn of(database: &Path) -> Self {
        let mut path = OsString::from(database);
        path.push("-reserve");
        Self { path: path.into(), full_at: None }
    }

    /// Creates the file unless it exists.
    pub(super) fn keep(&mut self) -> Kept {
        if fs::metadata(&self.path).is_ok_and(|file| file.len() == SIZE) {
            return Kept::Full;
        }
        if self.full_at.is_some_and(|at| at.elapsed() < AGAIN) {
            return Kept::NoSpace;
        }
        create(&self.path);
        let Ok(mut file) = OpenOptions::new().write(true).create(true).truncate(false).open(&self.path) else {
            return Kept::Forbidden;
        };
        let zeros = [0; 1 << 12];
        if (0..SIZE >> 12).try_for_each(|_| file.write_all(&zeros)).is_err() {
            self.delete();
            return Kept::NoSpace;
        }
        Kept::Full
    }

    /// Deletes the file, because the disk is full. Returns `false` if it did not exist.
    pub(super) fn delete(&mut self) -> bool {
        self.full_at = Some(Instant::now());
        fs::remove_file(&self.path).is_ok()
    }
}

/// Creates the file with mode 600 unless it exists, because the keys in it may be secrets. SQLite
/// gives `-wal` and `-shm` the same mode. Errors are ignored, because SQLite reports them when it
/// opens the file.
#[cfg(unix)]
pub(super) fn create(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt;

    // A process that closes a file loses all locks that it has on it. So no other thread may open
    // the file before it is closed here. A file that exists is not opened.
    static CREATING: Mutex<()> = Mutex::new(());
    let _creating = unpoisoned(CREATING.lock());
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            _ => return,
        }
        // The path may be a symbolic link to a file that does not exist.
        match (fs::read_link(&path), path.parent()) {
            (Ok(target), Some(folder)) => path = folder.join(target),
            _ => return,
        }
    }
}

/// Does nothing: SQLite creates the file with the permissions of its directory.
#[cfg(not(unix))]
pub(super) fn create(_: &Path) {}
