//! Locks of other processes, and callers that stop waiting.

use std::time::Duration;

use common::policy;
use common::servers::storage::RUNTIME;
use common::time::Stopwatch;
use rusqlite::Connection;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_ratelimit::storage::{SqliteStorage, StorageError, StorageErrorKind};
use tower_ratelimit::{Decision, Key, RateLimiter, Storage};

use super::{Folder, LONG, open, open_with};

const QUICK: Duration = Duration::from_millis(100);

fn limiter(storage: SqliteStorage) -> RateLimiter {
    RateLimiter::with_storage(policy("fixed-window 1000/day"), storage)
}

/// A connection with the write lock.
fn lock(folder: &Folder) -> Connection {
    let connection = Connection::open(folder.file()).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    connection
}

#[test]
fn lock_of_another_process_is_an_error_at_the_deadline_and_counts_nothing() {
    let folder = Folder::new();
    let quick = open_with(&folder.file(), &format!("timeout={QUICK:?}"));
    let (patient, limiter) = (limiter(open(&folder.file())), limiter(quick.clone()));
    RUNTIME.block_on(async {
        quick.ready(LONG).await.unwrap();
        assert_eq!(patient.hit(&Key::global()).await.unwrap().remaining(), 999);
        let other = lock(&folder);
        let watch = Stopwatch::start();
        let error = limiter.hit(&Key::global()).await.unwrap_err();
        assert!(watch.wall() >= QUICK);
        watch.assert_below(QUICK + Duration::from_secs(1), "the hit fails");
        assert!(error.kind() == StorageErrorKind::Timeout && !error.may_have_counted(), "{error:?}");
        assert!(error.to_string().contains("another process may hold its lock"), "{error:?}");
        // Readers need no lock.
        assert_eq!(patient.peek(&Key::global()).await.unwrap().remaining(), 999);
        drop(other);
        assert_eq!(patient.hit(&Key::global()).await.unwrap().remaining(), 998);
    });
}

#[test]
fn hit_waits_for_the_lock_of_another_process() {
    let folder = Folder::new();
    let limiter = limiter(open(&folder.file()));
    let other = lock(&folder);
    let (hits, ()) = RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for client in 0..20_u64 {
            let limiter = limiter.clone();
            tasks.spawn(async move { limiter.hit(&Key::from(client % 3)).await.unwrap().is_admitted() });
        }
        let release = async {
            tokio::time::sleep(QUICK).await;
            drop(other);
        };
        tokio::join!(tasks.join_all(), release)
    });
    assert_eq!(hits, [true; 20]);
}

/// While another process holds the lock for a long time, the waiting calls do not fill the memory.
#[test]
fn calls_beyond_the_limit_are_not_queued() {
    let folder = Folder::new();
    // Calls beyond the limit fail after three quarters of it, and queued ones at its end.
    let timeout = Duration::from_secs(20);
    let storage = open_with(&folder.file(), &format!("timeout={timeout:?}"));
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let limiter = limiter(storage);
    let (watch, other) = (Stopwatch::start(), lock(&folder));
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for client in 0..1_500_u64 {
            let limiter = limiter.clone();
            tasks.spawn(async move { limiter.hit(&Key::from(client)).await });
        }
        for _ in 1_024..1_500 {
            let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
            assert!(error.to_string().starts_with("overloaded: 1024 calls wait for "), "{error}");
            assert!(!error.may_have_counted() && !error.is_timeout());
        }
        drop(other);
        for answer in tasks.join_all().await {
            let is_late = answer.as_ref().is_err_and(StorageError::is_timeout) && watch.excuses(timeout);
            assert!(is_late || answer.as_ref().is_ok_and(Decision::is_admitted), "{answer:?}");
        }
    });
}

#[test]
fn dropped_hit_that_was_queued_is_counted() {
    let folder = Folder::new();
    let limiter = limiter(open(&folder.file()));
    let other = lock(&folder);
    RUNTIME.block_on(async {
        let dropped = timeout(QUICK / 4, limiter.hit(&Key::from("a"))).await;
        assert!(dropped.is_err());
        drop(other);
        assert_eq!(limiter.hit(&Key::from("b")).await.unwrap().remaining(), 999);
        assert_eq!(limiter.hit(&Key::from("a")).await.unwrap().remaining(), 998);
    });
}

/// Guards against this defect: the hits of clients that left are counted after a long lock.
#[test]
fn dropped_hit_is_not_counted_after_its_deadline() {
    let folder = Folder::new();
    let (dropping, limiter) =
        (limiter(open_with(&folder.file(), &format!("timeout={QUICK:?}"))), limiter(open(&folder.file())));
    RUNTIME.block_on(dropping.storage().ready(LONG)).unwrap();
    let other = lock(&folder);
    RUNTIME.block_on(async {
        let mut dropped = dropping.hit(&Key::from("a"));
        assert!(common::poll(&mut dropped).is_pending());
        drop(dropped);
        tokio::time::sleep(QUICK).await;
        drop(other);
        dropping.storage().ready(LONG).await.unwrap();
        assert_eq!(limiter.peek(&Key::from("a")).await.unwrap().remaining(), 1_000);
    });
}

#[test]
fn hit_outside_of_a_runtime_is_an_error() {
    let folder = Folder::new();
    let limiter = limiter(open(&folder.file()));
    let error = common::poll(&mut limiter.hit(&Key::global()));
    assert!(matches!(error, std::task::Poll::Ready(Err(_))), "{error:?}");
    // Without a runtime, nothing was counted.
    assert_eq!(RUNTIME.block_on(limiter.hit(&Key::global())).unwrap().remaining(), 999);
}
