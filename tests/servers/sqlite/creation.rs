//! New files: several handles that create one, and its permissions.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::time::{EVENTUALLY, Stopwatch};
use rusqlite::Connection;
use tower_ratelimit::storage::SqliteStorage;
use tower_ratelimit::{Key, RateLimiter};

use super::{Folder, open};

fn hit(storage: SqliteStorage) -> u32 {
    let limiter = RateLimiter::with_storage(policy("fixed-window 100/day"), storage);
    RUNTIME.block_on(limiter.hit(&Key::global())).unwrap().remaining()
}

/// Guards against this defect: `PRAGMA journal_mode = wal` does not wait for the lock of another
/// process that creates the same file, so opening it fails at once.
#[test]
fn handles_that_create_one_file_together_all_succeed() {
    const HANDLES: usize = 8;
    for round in 0..40 {
        let folder = Folder::new();
        let start = Barrier::new(HANDLES);
        let opened = || {
            start.wait();
            loop {
                let watch = Stopwatch::start();
                match SqliteStorage::open(folder.file()) {
                    Ok(_) => return open(&folder.file()),
                    // On a busy machine, the others may take longer than the second for which it waits.
                    Err(error) => assert!(watch.wall() >= Duration::from_secs(1), "round {round}: {error}"),
                }
            }
        };
        let storages: Vec<SqliteStorage> = thread::scope(|scope| {
            let threads: Vec<_> = (0..HANDLES).map(|_| scope.spawn(opened)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        if round % 10 == 0 {
            let remaining: Vec<u32> = storages.into_iter().map(hit).collect();
            assert_eq!(remaining, [99, 98, 97, 96, 95, 94, 93, 92]);
        }
    }
}

/// The other process holds the lock that the change to a write-ahead log needs.
#[test]
fn opening_waits_for_a_process_that_creates_the_file() {
    let all = Stopwatch::start();
    loop {
        let folder = Folder::new();
        let other = Connection::open(folder.file()).unwrap();
        other.execute_batch("CREATE TABLE t (x); BEGIN IMMEDIATE").unwrap();
        let watch = Stopwatch::start();
        let opened = thread::scope(|scope| {
            let opening = scope.spawn(|| SqliteStorage::open(folder.file()));
            thread::sleep(Duration::from_millis(100));
            assert!(!opening.is_finished(), "{:?}", opening.join().unwrap());
            drop(other);
            opening.join().unwrap()
        });
        match opened {
            Ok(_) => return assert_eq!(hit(open(&folder.file())), 99),
            // On a busy machine, the lock may be held for the second for which it waits.
            Err(error) => {
                let is_late = watch.wall() >= Duration::from_secs(1) && !watch.excess().is_zero();
                assert!(is_late && all.wall() < EVENTUALLY, "{error}");
            }
        }
    }
}

fn mode(path: impl AsRef<Path>) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The keys in the file may be secrets, for example tokens.
#[test]
fn created_files_can_be_read_only_by_their_owner() {
    let folder = Folder::new();
    fs::set_permissions(&folder.0, Permissions::from_mode(0o751)).unwrap();
    let assert_private = |path: &Path| {
        for end in ["", "-wal", "-shm"] {
            assert_eq!(mode(format!("{}{end}", path.display())), 0o600, "{}{end}", path.display());
        }
    };
    let storage = open(&folder.file());
    assert_eq!(hit(storage.clone()), 99);
    assert_private(&folder.file());
    // A deleted file is created again.
    for end in ["", "-wal", "-shm"] {
        fs::remove_file(format!("{}{end}", folder.file().display())).unwrap();
    }
    assert_eq!(hit(storage), 99);
    assert_private(&folder.file());
    // A symbolic link to a file that does not exist.
    let target = folder.0.join("target.db");
    symlink("target.db", folder.0.join("link.db")).unwrap();
    let storage = open(&folder.0.join("link.db"));
    assert_eq!(hit(storage), 99);
    assert_private(&target);
    assert_eq!(mode(&folder.0), 0o751, "the directory keeps its mode");
}

#[test]
fn existing_files_keep_their_mode() {
    let folder = Folder::new();
    Connection::open(folder.file()).unwrap().execute_batch("PRAGMA user_version = 1").unwrap();
    fs::set_permissions(folder.file(), Permissions::from_mode(0o640)).unwrap();
    let storage = open(&folder.file());
    assert_eq!(hit(storage.clone()), 99);
    for end in ["", "-wal", "-shm"] {
        assert_eq!(mode(format!("{}{end}", folder.file().display())), 0o640);
    }
}
