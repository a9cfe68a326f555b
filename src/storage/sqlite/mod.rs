//! A storage in an SQLite file.
//!
//! - `BEGIN IMMEDIATE` fails at once if another process has the lock, and the thread tries again
//!   while a caller waits. SQLite's own busy handler would sleep up to 100 ms between attempts.
//! - `PRAGMA journal_mode = wal` ignores the busy timeout, so opening the file is repeated for up
//!   to a second.
//! - A process that closes any handle of a file loses its locks on it. So only a file that was just
//!   created is opened without SQLite.
//! - Before each transaction, the thread checks that the path still names the open file, because
//!   SQLite would continue to write to a deleted one.
//! - The number of rows that are checked for expiry depends on the hits and not on the written
//!   keys, because hits on one key share a write.

mod error;
mod file;
mod reserve;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use self::error::{ended, late, overloaded, rolled_back};
use self::file::File;
use self::worker::{FileJob, FileWorker, Work, WorkResult};
use crate::decision::Decision;
use crate::error::{ConfigError, chain};
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::bounds::TIMEOUT;
use crate::storage::cas::Command;
use crate::storage::listing::NameRange;
use crate::storage::metrics::measured;
use crate::storage::ticket::{Ticket, Unanswered};
use crate::storage::url::{Options, PREFIX, decoded};
use crate::storage::{
    Clock, KeyPage, KeysRequest, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest, names,
};

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
/// # // A busy machine may need longer than the default timeout.
/// # let url = &format!("sqlite:{}?timeout=60s", file.display());
/// // The `url` is `"sqlite:limits.db"`.
/// let limiter = RateLimiter::with_storage(Quota::per_day(5), SqliteStorage::new(url)?);
/// assert_eq!(limiter.hit(&Key::from("alice")).await?.remaining(), 4);
///
/// // After a restart:
/// let limiter = RateLimiter::with_storage(Quota::per_day(5), SqliteStorage::new(url)?);
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
/// stay counted. A power failure can lose the hits of the last second, unless the URL has the option
/// `durability=every-commit`.
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
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix and the same file share their counts |
/// | `timeout` | `100ms` | the timeout of a call, including the wait for other processes, from `1ms` to `3600s` |
/// | `durability` | `every-second` | the times at which the storage syncs the file: `every-second` or `every-commit` |
///
/// With `every-second`, a power failure, or a crash of the operating system, loses at most the hits
/// of the last second. While another process reads the file in a longer transaction, a power
/// failure can lose all hits since the start of that transaction. With `every-commit`, a power
/// failure loses nothing, and each hit waits for the disk. With both, a process that is killed
/// loses no hit that has returned.
///
/// # The file
///
/// - SQLite adds two files with the endings `-wal` and `-shm`. Keep the three together, and back
///   them up with `sqlite3 limits.db ".backup copy.db"`.
/// - A new file has pages of 1,024 bytes. A state that takes more than 230 bytes with its key, such as
///   those of four limits or a log, takes a page of its own.
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
/// `rusqlite` 0.38 to 0.43 does not use, cargo reports that `links = "sqlite3"` occurs twice. Use
/// compatible versions, or [`Cas`] on your own connection.
///
/// [`Cas`]: crate::storage::Cas
#[derive(Clone)]
pub struct SqliteStorage {
    shared: Arc<Database>,
    prefix: Arc<str>,
    timeout: Duration,
    /// Replaces the wall clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

/// The protection of counts against a power failure, the option `durability`.
#[derive(Clone, Copy, Debug, Default)]
enum Durability {
    /// The file is synced once a second.
    #[default]
    EverySecond,
    /// The file is synced before a transaction returns.
    EveryCommit,
}

/// The file, and the channel to the thread, which is started for the first call.
struct Database {
    path: PathBuf,
    durability: Durability,
    /// A permit for each further call that may wait.
    waiting: Arc<Semaphore>,
    calls: OnceLock<mpsc::Sender<FileJob>>,
}

impl SqliteStorage {
    /// Opens the database at `path` now, and creates it if it does not exist. The directory must
    /// exist. All options have their defaults.
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
            checked(text).map_err(|why| ConfigError::new(format!("cannot open {text:?}: {why}")))?;
        }
        // The thread opens a connection of its own.
        if let Err(error) = File::open(path, Durability::default()) {
            return Err(ConfigError::new(chain(&rolled_back(path, error))));
        }
        Ok(Self::with(path.to_owned(), PREFIX, TIMEOUT, Durability::default()))
    }

    /// Creates a storage for a URL such as `sqlite:limits.db`. The [options](Self#options) follow a
    /// `?`.
    ///
    /// This opens no file. The first call opens the database, and creates it if it does not exist.
    /// Call [`ready`](Self::ready) to do that before the program accepts traffic.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let SqliteUrl { path, prefix, timeout, durability } = SqliteUrl::parse(url)?;
        Ok(Self::with(path, &prefix, timeout, durability))
    }

    fn with(path: PathBuf, prefix: &str, timeout: Duration, durability: Durability) -> Self {
        let shared =
            Database { path, durability, waiting: Arc::new(Semaphore::new(MAX_WAITING)), calls: OnceLock::new() };
        Self { shared: Arc::new(shared), prefix: names::prefix(prefix), timeout, clock: None }
    }

    /// Sets the clock for decisions, for tests (feature `testing`). Defaults to this machine's clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }
    }
}

