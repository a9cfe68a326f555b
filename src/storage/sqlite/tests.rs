//! A test with a full disk, simulated by a limit on the pages of the file.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::Durability;
use super::file::File;
use super::worker::{FileJob, FileWorker, Work, WorkResult};
use crate::policy::Policy;
use crate::quota::Quota;
use crate::storage::cas::Command;
use crate::storage::ticket::Ticket;
use crate::storage::{StorageError, StorageErrorKind};
use crate::strategy::FixedWindow;

/// The database, its log, the memory that its processes share, and the reserve.
const FILES: [&str; 4] = ["", "-wal", "-shm", "-reserve"];

fn has_reserve(path: &Path) -> bool {
    path.with_extension("db-reserve").exists()
}

#[tokio::test]
async fn full_disk_is_an_error_and_counts_nothing_until_rows_expire() {
    let path = std::env::temp_dir().join(format!("tower-ratelimit-full-{}.db", std::process::id()));
    let mut file = File::open(&path, Durability::EverySecond).unwrap();
    file.set_disk(160);
    let (calls, received) = mpsc::channel();
    let worker = FileWorker::with_file(path.clone(), file);
    let worker = thread::spawn(move || worker.run(&received));
    let policy = Policy::new(FixedWindow::new(), Quota::per_day(1_000));
    let waiting = Arc::new(Semaphore::new(1));
    let hit = async |client: u32| -> Result<WorkResult, StorageError> {
        let key = format!("{client}{}", "x".repeat(150)).into();
        let work = Work::Change { policy: policy.clone(), key, command: Command::Hit(1) };
        let (ticket, caller) = Ticket::new();
        let counted = Arc::clone(&waiting).try_acquire_owned().expect("a call that was answered no longer waits");
        let deadline = Instant::now() + Duration::from_secs(20);
        calls.send(FileJob { work, clock: None, deadline, ticket, counted }).unwrap();
        caller.wait(deadline).await.unwrap()
    };
    assert!(has_reserve(&path));
    let mut admitted = 0;
    let error = loop {
        match hit(admitted).await {
            Ok(_) => admitted += 1,
            Err(error) => break error,
        }
        assert!(admitted < 10_000, "the disk is never full");
    };
    assert!(admitted > 100, "{admitted}");
    assert!(!has_reserve(&path), "the reserve is deleted");
    assert_eq!(error.kind(), StorageErrorKind::Refused, "{error:?}");
    assert!(error.to_string().contains("free some space") && !error.may_have_counted(), "{error:?}");
    assert!(hit(admitted).await.is_err());
    // Hits that need no space are counted.
    let WorkResult::Decided(decision) = hit(0).await.unwrap() else { panic!() };
    assert_eq!(decision.remaining(), 998);

    // The last half of the rows expires. No row is near the beginning of the table, where the first
    // deletions search.
    let connection = Connection::open(&path).unwrap();
    let expire = "UPDATE tower_ratelimit SET gone_at = 1 WHERE key > (SELECT key FROM tower_ratelimit ORDER BY key \
                  LIMIT 1 OFFSET (SELECT count(*) / 2 FROM tower_ratelimit))";
    assert!(connection.execute(expire, []).unwrap() > 50);
    let mut failed = 0;
    let decision = loop {
        match hit(admitted).await {
            Ok(WorkResult::Decided(decision)) => break decision,
            other => assert!(other.is_err()),
        }
        failed += 1;
        assert!(failed < 100, "expired rows stay");
    };
    assert_eq!(decision.remaining(), 999, "the hits that failed were not counted");
    for client in 1..=admitted / 3 {
        assert!(hit(admitted + client).await.is_ok(), "{client} of {admitted}");
    }
    drop(calls);
    worker.join().unwrap();
    for end in FILES {
        let _ = std::fs::remove_file(format!("{}{end}", path.display()));
    }
}
