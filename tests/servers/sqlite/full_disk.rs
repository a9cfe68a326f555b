//! A disk without space, on a file system of a few megabytes.
//!
//! The test mounts the file system in a mount namespace of its own, in a child process. The kernel
//! removes both when the process ends.

use std::env;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::policy;
use common::servers::storage::RUNTIME;
use tokio::task::JoinSet;
use tower_ratelimit::storage::{SqliteStorage, StorageError, StorageErrorKind, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

use super::{Folder, LONG, open};

/// The environment variable of the child process.
const INSIDE: &str = "TOWER_RATELIMIT_FULL_DISK";
const NAME: &str = "sqlite::full_disk::expired_rows_make_room_on_a_full_disk";

/// The ways to a mount namespace: of root, in a namespace of users, which some systems forbid, and with the
/// rights of `sudo`.
const UNSHARE: [&[&str]; 3] = [
    &["unshare", "--mount"],
    &["unshare", "--mount", "--user", "--map-root-user"],
    &["sudo", "-n", "unshare", "--mount"],
];

/// Mounts a small file system on a folder.
const MOUNT: [&str; 6] = ["mount", "-t", "tmpfs", "-o", "size=4m", "none"];

/// The hits that share a transaction.
const TOGETHER: u32 = 200;

#[test]
fn expired_rows_make_room_on_a_full_disk() {
    if let Some(folder) = env::var_os(INSIDE) {
        return fill_a_disk(Path::new(&folder));
    }
    let folder = Folder::new();
    let unshare = UNSHARE.into_iter().find(|words| {
        let mounted = run(words).args(MOUNT).arg(&folder.0).output();
        mounted.is_ok_and(|output| output.status.success())
    });
    let unshare = unshare.expect("a mount namespace needs root, sudo, or a system that allows namespaces of users");
    let mut command = run(unshare);
    command.arg("env").arg(format!("{INSIDE}={}", folder.0.display()));
    let output = command.arg(env::current_exe().unwrap()).args(["--exact", NAME, "--nocapture"]).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "the child process failed\n{text}");
}

fn run(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

fn try_hit(storage: &SqliteStorage, policy: &Policy, key: &str) -> Result<Decision, StorageError> {
    RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &Key::from(key), Op::Hit, 1)))
}

/// Makes hits of new clients until one fails. Returns the number of admitted hits and the error.
fn fill(storage: &SqliteStorage, policy: &Policy, round: u32) -> (u32, StorageError) {
    let mut admitted = 0;
    for group in 0..400 {
        let answers = RUNTIME.block_on(async {
            let mut tasks = JoinSet::new();
            for number in 0..TOGETHER {
                let (storage, policy) = (storage.clone(), policy.clone());
                let key = Key::from(format!("{number}-{group}-{round}-{}", "x".repeat(150)));
                tasks.spawn(async move { storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await });
            }
            tasks.join_all().await
        });
        admitted += u32::try_from(answers.iter().filter(|answer| answer.is_ok()).count()).unwrap();
        if let Some(Err(error)) = answers.into_iter().find(Result::is_err) {
            return (admitted, error);
        }
    }
    panic!("the disk is never full: {admitted} rows");
}

fn fill_a_disk(folder: &Path) {
    let mounted = run(&MOUNT).arg(folder).status();
    assert!(mounted.unwrap().success(), "cannot mount a file system");
    let storage = open(&folder.join("limits.db"));
    // A row is kept for five more seconds, because the clocks of two processes may differ.
    let (short, long) = (policy("fixed-window 3 per 3 seconds"), policy("fixed-window 1000000/day").with_name("long"));
    assert!(try_hit(&storage, &long, "long").is_ok());
    let mut spent = 1;
    let (first, error) = fill(&storage, &short, 0);
    println!("{first} rows, then {error:#}");
    assert!(first >= 5 * TOGETHER, "{first} rows");
    assert_eq!(error.kind(), StorageErrorKind::Refused, "{error:?}");
    assert!(error.to_string().contains("free some space") && !error.may_have_counted(), "{error:?}");
    // No other program frees space, but the rows expire.
    let (mut admitted, started) = (0, Instant::now());
    for round in 1.. {
        spent += u32::from(try_hit(&storage, &long, "long").is_ok());
        admitted += fill(&storage, &short, round).0;
        if admitted >= first * 3 / 4 {
            break;
        }
        assert!(started.elapsed() < LONG * 3, "expired rows make no room: {admitted} new rows");
        thread::sleep(Duration::from_millis(100));
    }
    println!("{admitted} new rows after {:?}", started.elapsed());
    let left = try_hit(&storage, &long, "long").unwrap().remaining();
    assert_eq!(left, 1_000_000 - spent - 1, "a hit that failed was counted");
}
