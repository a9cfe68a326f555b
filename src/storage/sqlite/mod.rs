mod create;
mod decide;
mod error;
mod file;
mod job;
mod reserve;
mod room;
#[cfg(test)]
mod tests;
mod transaction;
mod url;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use self::error::rolled_back;
use self::file::File;
use self::job::Job;
use self::url::SqliteUrl;
use self::worker::Worker;
use crate::error::{ConfigError, chain, or_panic};
use crate::storage::settings::TIMEOUT;
use crate::storage::url::{PREFIX, checked_prefix};
use crate::storage::{Clock, StorageError, StorageErrorKind, names, settings};
use crate::sync::Gauge;

/// Shares rate limit states between the processes of one machine, in an SQLite file.
///
/// The states survive restarts of the program. No server is needed, because SQLite is compiled in.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::SqliteStorage;
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = std::env::temp_dir().join(format!("tower-ratelimit-doc-{}.db", std::process::id()));
/// let limiter = RateLimiter::with_storage(Quota::per_day(5), SqliteStorage::open(&file)?);
/// assert_eq!(limiter.hit(&Key::from("alice")).await?.remaining(), 4);
///
/// // After a restart:
/// let limiter = RateLimiter::with_storage(Quota::per_day(5), SqliteStorage::open(&file)?);
/// assert_eq!(limiter.hit(&Key::from("alice")).await?.remaining(), 3);
/// # for end in ["", "-wal", "-shm", "-reserve"] {
/// #     let _ = std::fs::remove_file(format!("{}{end}", file.display()));
/// # }
/// # Ok(())
/// # }
/// ```
///
/// # Decisions
///
/// One thread executes the calls of a storage and its clones. Calls that wait at the same time, up
/// to 512, share one transaction, and return after its commit. So a hit is counted exactly once or
/// not at all, even with several processes. If a process is killed, the hits that have returned
/// stay counted. A power failure can lose the hits of the last second: see
/// [`durability`](Self::durability).
///
/// Decisions use this machine's clock. Each admitted hit stores the state of its key, so a strategy
/// with a log writes the whole log on each admitted hit.
///
/// Calls need a tokio runtime with time enabled. The storage can be created outside of a runtime.
///
/// # Options
///
/// [`new`](Self::new) takes a URL such as `sqlite:limits.db?timeout=50ms`, or
/// `sqlite:/var/lib/app/limits.db`. In the path, write `?` as `%3F` and `%` as `%25`.
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `timeout` | `100ms` | the timeout of a call, including the wait for other processes |
/// | `durability` | `every-second` | `every-second` or `every-commit`, see [`durability`](Self::durability) |
///
/// # The file
///
/// - SQLite adds two files with the endings `-wal` and `-shm`. Keep the three together, and back
///   them up with `sqlite3 limits.db ".backup copy.db"`.
/// - The file with the ending `-reserve` takes 1 MB. The storage deletes it if the disk is full, so
///   that expired rows can be deleted, and creates it again later.
/// - On Unix, only the owner can read and write the files that the storage creates (mode 600). The
///   modes of existing files and of the directory do not change. The files of SQLite get the mode
///   of the database. To share the file between users, create it with another mode before the first
///   start.
/// - Processes that write at the same time wait for each other, at most until the timeout. For many
///   busy processes, use a server. Processes that create the file at the same time wait for up to a
///   second.
/// - The file must be on a local disk. Network file systems do not support the shared memory that
///   SQLite needs.
/// - The storage creates the table `tower_ratelimit` if it does not exist. Each hit that
///   changes a state deletes the expired rows among the next four rows of the table. So if the table
///   has N rows, an expired row is deleted after about N / 4 hits of a process. Its columns are
///   `key`, `state`, and `gone_at` in microseconds since 1970.
///
#[doc = include_str!("faults.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if
///
/// - the file cannot be read or written; the next call then opens it again,
/// - 1,024 calls are already waiting,
/// - no transaction was committed within the timeout, for example because another process holds
///   the lock of the file.
///
/// # Linking
///
/// A program can contain only one version of `libsqlite3-sys`, because cargo lets only one package
/// link a native library. If another crate, for example an old `sqlx`, needs a version that
/// `rusqlite` 0.38 to 0.41 does not use, cargo reports that `links = "sqlite3"` occurs twice. Use
/// compatible versions, or [`Cas`] on your own connection.
///
/// [`Cas`]: crate::storage::Cas
#[derive(Clone)]
pub struct SqliteStorage {
    shared: Arc<Shared>,
    prefix: Arc<str>,
    deadline: Duration,
    /// Replaces the wall clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

/// The protection of counts against a power failure, or a crash of the operating system. See
/// [`SqliteStorage::durability`].
///
/// With both values, a process that is killed loses no hit that has returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// The storage syncs the file once a second. A power failure loses at most the hits of the last
    /// second. If another process reads the file in a longer transaction, a power failure can lose
    /// all hits since the start of that transaction.
    #[default]
    EverySecond,
    /// The storage syncs each transaction before its hits return. A power failure loses nothing,
    /// and each hit waits for the disk.
    EveryCommit,
}

