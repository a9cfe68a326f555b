//! Decisions on a real PostgreSQL: the laws, exact totals, and the stored states.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::example_process::Server as ExampleServer;
use common::servers::storage::RUNTIME;
use common::servers::{Postgres, with_option, with_timeout};
use common::{Foreign, policy};
use tower_ratelimit::storage::{ManualClock, PostgresStorage, StorageErrorKind, StorageRequest};
use tower_ratelimit::testing::StorageLaws;
use tower_ratelimit::{ElasticWindow, Key, MovingWindow, Op, Policy, Quota, RateLimiter, Storage, Timestamp};

use super::{LONG, connected};

/// A storage with a new prefix and a manual clock.
fn on(server: &Postgres, clock: ManualClock) -> PostgresStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
    with_prefix(server, &prefix).clock(clock)
}

/// A storage with one connection.
fn with_prefix(server: &Postgres, prefix: &str) -> PostgresStorage {
    let url = with_option(&with_option(&server.url(), "connections", 1), "prefix", prefix);
    PostgresStorage::new(&with_timeout(&url, LONG)).unwrap()
}

#[test]
fn storage_obeys_the_laws() {
    let server = Postgres::start(&["synchronous_commit=off"]);
    let _ = connected(&server);
    let server = Arc::new(server);
    let same = Arc::clone(&server);
    StorageLaws::new(move |clock| on(&server, clock))
        // The laws need hundreds of scripts only on a storage in memory.
        .scripts(32)
        // The second handle has its own connection and remembered states, as in another process.
        .second_handle(move |storage| {
            let debug = format!("{storage:?}");
            let prefix = debug.split("prefix: \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
            with_prefix(&same, prefix).clock(ManualClock::default())
        })
        .and_policies([
            Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
            Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
        ])
        .check();
}

#[test]
fn decisions_agree_with_every_golden_vector() {
    let server = Postgres::start(&["synchronous_commit=off"]);
    common::vectors::assert_all_agree(&server.url());
}

/// Guards against defects seen in practice: check and increment are two steps, or SELECT then
/// UPDATE.
#[test]
fn four_processes_admit_exactly_the_limit() {
    let server = Postgres::start(&[]);
    let policy = "fixed-window 40/day; moving-window 60/day";
    let flags = ["--policy", policy, "--storage", &server.url(), "--on-error", "refuse", "--timeout", "60s"];
    let servers: Vec<ExampleServer> = (0..4).map(|_| ExampleServer::start(&flags)).collect();
    let ask = |server: &ExampleServer| (0..20).filter(|_| server.status("/", "") == 200).count();
    let admitted: usize = std::thread::scope(|scope| {
        let asking: Vec<_> = servers.iter().map(|server| scope.spawn(|| ask(server))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(admitted <= 40, "{admitted}");
    // Contended hits are retried.
    let more = (0..40).filter(|_| servers[0].status("/", "") == 200).count();
    assert_eq!(admitted + more, 40);
}

#[test]
fn stored_states_are_as_documented() {
    let server = Postgres::start(&[]);
    let clock = ManualClock::new(Timestamp::from_micros(1_728_000_000_000_000));
    let limiter =
        RateLimiter::with_storage(policy("fixed-window 3/minute").with_name("free"), connected(&server).clock(clock));
    let rows = || server.ask("SELECT key, state, expires_at > now() + '1 minute' FROM tower_ratelimit");
    let _ = RUNTIME.block_on(limiter.hit(&Key::from("alice"))).unwrap();
    // The last number is the low 32 bits of the start of the window.
    let state = "v1@1728000000000000[1.fixed-window/60000000 1728000060000000,1,1512833024]";
    assert_eq!(rows(), format!("rl:free|t:alice|{state}|t"));
    RUNTIME.block_on(limiter.clear(&Key::from("alice"))).unwrap();
    assert_eq!(rows(), "");
}

#[test]
fn unreadable_state_is_treated_as_fresh() {
    let server = Postgres::start(&[]);
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), connected(&server));
    for spoil in ["garbage", "v1[1.fixed-window/86400000000 99999999999999999999,1,1]", ""] {
        server.ask(&format!(
            "INSERT INTO tower_ratelimit VALUES ('rl:p|t:k', '{spoil}', 'infinity')
             ON CONFLICT (key) DO UPDATE SET state = excluded.state"
        ));
        for expected in [true, true, false] {
            let decision = RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap();
            assert_eq!(decision.is_admitted(), expected, "{spoil:?}");
        }
    }
}

/// A program with the next version of this crate shares the table.
#[test]
fn state_of_an_unknown_version_is_never_overwritten() {
    let server = Postgres::start(&[]);
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), connected(&server));
    // The storage remembers the text that it has written.
    assert!(RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap().is_admitted());
    server.ask("UPDATE tower_ratelimit SET state = 'v2;new'");
    let state = || server.ask("SELECT state FROM tower_ratelimit WHERE key = 'rl:p|t:k'");
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

/// A decision on a remembered state would be wrong after another process has changed the key.
#[test]
fn decision_after_a_change_by_another_process_uses_the_new_state() {
    let server = Postgres::start(&[]);
    let policy = policy("fixed-window 2/day");
    let [one, two] = [(); 2].map(|()| RateLimiter::with_storage(policy.clone(), connected(&server)));
    let key = Key::from("k");
    RUNTIME.block_on(async {
        for _ in 0..3 {
            assert_eq!(one.hit(&key).await.unwrap().remaining(), 1);
            assert_eq!(two.hit(&key).await.unwrap().remaining(), 0);
            assert!(one.hit(&key).await.unwrap().is_refused());
            two.clear(&key).await.unwrap();
            assert_eq!(one.peek(&key).await.unwrap().remaining(), 2);
        }
        assert_eq!(one.hit(&key).await.unwrap().remaining(), 1);
        two.clear(&key).await.unwrap();
        assert!(two.hit_with_cost(&key, 2).await.unwrap().is_admitted());
        assert!(one.hit(&key).await.unwrap().is_refused());
    });
}

#[test]
fn clear_all_removes_the_keys_of_one_prefix() {
    let server = Postgres::start(&[]);
    let _ = connected(&server);
    let [ours, longer, theirs] = ["shop", "shop2", "shop:staging"].map(|prefix| with_prefix(&server, prefix));
    RUNTIME.block_on(async {
        for storage in [&ours, &longer, &theirs] {
            storage.ready(LONG).await.unwrap();
            let limiter = RateLimiter::with_storage(policy("3/minute"), storage.clone());
            for client in 0..10_u64 {
                let _ = limiter.hit(&Key::from(client)).await.unwrap();
            }
        }
        assert_eq!(ours.clear_all().await.unwrap(), 10);
        assert_eq!(ours.clear_all().await.unwrap(), 0);
    });
    assert_eq!(server.ask("SELECT count(*) FROM tower_ratelimit"), "20");
}

#[test]
fn policy_whose_log_does_not_fit_is_rejected() {
    let storage = PostgresStorage::new("postgres://a@127.0.0.1:1?long-logs=allow").unwrap();
    let large = policy("moving-window 1000000/day");
    assert!(storage.validate(&large).unwrap_err().to_string().contains("sliding-window-counter"));
    let error = RUNTIME.block_on(storage.decide(StorageRequest::new(&large, &Key::from("k"), Op::Hit, 1))).unwrap_err();
    assert!(!error.may_have_counted(), "{error}");
}

#[test]
fn error_of_an_invalid_url_has_a_correction_and_hides_the_password() {
    let wrong = [
        ("postgres://", "user is missing"),
        ("postgres://host/db", "user is missing"),
        ("postgres://a:secret@host:0x/db", "invalid"),
        ("postgres://a:secret@host/db?port2=1", "unknown option `port2`"),
        ("postgres://a:secret@host/db?tabel=limits&host=h", "unknown option \"tabel\"; did you mean \"table\"?"),
        ("postgres://a:secret@host/db?port=0x&tabel=limits", "option `port`"),
        ("postgres://a:secret@host/db?timeout=0s", "invalid timeout"),
        ("postgres://a:secret@host/db?table=a-b", "invalid schema or table \"a-b\""),
        ("postgres://a:secret@host/db?unlogged=yes", "write unlogged=true or unlogged=false"),
        ("postgres://a:secret@host/db?connections=0", "invalid connections"),
        ("postgres://a:secret@host/db?sslmode=prefer", "write sslmode=require for TLS, or sslmode=disable"),
        ("postgres://a:secret@host/db?sslmode=require&ca=/none.pem", "cannot read \"/none.pem\""),
        ("postgres://a:secret@host/db?sslmode=require&cert=a.pem", "write key="),
        ("postgres://a:secret@host/db?ca=a.pem", "ca needs TLS: add sslmode=require"),
        ("postgres://a:secret@host/db?sslmode=disable&sslnegotiation=direct", "sslnegotiation needs TLS"),
        ("postgres://a:secret@host/db?sslm%6Fde=require", "invalid option name \"sslm%6Fde\""),
        ("postgres://a:secret@host/db?sslmode=require&sslrootcert=a.pem", "write ca="),
        ("postgres://a:secret@/db?host=/run/postgresql&sslmode=require", "remove sslmode"),
        ("http://a:secret@host", "write postgres://"),
        ("host=db user=app password=secret dbname=x", "write postgres://"),
        ("postgres://host=db user=app password=secret", "user is missing"),
    ];
    for (url, part) in wrong {
        let error = PostgresStorage::new(url).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("secret"), "{url}: {error}");
    }
    let right =
        "postgresql://a:secret@host,[::1]:1/db?prefix=p&timeout=1s&schema=s&options=-c%20geqo%3Doff&connections=2";
    let debug = format!("{:?}", PostgresStorage::new(right).unwrap());
    assert!(!debug.contains("secret") && debug.contains("\"s\""), "{debug}");
}
