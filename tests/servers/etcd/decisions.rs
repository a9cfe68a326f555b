//! Decisions on a real etcd: the laws, exact totals, and the stored states.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use common::servers::{Etcd, with_option, with_timeout};
use common::{Foreign, policy};
use tokio::runtime::Runtime;
use tower_ratelimit::storage::{AnyStorage, EtcdStorage, ManualClock, StorageRequest};
use tower_ratelimit::testing::StorageLaws;
use tower_ratelimit::{ElasticWindow, Key, MovingWindow, Op, Policy, Quota, RateLimiter, Storage, Timestamp};

use super::LONG;

/// Connections live as long as the runtime on which they were opened.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A storage with a new prefix and a manual clock.
fn on(etcd: &Etcd, clock: ManualClock) -> EtcdStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
    with_prefix(etcd, &prefix).clock(clock)
}

fn with_prefix(etcd: &Etcd, prefix: &str) -> EtcdStorage {
    EtcdStorage::new(&with_option(&with_timeout(&etcd.url(), LONG), "prefix", prefix)).unwrap()
}

fn storage(etcd: &Etcd) -> EtcdStorage {
    let storage = EtcdStorage::new(&with_timeout(&etcd.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    storage
}

#[test]
fn storage_obeys_the_laws() {
    let etcd = Etcd::start(1);
    let _ = storage(&etcd);
    StorageLaws::new(|clock| on(&etcd, clock))
        // etcd is slow. `tests/laws` runs all scripts with the same loop on a store in memory.
        .scripts(16)
        // A storage with a new clock decides on its own, as in another process.
        .second_handle(|storage| storage.clone().clock(ManualClock::default()))
        .and_policies([
            Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
            Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
        ])
        .check();
}

#[test]
fn storage_obeys_the_laws_on_three_members() {
    let etcd = Etcd::calm();
    let _ = storage(&etcd);
    let several = policy("fixed-window 3/second; moving-window 9/minute; token-bucket 10/hour");
    StorageLaws::new(|clock| on(&etcd, clock)).scripts(4).and_policies([several]).check();
}

#[test]
fn decisions_agree_with_every_golden_vector() {
    let etcd = Etcd::start(1);
    common::vectors::assert_all_agree(&etcd.url());
}

/// Guards against defects seen in practice: check and increment are two steps, or GET then SET in a
/// shared store.
#[test]
fn four_processes_admit_exactly_the_limit() {
    let store = Etcd::calm();
    let policy = "fixed-window 40/day; moving-window 60/day";
    let flags = ["--policy", policy, "--storage", &store.url(), "--on-error", "refuse", "--timeout", "10s"];
    let servers: Vec<common::example_process::Server> =
        (0..4).map(|_| common::example_process::Server::start(&flags)).collect();
    let ask = |server: &common::example_process::Server| (0..20).filter(|_| server.status("/", "") == 200).count();
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
    let etcd = Etcd::start(1);
    let clock = ManualClock::new(Timestamp::from_micros(1_728_000_000_000_000));
    let storage = storage(&etcd).clock(clock.clone());
    let [free, other] = ["fixed-window 3/minute", "fixed-window 3/minute; moving-window 3/hour"];
    RUNTIME.block_on(async {
        storage.ready(LONG).await.unwrap();
        let alice = Key::from("alice");
        let limiter = RateLimiter::with_storage(policy(free).with_name("free"), storage.clone());
        let _ = limiter.hit(&alice).await.unwrap();
        // The last number is the low 32 bits of the start of the window.
        let first = "v1@1728000000000000[1.fixed-window/60000000 1728000060000000,1,1512833024]";
        assert_eq!(etcd.all(), [("rl:free|t:alice".to_owned(), first.to_owned())]);
        let shop = with_prefix(&etcd, "shop").clock(clock);
        shop.ready(LONG).await.unwrap();
        let both = RateLimiter::with_storage(policy(other).with_name("free"), shop);
        let _ = both.hit(&alice).await.unwrap();
        let log = "[2.moving-window/3600000000 1728003600000000,1728000000000000*1]";
        assert_eq!(etcd.all()[1], ("shop:free|t:alice".to_owned(), format!("{first}{log}")));
        both.clear(&alice).await.unwrap();
        assert_eq!(etcd.all().len(), 1);
        limiter.clear(&alice).await.unwrap();
        assert_eq!(etcd.all(), []);
    });
}

#[test]
fn clear_all_removes_the_keys_of_one_prefix() {
    let etcd = Etcd::start(1);
    let _ = storage(&etcd);
    let [ours, longer, theirs] = ["shop", "shop2", "shop:staging"].map(|prefix| with_prefix(&etcd, prefix));
    RUNTIME.block_on(async {
        for storage in [&ours, &longer, &theirs] {
            storage.ready(LONG).await.unwrap();
            let limiter = RateLimiter::with_storage(policy("3/minute"), storage.clone());
            for client in 0..10_u64 {
                let _ = limiter.hit(&Key::from(client)).await.unwrap();
            }
        }
        assert_eq!(AnyStorage::new(ours.clone()).clear_all().await.unwrap(), 10);
        assert_eq!(ours.clear_all().await.unwrap(), 0);
    });
    assert_eq!(etcd.all().len(), 20);
}

#[test]
fn unreadable_state_is_treated_as_fresh() {
    let etcd = Etcd::start(1);
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), storage(&etcd));
    for spoil in [&b"garbage"[..], b"\xff\xfe", b"v1[1.fixed-window/86400000000 99999999999999999999,1,1]", b""] {
        etcd.put("rl:p|t:k", spoil);
        RUNTIME.block_on(async {
            for expected in [true, true, false] {
                assert_eq!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted(), expected, "{spoil:?}");
            }
        });
    }
}