impl Database {
    /// Sends a call to the thread, which is started for the first call.
    fn send(&self, job: FileJob) -> Result<(), StorageError> {
        let cannot_start = |error| {
            let message = format!("cannot start the thread of {}", self.path.display());
            StorageError::new(StorageErrorKind::Unreachable, message).with_source(error)
        };
        let calls = if let Some(calls) = self.calls.get() {
            calls
        } else {
            let (sender, calls) = mpsc::channel();
            let worker = FileWorker::new(self.path.clone(), self.durability);
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
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// The label `storage` of the metrics.
const LABEL: &str = "sqlite";

/// The maximum number of waiting calls.
const MAX_WAITING: usize = 1_024;

impl Storage for SqliteStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let StorageRequest { policy, key, op, cost } = request;
        let (policy, key) = (policy.clone(), self.name(policy, key));
        let is_peek = request.is_peek();
        let work = if is_peek {
            Work::Peek { policy, key, op, cost }
        } else {
            let command = if op == Op::Charge { Command::Charge(cost) } else { Command::Hit(cost) };
            Work::Change { policy, key, command }
        };
        let answer = self.call(work);
        let path = self.shared.path.clone();
        StorageFuture::new(measured(LABEL, async move {
            match answer.await.map_err(|error| error.uncounted_if(is_peek))? {
                WorkResult::Decided(decision) => Ok(decision),
                _ => Err(ended(&path)),
            }
        }))
    }

    /// Decides on all keys in one transaction.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let Err(error) = StorageRequest::check_members(members) {
            return StorageFuture::ready(Err(error));
        }
        let is_peek = members.iter().all(StorageRequest::is_peek);
        let member = |member: &StorageRequest<'_>| (self.name(member.policy, member.key), member.owned());
        let answer = self.call(Work::DecideAll { members: members.iter().map(member).collect() });
        let path = self.shared.path.clone();
        StorageFuture::new(measured(LABEL, async move {
            match answer.await.map_err(|error| error.uncounted_if(is_peek))? {
                WorkResult::DecidedAll(decisions) => Ok(decisions),
                _ => Err(ended(&path)),
            }
        }))
    }

    fn validate_members(&self, _: &[Policy]) -> Result<(), ConfigError> {
        Ok(())
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
                _ => Err(ended(&path)),
            }
        })
    }

    /// Lists the keys in one transaction that only reads, and peeks at each in another one.
    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        match NameRange::new(&format!("{}:", self.prefix), &request) {
            Ok(range) => StorageFuture::new(self.clone().key_page(range, request.policy.clone())),
            Err(error) => StorageFuture::ready(Err(error)),
        }
    }
}

impl SqliteStorage {
    async fn key_page(self, range: NameRange, policy: Policy) -> Result<KeyPage, StorageError> {
        match self.call(Work::List(range.clone())).await.map_err(StorageError::uncounted)? {
            WorkResult::Listed(found) => range.page(&self, &policy, &found).await,
            _ => Err(ended(&self.shared.path)),
        }
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
        let (shared, clock, timeout) = (Arc::clone(&self.shared), self.clock.clone(), self.timeout);
        async move {
            if Handle::try_current().is_err() {
                return Err(StorageError::no_runtime());
            }
            let deadline = Instant::now() + timeout;
            let Ok(counted) = Arc::clone(&shared.waiting).try_acquire_owned() else {
                // Without the delay, callers that retry at once would take all processor time.
                sleep_until(deadline - timeout / 4).await;
                return Err(overloaded(&shared.path, MAX_WAITING));
            };
            let (ticket, caller) = Ticket::new();
            shared.send(FileJob { work, clock, deadline, ticket, counted })?;
            caller.wait(deadline).await.unwrap_or_else(|unanswered| {
                Err(match unanswered {
                    Unanswered::Dropped => ended(&shared.path),
                    Unanswered::Late(stage) => late(&shared.path, stage.is_begun),
                })
            })
        }
    }
}

const EXAMPLES: &str = "write sqlite:limits.db or sqlite:/var/lib/app/limits.db";

/// The settings of a URL.
#[derive(Debug)]
struct SqliteUrl {
    path: PathBuf,
    prefix: Box<str>,
    timeout: Duration,
    durability: Durability,
}

impl SqliteUrl {
    fn parse(url: &str) -> Result<Self, ConfigError> {
        let (before, query) = url.split_once('?').unwrap_or((url, ""));
        let wrong = |why: String| ConfigError::new(format!("cannot read the URL {before:?}: {why}"));
        // The URL of a server may contain a password.
        let Some(path) = before.strip_prefix("sqlite:") else {
            return Err(ConfigError::new(format!("cannot read the URL: {EXAMPLES}")));
        };
        let path = decoded(path.strip_prefix("//").unwrap_or(path));
        let path = path.map_err(|why| wrong(why.to_owned()))?;
        checked(&path).map_err(wrong)?;
        let mut options = Options::parse(query, &wrong)?;
        let (prefix, timeout) = (options.prefix()?, options.timeout()?);
        let durability = options.choice(
            "durability",
            Durability::EverySecond,
            &[("every-second", Durability::EverySecond), ("every-commit", Durability::EveryCommit)],
        )?;
        options.end()?;
        Ok(Self { path: path.into(), prefix, timeout, durability })
    }
}

/// Returns an error message for the two paths that SQLite does not treat as the name of a file.
fn checked(path: &str) -> Result<(), String> {
    match path {
        "" => Err(format!("the path is missing: {EXAMPLES}")),
        ":memory:" => Err("a database in memory is not shared and is not kept: use memory://".to_owned()),
        _ => Ok(()),
    }
}
