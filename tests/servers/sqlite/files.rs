//! Files that cannot be opened or written to, and files that are replaced.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::policy;
use common::servers::storage::RUNTIME;
use rusqlite::Connection;
use tower_ratelimit::storage::{SqliteStorage, StorageError, StorageErrorKind, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Storage};

use super::{Folder, open};

fn try_hit(storage: &SqliteStorage) -> Result<Decision, StorageError> {
    let policy = policy("fixed-window 5/day").with_name("p");
    RUNTIME.block_on(storage.decide(StorageRequest::new(&policy, &Key::from("k"), Op::Hit, 1)))
}

#[test]
fn file_that_cannot_be_opened_is_an_error_at_the_start() {
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
    bytes[4_096..].fill(0xa5);
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
