//! A test with a full disk, simulated by a limit on the pages of the file.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

use super::Durability;
use super::file::File;
use super::job::{Answer, Counted, Job, Work};
use super::worker::Worker;
use crate::storage::cas::Command;
use crate::storage::{StorageError, StorageErrorKind};
use crate::{FixedWindow, Policy, Quota};

#[tokio::test]
async fn full_disk_is_an_error_and_counts_nothing() {
    let path = std::env::temp_dir().join(format!("tower-ratelimit-full-{}.db", std::process::id()));
    let file = File::open(&path, Durability::EverySecond).unwrap();
    file.limit_pages(4);
    let (calls, received) = mpsc::channel();
    let worker = Worker::with_file(path.clone(), file);
    let worker = thread::spawn(move || worker.run(&received));
    let policy = Policy::new(FixedWindow::new(), Quota::per_day(1_000));
    let hit = async |key: &str| -> Result<Answer, StorageError> {
        let work = Work::Change { policy: policy.clone(), key: key.into(), command: Command::Hit(1) };
        let (job, waiting) = Job::new(work, None, Counted::new(&Arc::default(), 1).unwrap());
        calls.send(job).unwrap();
        waiting.answer(Instant::now() + Duration::from_secs(20), &path).await
    };
    let mut admitted = 0;
    let error = loop {
        match hit(&format!("{admitted}{}", "x".repeat(150))).await {
            Ok(_) => admitted += 1,
            Err(error) => break error,
        }
        assert!(admitted < 1_000, "the disk is never full");
    };
    assert!(admitted > 0);
    assert_eq!(error.kind(), StorageErrorKind::Refused, "{error:?}");
    assert!(error.to_string().contains("free some space") && !error.may_have_counted(), "{error:?}");
    // The worker opens the file again, without the limit of the old connection.
    let Answer::Decided(decision) = hit(&format!("{admitted}{}", "x".repeat(150))).await.unwrap() else { panic!() };
    assert_eq!(decision.remaining(), 999, "the hit that failed was not counted");
    drop(calls);
    worker.join().unwrap();
    for end in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", path.display()));
    }
}
