//! Decisions on a real file: the laws, exact totals, the stored states, and expiry.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::servers::storage::RUNTIME;
use common::{Foreign, hit, policy};
use rusqlite::Connection;
use tokio::task::JoinSet;
use tower_ratelimit::storage::{ManualClock, SqliteStorage, StorageErrorKind, StorageRequest, StorageUrl};
use tower_ratelimit::testing::{StorageLaws, members_decide_like_the_model};
use tower_ratelimit::{Decision, ElasticWindow, Key, MovingWindow, Op, Policy, Quota, RateLimiter, Storage, Timestamp};

use super::{Folder, LONG, open, open_with};

/// Returns options with a new prefix and a long timeout.
fn new_prefix() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("timeout={LONG:?}&prefix=t{}", NUMBER.fetch_add(1, Ordering::SeqCst))
}

#[test]
fn storage_obeys_the_laws() {
    let folder = Folder::new();
    // A handle has its own thread and connection, as in another process.
    let file = folder.file();
    let handle = move |(options, clock): (String, ManualClock)| open_with(&file, &options).clock(clock);
    let latest = Arc::new(Mutex::new(None));
    let (first, second) = (Arc::clone(&latest), handle.clone());
    StorageLaws::new(move |clock| handle(first.lock().unwrap().insert((new_prefix(), clock)).clone()))
        .second_handle(move |_| second(latest.lock().unwrap().clone().unwrap()))
        .scripts(64)
        .and_policies([
            Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
            Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
        ])
        .check();
}

#[test]
fn several_keys_are_decided_like_by_the_model() {
    let folder = Folder::new();
    members_decide_like_the_model(|clock| open_with(&folder.file(), &new_prefix()).clock(clock));
}

/// The tasks of four handles name four keys in different orders.
#[test]
fn tasks_with_different_orders_of_keys_are_exact() {
    let folder = Folder::new();
    let storages: Vec<_> = (0..4).map(|_| open(&folder.file())).collect();
    let policies: Vec<_> = (0..4).map(|at| policy("fixed-window 300/day").with_name(format!("m{at}"))).collect();
    let hit_in_order = async |storage: SqliteStorage, policies: Vec<Policy>, task: usize| {
        let mut admitted = 0;
        for round in 0..8 {
            let order = (0..4).map(|at| (at * (2 * (task % 2) + 1) + task + round) % 4);
            let key = Key::global();
            let members: Vec<_> = order.map(|at| StorageRequest::new(&policies[at], &key, Op::Hit, 1)).collect();
            admitted += u32::from(storage.decide_all(&members).await.unwrap().iter().all(Decision::is_admitted));
        }
        admitted
    };
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..64 {
            tasks.spawn(hit_in_order(storages[task % 4].clone(), policies.clone(), task));
        }
        assert_eq!(tasks.join_all().await.into_iter().sum::<u32>(), 300);
        for policy in &policies {
            let peek = storages[0].decide(StorageRequest::new(policy, &Key::global(), Op::Peek, 1)).await.unwrap();
            assert_eq!(peek.remaining(), 0);
        }
    });
}

#[test]
fn counts_survive_a_restart() {
    let folder = Folder::new();
    let (policy, alice) = (policy("fixed-window 5/day"), Key::from("alice"));
    for durability in ["every-second", "every-commit"] {
        let options = format!("timeout={LONG:?}&prefix={durability}&durability={durability}");
        let storage = || open_with(&folder.file(), &options);
        for expected in [4, 3, 2] {
            let limiter = RateLimiter::with_storage(policy.clone(), storage());
            assert_eq!(RUNTIME.block_on(limiter.hit(&alice)).unwrap().remaining(), expected);
        }
    }
}

#[test]
fn handles_on_one_file_admit_exactly_the_limit() {
    let folder = Folder::new();
    let limiters: Vec<_> = (0..4)
        .map(|_| RateLimiter::with_storage(policy("fixed-window 300/day; moving-window 500/day"), open(&folder.file())))
        .collect();
    let admitted = RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for task in 0..32 {
            let limiter = limiters[task % limiters.len()].clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..20 {
                    admitted += u32::from(limiter.hit(&Key::global()).await.unwrap().is_admitted());
                }
                admitted
            });
        }
        tasks.join_all().await.into_iter().sum::<u32>()
    });
    assert_eq!(admitted, 300);
}

