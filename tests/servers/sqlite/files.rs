//! Files that cannot be opened or written to, files that are replaced, and checkpoints.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::servers::wait_until;
use rusqlite::Connection;
use tower_ratelimit::storage::{SqliteStorage, StorageError, StorageErrorKind, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Storage};

use super::{Folder, LONG, open};

fn try_hit(storage: &SqliteStorage) -> Result<Decision, StorageError> {
    try_hit_of(storage, "k")
}

fn try_hit_of(storage: &SqliteStorage, key: &str) -> Result<Decision, StorageError> {
    let policy = policy("fixed-window 5/day").with_name("p");
    RUNTIME.block_on(storage.decide(StorageRequest::new(&policy, &Key::from(key), Op::Hit, 1)))
}

#[test]
fn file_that_cannot_be_opened_is_an_error() {
    let folder = Folder::new();
    let garbage = folder.file();
    fs::write(&garbage, "this is no database. ".repeat(500)).unwrap();
    for (path, part) in [
        (folder.0.join("missing/limits.db").as_path(), "check that the directory exists"),
        (folder.0.as_path(), "cannot open"),
        (garbage.as_path(), "file is not a database"),
        (Path::new(""), "the path is missing"),
        (Path::new(":memory:"), "use memory://"),
    ] {
        let error = SqliteStorage::open(path).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("cannot open"), "{error}");
        // A URL opens nothing. The first call returns the error.
        let url = format!("sqlite:{}?timeout={LONG:?}", path.display());
        let error = match SqliteStorage::new(&url) {
            Ok(storage) => format!("{:#}", RUNTIME.block_on(storage.check()).unwrap_err()),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(part), "{error}");
    }
}

/// Root ignores file permissions, so the header of the file also marks it as read-only.
#[test]
fn file_that_becomes_read_only_is_an_error() {
    let folder = Folder::new();
    let storage = open(&folder.file());
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
    // SQLite opens a file read-only if the write version in its header is greater than 2.
    let connection = Connection::open(folder.file()).unwrap();
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(connection);
    let path = folder.file();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[18] = 3;
    // Replaces the file, so that the storage opens it again.
    fs::remove_file(&path).unwrap();
    for end in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{end}", path.display()));
    }
    fs::write(&path, &bytes).unwrap();
    let error = try_hit(&storage).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Refused, "{error:?}");
    assert!(error.to_string().contains("check the permissions") && !error.may_have_counted(), "{error:?}");
    // The storage recovers when the file can be written to again.
    bytes[18] = 2;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(try_hit(&storage).unwrap().remaining(), 3);
}

#[test]
fn file_that_becomes_corrupt_is_an_error_until_it_is_moved_away() {
    let folder = Folder::new();
    let path = folder.file();
    let storage = open(&path);
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
    let connection = Connection::open(&path).unwrap();
    connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(connection);
    let mut bytes = fs::read(&path).unwrap();
    bytes[1_024..].fill(0xa5);
    fs::remove_file(&path).unwrap();
    for end in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{end}", path.display()));
    }
    fs::write(&path, &bytes).unwrap();
    for _ in 0..2 {
        let error = try_hit(&storage).unwrap_err();
        assert!(error.to_string().contains("move the file away") && !error.may_have_counted(), "{error:?}");
        assert!(format!("{error:#}").contains("malformed"), "{error:?}");
    }
    fs::rename(&path, folder.0.join("corrupt.db")).unwrap();
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
}

/// SQLite would continue to write to the deleted file, which no other process can see.
#[test]
fn deleted_file_is_created_again() {
    let folder = Folder::new();
    let storage = open(&folder.file());
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
    for end in ["", "-wal", "-shm"] {
        fs::remove_file(format!("{}{end}", folder.file().display())).unwrap();
    }
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
    assert_eq!(try_hit(&open(&folder.file())).unwrap().remaining(), 3);
}

#[test]
fn dropped_table_is_created_again() {
    let folder = Folder::new();
    let storage = open(&folder.file());
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
    Connection::open(folder.file()).unwrap().execute("DROP TABLE tower_ratelimit", []).unwrap();
    let error = try_hit(&storage).unwrap_err();
    assert!(format!("{error:#}").contains("no such table") && !error.may_have_counted(), "{error:?}");
    assert_eq!(try_hit(&storage).unwrap().remaining(), 4);
}

/// Longer than the time between two checkpoints, which write hits to the database.
const OVERDUE: Duration = Duration::from_millis(1_500);

/// Makes a hit that is only in the log. Another process reads the database without that hit, so it
/// cannot be written to the database before the reader is dropped.
fn hit_behind_a_reader(folder: &Folder) -> (SqliteStorage, Connection) {
    let storage = open(&folder.file());
    assert!(try_hit_of(&storage, "first").unwrap().is_admitted());
    let reader = Connection::open(folder.file()).unwrap();
    let is_busy: bool = reader.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)).unwrap();
    assert!(!is_busy);
    reader.execute_batch("BEGIN; SELECT count(*) FROM tower_ratelimit").unwrap();
    assert!(try_hit_of(&storage, "second").unwrap().is_admitted());
    assert!(!is_in_database(folder));
    (storage, reader)
}

/// Returns `true` if the second hit would survive the loss of the log.
fn is_in_database(folder: &Folder) -> bool {
    let copy = folder.0.join("copy.db");
    fs::copy(folder.file(), &copy).unwrap();
    let rows = |database: Connection| database.query_row("SELECT count(*) FROM tower_ratelimit", [], |row| row.get(0));
    // The copy may be incomplete while a checkpoint is written.
    Connection::open(copy).and_then(rows) == Ok(2)
}

#[test]
fn checkpoint_is_retried_until_a_reader_ends() {
    let folder = Folder::new();
    let (_storage, reader) = hit_behind_a_reader(&folder);
    thread::sleep(OVERDUE);
    assert!(!is_in_database(&folder));
    drop(reader);
    wait_until("the hit is in the database", || is_in_database(&folder));
}

#[test]
fn checkpoint_is_retried_after_a_checkpoint_of_another_process() {
    static ATTEMPTS: AtomicU32 = AtomicU32::new(0);
    static RELEASED: AtomicBool = AtomicBool::new(false);
    let folder = Folder::new();
    let (_storage, reader) = hit_behind_a_reader(&folder);
    // This connection holds the lock of checkpoints while it waits for the reader.
    #[allow(unused_mut, reason = "rusqlite borrows it mutably since 0.41")]
    let mut other = Connection::open(folder.file()).unwrap();
    other
        .busy_handler(Some(|_| {
            ATTEMPTS.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(5));
            !RELEASED.load(Ordering::SeqCst)
        }))
        .unwrap();
    let waiting = thread::spawn(move || {
        let is_busy = other.query_row("PRAGMA wal_checkpoint(FULL)", [], |row| row.get(0));
        assert_eq!(is_busy, Ok(true));
    });
    wait_until("the other process waits", || ATTEMPTS.load(Ordering::SeqCst) > 0);
    thread::sleep(OVERDUE);
    RELEASED.store(true, Ordering::SeqCst);
    waiting.join().unwrap();
    drop(reader);
    wait_until("the hit is in the database", || is_in_database(&folder));
}
