//! Decisions on real memcached servers: the laws, the golden vectors, exact totals, and evictions.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::url_of;
use common::servers::{Memcached, with_option, with_timeout};
use common::{EVERY_STRATEGY, Foreign, policy};
use tokio::runtime::Runtime;
use tower_ratelimit::storage::{ManualClock, MemcachedStorage};
use tower_ratelimit::testing::StorageLaws;
use tower_ratelimit::{
    ElasticWindow, Global, Key, MovingWindow, OnError, Policy, Quota, RateLimitLayer, RateLimiter, Storage,
};

/// Connections live as long as the runtime on which they were opened.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

const LONG: Duration = Duration::from_secs(60);

fn many(count: usize) -> Vec<Memcached> {
    (0..count).map(|_| Memcached::start(&[])).collect()
}

/// A storage with a new prefix and a manual clock.
fn on(servers: &[Memcached], clock: ManualClock) -> MemcachedStorage {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst));
    with_prefix(servers, &prefix).clock(clock)
}

fn with_prefix(servers: &[Memcached], prefix: &str) -> MemcachedStorage {
    MemcachedStorage::new(&with_option(&with_timeout(&url_of(servers), LONG), "prefix", prefix)).unwrap()
}

#[test]
fn storage_obeys_the_laws() {
    let mixed = [
        policy("fixed-window 3/second; elastic-window 4 per 3 seconds; moving-window 9/minute; token-bucket 10/hour"),
        policy("moving-window 7 per 20 seconds; moving-window 9/minute; leaky-bucket 11/day; 12/day"),
        Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
        Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
    ];
    let servers = many(3);
    StorageLaws::new(|clock| on(&servers, clock))
        // A storage with a new clock decides on its own, as in another process.
        .second_handle(|storage| storage.clone().clock(ManualClock::default()))
        .and_policies(mixed)
        .scripts(128)
        .check();
    assert!(servers.iter().all(|server| server.stat("cmd_set") > 100), "every server has keys");
}

#[test]
fn decisions_agree_with_every_golden_vector() {
    common::vectors::assert_all_agree(&url_of(&many(3)));
}