#[test]
fn stored_states_are_as_documented() {
    let folder = Folder::new();
    let clock = ManualClock::new(Timestamp::from_micros(1_728_000_000_000_000));
    let storage = open(&folder.file()).clock(clock);
    let limiter = RateLimiter::with_storage(policy("fixed-window 3/minute").with_name("free"), storage);
    let rows = || {
        let connection = Connection::open(folder.file()).unwrap();
        let mut select = connection.prepare("SELECT key, state FROM tower_ratelimit").unwrap();
        let rows = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.collect::<Result<Vec<(String, String)>, _>>().unwrap()
    };
    let _ = RUNTIME.block_on(limiter.hit(&Key::from("alice"))).unwrap();
    // The last number is the low 32 bits of the start of the window.
    let state = "v1@1728000000000000[1.fixed-window/60000000 1728000060000000,1,1512833024]";
    assert_eq!(rows(), [("rl:free|t:alice".to_owned(), state.to_owned())]);
    RUNTIME.block_on(limiter.clear(&Key::from("alice"))).unwrap();
    assert_eq!(rows(), []);
}

#[test]
fn unreadable_state_is_treated_as_fresh() {
    let folder = Folder::new();
    let storage = open(&folder.file());
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), storage);
    for spoil in ["garbage", "v1[1.fixed-window/86400000000 99999999999999999999,1,1]", ""] {
        let connection = Connection::open(folder.file()).unwrap();
        let write = "INSERT OR REPLACE INTO tower_ratelimit VALUES ('rl:p|t:k', ?1, 9223372036854775807)";
        connection.execute(write, [spoil]).unwrap();
        for expected in [true, true, false] {
            let decision = RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap();
            assert_eq!(decision.is_admitted(), expected, "{spoil:?}");
        }
    }
}

/// A program with the next version of this crate shares the file.
#[test]
fn state_of_an_unknown_version_is_never_overwritten() {
    let folder = Folder::new();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), open(&folder.file()));
    assert!(RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap().is_admitted());
    let connection = Connection::open(folder.file()).unwrap();
    connection.execute("UPDATE tower_ratelimit SET state = 'v2;new'", []).unwrap();
    let state = || -> String {
        let select = "SELECT state FROM tower_ratelimit WHERE key = 'rl:p|t:k'";
        connection.query_row(select, [], |row| row.get(0)).unwrap()
    };
    RUNTIME.block_on(async {
        let key = Key::from("k");
        for error in [limiter.hit(&key).await.unwrap_err(), limiter.peek(&key).await.unwrap_err()] {
            assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Unsupported, false), "{error:?}");
            assert!(error.to_string().contains("unknown format v2"), "{error}");
        }
        // Other keys of the same batch are not affected.
        let others = [Key::from("a"), Key::from("b")];
        let (a, next, b) = tokio::join!(limiter.hit(&others[0]), limiter.hit(&key), limiter.hit(&others[1]));
        assert!(a.unwrap().is_admitted() && next.is_err() && b.unwrap().is_admitted());
    });
    assert_eq!(state(), "v2;new");
    RUNTIME.block_on(async {
        let key = Key::from("k");
        limiter.clear(&key).await.unwrap();
        assert_eq!(limiter.hit(&key).await.unwrap().remaining(), 1);
    });
    assert!(state().starts_with("v1@"), "{}", state());
}

/// Each write checks the next four rows of the table.
#[test]
fn expired_rows_are_deleted_by_later_writes() {
    let folder = Folder::new();
    let storage = open(&folder.file());
    let rows = || -> u32 {
        let connection = Connection::open(folder.file()).unwrap();
        connection.query_row("SELECT count(*) FROM tower_ratelimit", [], |row| row.get(0)).unwrap()
    };
    let (short, long) = (policy("fixed-window 3/minute"), policy("fixed-window 3000/day"));
    RUNTIME.block_on(async {
        for client in 0..100 {
            let _ = hit(&storage, &short, &format!("short{client}"), 1).await;
            let _ = hit(&storage, &long, &format!("long{client}"), 1).await;
        }
        // A state is kept for five more seconds: the clocks of two processes may differ.
        Connection::open(folder.file())
            .unwrap()
            .execute("UPDATE tower_ratelimit SET gone_at = gone_at - 66000000 WHERE key LIKE '%short%'", [])
            .unwrap();
        assert_eq!(rows(), 200);
        for _ in 0..60 {
            let _ = hit(&storage, &long, "long0", 1).await;
        }
    });
    assert_eq!(rows(), 100);
}