#[test]
fn policy_whose_log_does_not_fit_is_rejected_and_the_longest_state_is_stored() {
    let etcd = Etcd::start(1);
    let storage = storage(&etcd);
    let large = policy("moving-window 1000000/day");
    let error = storage.validate(&large).unwrap_err().to_string();
    assert!(error.contains("sliding-window-counter"), "{error}");
    let error = RUNTIME.block_on(storage.decide(StorageRequest::new(&large, &Key::from("k"), Op::Hit, 1))).unwrap_err();
    assert!(!error.may_have_counted(), "{error}");
    // A value of the maximum length.
    let longest = "x".repeat(1_499_900);
    etcd.put("rl:p|t:k", longest.as_bytes());
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), storage);
    assert!(RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap().is_admitted());
}

#[test]
fn error_of_an_invalid_url_has_a_correction_and_hides_the_password() {
    let wrong = [
        ("etcd://", "host is missing"),
        ("etcd://host/path", "leave it out"),
        ("etcd://:secret@host", "write user:password@"),
        ("etcd://secret@host", "no password"),
        ("etcd://host:0", "invalid host \"host:0\""),
        ("etcd://a:secret@host?port=1", "unknown option \"port\""),
        ("etcd://a:secret@host?timeout=0s", "invalid timeout"),
        ("etcd+unix:///etcd.sock", "write etcd://"),
        ("etcds://a:secret@host?ca=/nowhere.pem", "cannot read \"/nowhere.pem\""),
        ("http://a:secret@host", "write etcd://"),
    ];
    for (url, part) in wrong {
        let error = EtcdStorage::new(url).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("secret"), "{url}: {error}");
    }
    let right = "etcd://a:secret@host,[::1]:1,127.0.0.1/?prefix=p&timeout=1s";
    let debug = format!("{:?}", EtcdStorage::new(right).unwrap());
    assert!(["host:2379", "[::1]:1", "127.0.0.1:2379", "\"p\""].iter().all(|part| debug.contains(part)), "{debug}");
    assert!(!debug.contains("secret"), "{debug}");
    assert!(right.parse::<AnyStorage>().is_ok());
}