/// Guards against defects seen in practice: check and increment are two steps, or GET then SET in a
/// shared store. Contended hits are retried.
#[test]
fn eight_processes_admit_exactly_the_limit() {
    let store = Memcached::start(&[]);
    for policy in ["fixed-window 100/day", "token-bucket 100/day", "moving-window 100/day; 200/day"] {
        let servers: Vec<common::example_process::Server> = (0..8)
            .map(|_| {
                let flags = ["--policy", policy, "--storage", &store.url(), "--on-error", "refuse", "--timeout", "60s"];
                common::example_process::Server::start(&flags)
            })
            .collect();
        // A refusal with units left is contended.
        let ask = |server: &common::example_process::Server| {
            let (begun, mut is_connected, mut admitted) = (Instant::now(), false, 0);
            for _ in 0..25 {
                loop {
                    let (status, head) = server.get("/", "");
                    admitted += usize::from(status == 200);
                    // A request whose connection takes too long gets 503, and counts nothing.
                    is_connected |= status != 503;
                    assert!(matches!(status, 200 | 429) || !is_connected && begun.elapsed() < LONG, "{head}");
                    if status == 200 || head.contains("x-ratelimit-remaining: 0\r\n") {
                        break;
                    }
                }
            }
            admitted
        };
        let admitted: usize = std::thread::scope(|scope| {
            let asking: Vec<_> = servers.iter().map(|server| scope.spawn(|| ask(server))).collect();
            asking.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, 100, "{policy}");
    }
}

/// Guards against this defect: a memcached expiry above 30 days is not enforced.
#[test]
fn long_periods_are_enforced() {
    let server = Memcached::start(&[]);
    let _guard = RUNTIME.enter();
    let storage = MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let texts = [
        "1/month",
        "fixed-window 1/month",
        "moving-window 1/month",
        "token-bucket 1/month",
        "fixed-window 1 per 30 days",
        "fixed-window 1 per 2591999 seconds",
        "1/year",
        "fixed-window 1 per 50 years",
    ];
    for (number, text) in texts.into_iter().enumerate() {
        let limiter = RateLimiter::with_storage(policy(text).with_name(number.to_string()), storage.clone());
        assert!(RUNTIME.block_on(limiter.hit(&Key::global())).unwrap().is_admitted(), "{text}");
        assert!(RUNTIME.block_on(limiter.hit(&Key::global())).unwrap().is_refused(), "{text}");
    }
}

/// Guards against defects seen in practice: milliseconds are passed as seconds, and keys never
/// expire.
#[test]
fn keys_expire_with_their_state() {
    let server = Memcached::start(&[]);
    let _guard = RUNTIME.enter();
    let storage = MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let command = |number: usize, client: u64| format!("mg rl:p{number}|n:{client}");
    let names = || (0..EVERY_STRATEGY.len()).flat_map(|policy| (0..5_u64).map(move |client| (policy, client)));
    for (number, client) in names() {
        let short = policy(&EVERY_STRATEGY[number].replace("7 seconds", "200ms")).with_name(format!("p{number}"));
        let limiter = RateLimiter::with_storage(short, storage.clone());
        let _ = RUNTIME.block_on(limiter.hit(&Key::from(client))).unwrap();
        assert_eq!(server.ask(&command(number, client)), ["HD"]);
    }
    let commands: Vec<String> = names().map(|(number, client)| command(number, client)).collect();
    let commands = commands.join("\r\n");
    common::servers::wait_until("all keys have expired", || server.ask(&commands).iter().all(|line| line == "EN"));
    assert_eq!(server.stat("curr_items"), 0);
}

#[test]
fn evicted_state_is_treated_as_fresh() {
    let server = Memcached::start(&["-m", "2", "-o", "no_modern"]);
    let _guard = RUNTIME.enter();
    let storage = MemcachedStorage::new(&with_timeout(&server.url(), LONG)).unwrap();
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day").with_name("p"), storage);
    let hit = || RUNTIME.block_on(limiter.hit(&Key::from("k"))).unwrap();
    assert_eq!([hit(), hit(), hit()].map(|decision| decision.is_admitted()), [true, true, false]);
    // Items of the same size, so that the server evicts from the same slab class.
    let stored = server.ask("mg rl:p|t:k v").swap_remove(1);
    let started = Instant::now();
    let mut number = 0;
    // Unlike `mg`, `me` does not mark the item as used.
    while server.ask("me rl:p|t:k") != ["EN"] {
        let set = |junk| format!("ms {junk:08} {} T0 q\r\n{stored}", stored.len());
        server.ask(&(number..number + 2_000).map(set).collect::<Vec<_>>().join("\r\n"));
        number += 2_000;
        assert!(started.elapsed() < LONG, "nothing is dropped");
    }
    assert!(server.stat("evictions") > 0);
    assert_eq!([hit(), hit(), hit()].map(|decision| decision.is_admitted()), [true, true, false]);
}

#[test]
fn unreadable_state_is_treated_as_fresh() {
    let servers = many(1);
    let storage = with_prefix(&servers, "odd").clock(ManualClock::default());
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day; moving-window 2/day").with_name("p"), storage);
    RUNTIME.block_on(async {
        for spoil in
            ["garbage", "[", "[1.fixed-window/86400000000 99999999999999999999,1,1]", "\u{1}\u{2}", "\u{e9}", ""]
        {
            servers[0].ask(&format!("ms odd:p|t:k {}\r\n{spoil}", spoil.len()));
            for expected in [true, true, false] {
                let decision = limiter.hit(&Key::from("k")).await.unwrap();
                assert_eq!((decision.is_admitted(), decision.is_contended()), (expected, false), "{spoil:?}");
            }
        }
    });
}

/// Guards against this defect: parts of composite keys run together.
#[test]
fn each_policy_name_and_client_key_has_its_own_item() {
    let servers = many(3);
    let storage = on(&servers, ManualClock::default());
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    let long = "k".repeat(300);
    RUNTIME.block_on(async {
        for name in ["a {b} | c", "a {b}", "a", &"n".repeat(200)] {
            let limiter = RateLimiter::with_storage(
                policy("moving-window 1/day; fixed-window 9/day").with_name(name),
                storage.clone(),
            );
            for key in [
                Key::from("a|b"),
                Key::from("a%7Cb"),
                Key::from("1.2.3.4"),
                Key::from(std::net::Ipv4Addr::new(1, 2, 3, 4)),
                Key::global(),
                Key::from("*"),
                Key::from("a b\r\nflush_all\r\n"),
                Key::from("caf\u{e9}"),
                Key::from("a b"),
                Key::from("a%20b"),
                Key::from(r"a\sb"),
                Key::from("a#b"),
                Key::from(&long),
                Key::from(&format!("{long}k")),
            ] {
                assert!(limiter.hit(&key).await.unwrap().is_admitted(), "{name} {key}");
                assert!(limiter.hit(&key).await.unwrap().is_refused(), "{name} {key}");
            }
        }
    });
    let items: u64 = servers.iter().map(|server| server.stat("curr_items")).sum();
    assert_eq!(items, 4 * 14);
}

#[test]
fn policy_whose_log_does_not_fit_is_rejected() {
    let storage = MemcachedStorage::new("memcached://localhost").unwrap();
    let large = policy("moving-window 100000/day");
    let error = RateLimiter::try_with_storage(large.clone(), storage.clone()).unwrap_err().to_string();
    assert!(error.contains("moving-window 100000/day") && error.contains("sliding-window-counter"), "{error}");
    assert!(RateLimitLayer::new(large, Global::new()).try_storage(storage.clone(), OnError::Admit).is_err());
    let long_logs = MemcachedStorage::new("memcached://localhost?long-logs=allow").unwrap();
    assert!(RateLimiter::try_with_storage(policy("moving-window 50000/day"), long_logs).is_ok());
}

#[test]
fn server_without_cas_is_an_error_with_a_correction() {
    let servers = [Memcached::start(&["-C"])];
    let storage = on(&servers, ManualClock::default());
    let limiter = RateLimiter::with_storage(policy("fixed-window 3/day"), storage.clone());
    RUNTIME.block_on(async {
        storage.ready(LONG).await.unwrap();
        assert!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted());
        let error = limiter.hit(&Key::from("k")).await.unwrap_err();
        assert!(format!("{error:#}").contains("without -C"), "{error}");
    });
}