/// Guards against this defect: hits that share a transaction check as few rows as one hit, so most
/// expired rows stay. A table of N rows is checked by about N / 4 hits, however they are grouped.
#[test]
fn hits_that_share_a_transaction_check_as_many_rows_as_others() {
    const EXPIRED: u32 = 4_000;
    let folder = Folder::new();
    let storage = open(&folder.file());
    let long = policy("fixed-window 100000/day");
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let connection = Connection::open(folder.file()).unwrap();
    connection
        .execute(
            "WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?1) \
             INSERT INTO tower_ratelimit SELECT 'rl:expired' || n, '[1.x 1,1,1]', 1 FROM number",
            [EXPIRED],
        )
        .unwrap();
    for left in [EXPIRED - 2_000, 0] {
        // All hits wait for this lock, and then share few transactions.
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        RUNTIME.block_on(async {
            let mut tasks = JoinSet::new();
            for _ in 0..500 {
                let (storage, policy) = (storage.clone(), long.clone());
                tasks.spawn(async move { hit(&storage, &policy, "k", 1).await });
            }
            // A hit is queued when it is polled for the first time.
            while RUNTIME.metrics().global_queue_depth() > 0 {
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            connection.execute_batch("COMMIT").unwrap();
            assert!(tasks.join_all().await.iter().all(Decision::is_admitted));
        });
        let rows: u32 = connection
            .query_row("SELECT count(*) FROM tower_ratelimit WHERE key LIKE 'rl:expired%'", [], |row| row.get(0))
            .unwrap();
        assert_eq!(rows, left);
    }
}

#[test]
fn clear_all_removes_the_keys_of_one_prefix() {
    let folder = Folder::new();
    let [ours, longer, theirs] = ["shop", "shop2", "shop:staging"]
        .map(|prefix| open_with(&folder.file(), &format!("timeout={LONG:?}&prefix={prefix}")));
    let policy = policy("3/minute");
    RUNTIME.block_on(async {
        for storage in [&ours, &longer, &theirs] {
            for client in 0..10 {
                let _ = hit(storage, &policy, &client.to_string(), 1).await;
            }
        }
        assert_eq!(ours.clear_all().await.unwrap(), 10);
        assert_eq!(ours.clear_all().await.unwrap(), 0);
        assert_eq!(longer.clear_all().await.unwrap(), 10);
        theirs.ready(LONG).await.unwrap();
    });
}

#[test]
fn error_of_an_invalid_url_has_a_correction() {
    for (url, part) in [
        ("sqlite:", "write sqlite:limits.db"),
        ("sqlite::memory:", "use memory://"),
        ("sqlite:a.db?durability=none", "write durability=every-second or durability=every-commit"),
        ("sqlite:a.db?timeout=0s", "invalid timeout"),
        ("sqlite:a.db?port=1", "unknown option \"port\"; write one of"),
        ("sqlite:a.db?timout=1s", "unknown option \"timout\"; did you mean \"timeout\"?"),
        ("sqlite:a%zz.db", "% must be followed by two digits"),
        ("postgres://app:secret@a.db", "write sqlite:limits.db"),
    ] {
        let error = SqliteStorage::new(url).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("secret"), "{url}: {error}");
    }
    let folder = Folder::new();
    let url = format!("sqlite://{}?timeout=1s&prefix=shop&durability=every-commit", folder.0.join("a%3Fb").display());
    let debug = format!("{:?}", SqliteStorage::new(&url).unwrap());
    assert!(debug.contains("a?b") && debug.contains("EveryCommit") && debug.contains("shop"), "{debug}");
    assert!(!folder.0.join("a?b").exists(), "the first call creates the file");
    RUNTIME.block_on(SqliteStorage::new(&url).unwrap().ready(LONG)).unwrap();
    assert!(folder.0.join("a?b").exists());
}

#[test]
fn decisions_agree_with_every_golden_vector() {
    let folder = Folder::new();
    common::vectors::assert_all_agree(&format!("sqlite:{}", folder.file().display()));
}

#[test]
fn storage_url_hides_the_path() {
    let folder = Folder::new();
    let path = folder.file();
    for (url, shown) in
        [(format!("sqlite:{}", path.display()), "sqlite:..."), (format!("sqlite://{}", path.display()), "sqlite://...")]
    {
        assert_eq!(url.parse::<StorageUrl>().unwrap().to_string(), shown);
    }
}