/// The file, and the channel to the thread, which is started for the first call.
struct Shared {
    path: PathBuf,
    durability: Durability,
    /// The number of waiting calls.
    waiting: Gauge,
    calls: OnceLock<mpsc::Sender<Job>>,
}

impl SqliteStorage {
    /// Opens the database at `path`, and creates it if it does not exist. The directory must exist.
    ///
    /// # Errors
    ///
    /// Returns an error if
    ///
    /// - the file cannot be opened, created or written to, or is not a database,
    /// - other processes hold the lock of the file, or create it, for more than a second,
    /// - `path` is empty or `:memory:`. For a storage in memory, use
    ///   [`MemoryStorage`](crate::MemoryStorage).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        if let Some(text) = path.to_str() {
            url::checked(text).map_err(|why| ConfigError::new(format!("cannot open {text:?}: {why}")))?;
        }
        Self::with(path.to_owned(), PREFIX, TIMEOUT, Durability::default())
    }

    /// Opens the database at a URL such as `sqlite:limits.db`, and creates it if it does not exist.
    /// The [options](Self#options) follow a `?`.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, or for the reasons of [`open`](Self::open).
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let SqliteUrl { path, prefix, deadline, durability } = SqliteUrl::parse(url)?;
        Self::with(path, &prefix, deadline, durability)
    }

    fn with(path: PathBuf, prefix: &str, deadline: Duration, durability: Durability) -> Result<Self, ConfigError> {
        // Opens the file only to report a wrong path when the program starts. The thread opens its
        // own connection.
        if let Err(error) = File::open(&path, durability) {
            return Err(ConfigError::new(chain(&rolled_back(&path, error))));
        }
        let shared = Arc::new(Shared::new(path, durability));
        Ok(Self { shared, prefix: names::prefix(prefix), deadline, clock: None })
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Programs with the same prefix and the same file share their counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 printable ASCII characters, or contains a space, `{` or
    /// `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        Self { prefix: names::prefix(prefix), ..self }
    }

    /// Sets the timeout of a call, including the wait for other processes. Overrides the URL.
    /// Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(self, timeout: Duration) -> Self {
        or_panic(settings::checked_timeout(timeout));
        Self { deadline: timeout, ..self }
    }

    /// Sets the protection against a power failure. Overrides the URL. Defaults to
    /// [`Durability::EverySecond`].
    ///
    /// The returned storage has its own thread and connection, which it does not share with earlier
    /// clones.
    #[must_use]
    pub fn durability(self, durability: Durability) -> Self {
        let shared = Arc::new(Shared::new(self.shared.path.clone(), durability));
        Self { shared, ..self }
    }

    /// Decides by `clock` instead of this machine's clock. Use it in tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }
}

impl Shared {
    fn new(path: PathBuf, durability: Durability) -> Self {
        Self { path, durability, waiting: Gauge::default(), calls: OnceLock::new() }
    }

    /// Sends a call to the thread, which is started for the first call.
    fn send(&self, job: Job) -> Result<(), StorageError> {
        let cannot_start = |error| {
            let message = format!("cannot start the thread of {}", self.path.display());
            StorageError::new(StorageErrorKind::Unreachable, message).with_source(error)
        };
        let calls = if let Some(calls) = self.calls.get() {
            calls
        } else {
            let (sender, calls) = mpsc::channel();
            let worker = Worker::new(self.path.clone(), self.durability);
            let thread = thread::Builder::new().name("ratelimit-sqlite".to_owned());
            thread.spawn(move || worker.run(&calls)).map_err(cannot_start)?;
            // If a concurrent call has started a thread first, that thread is used. The thread of
            // this call ends, because its sender is dropped.
            self.calls.get_or_init(|| sender)
        };
        // If the thread has ended, the job is dropped here, and its caller gets an error.
        let _ = calls.send(job);
        Ok(())
    }
}

impl fmt::Debug for SqliteStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStorage")
            .field("path", &self.shared.path)
            .field("durability", &self.shared.durability)
            .field("prefix", &self.prefix)
            .field("timeout", &self.deadline)
            .finish_non_exhaustive()
    }
}
