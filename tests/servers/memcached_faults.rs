//! Decisions while memcached servers fail: each answer comes in time, what a failure means is what `OnError` says, nothing is
//! counted twice, and decisions come back without anything being built anew.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, DEADLINE, SECOND, Ways, limited, timely, used};
use common::servers::{Memcached, Mode, Proxy};
use common::{ask, get, policy, with};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::storage::MemcachedStorage;
use tower_ratelimit::{Global, Header, Key, OnError, Policy, RateLimiter};

const LONG: Duration = Duration::from_secs(20);

/// Never reached.
const PLENTY: &str = "fixed-window 1000000/day; moving-window 10000/day";

fn storage(url: &str) -> MemcachedStorage {
    MemcachedStorage::new(url).unwrap_or_else(|error| panic!("{error}")).deadline(DEADLINE)
}

fn ways_to(url: &str, policy: &Policy) -> Ways<MemcachedStorage> {
    Ways::of(policy, storage(url), || Global)
}

fn url(proxy: &Proxy) -> String {
    format!("memcached://127.0.0.1:{}", proxy.port())
}

/// Field defect: a limiter that cannot start while its store is down.
#[tokio::test]
async fn a_server_may_start_after_the_layer() {
    let mut server = Memcached::start(&[]);
    server.kill();
    let ways = ways_to(&server.url(), &policy(PLENTY));
    ways.fail().await;
    server.restart();
    ways.decide().await;
}

#[tokio::test]
async fn a_server_may_die_and_come_back_on_its_port() {
    let mut server = Memcached::start(&[]);
    let ways = ways_to(&server.url(), &policy(PLENTY));
    ways.decide().await;
    for _ in 0..3 {
        server.kill();
        ways.fail().await;
        server.restart();
        ways.decide().await;
        assert_eq!(ways.used().await % 3, 0, "what it counted before is gone, and nothing else");
    }
}

/// Field defect: requests that hang when the server stops answering.
#[tokio::test]
async fn a_server_that_hangs_holds_nobody_up() {
    let server = Memcached::start(&[]);
    let ways = ways_to(&server.url(), &policy(PLENTY));
    ways.decide().await;
    // For longer than it takes to give a connection up, and for less.
    for hits in [6, 1] {
        let before = ways.used().await;
        server.stop();
        for _ in 0..hits {
            assert_eq!(Answer::told(&timely(ways.limiter.hit(&Key::everybody())).await), Answer::Failed);
        }
        server.go_on();
        let started = Instant::now();
        while timely(ways.limiter.peek(&Key::everybody())).await.is_err() {
            assert!(started.elapsed() < SECOND);
            sleep(AGAIN).await;
        }
        assert_eq!(ways.used().await, before, "what was not loaded was not stored");
        ways.decide().await;
    }
    server.stop();
    ways.fail().await;
    server.go_on();
    ways.decide().await;
}

/// What was sent to be stored is not sent again.
#[tokio::test]
async fn nothing_is_counted_twice_whatever_becomes_of_replies() {
    let mut tasks = JoinSet::new();
    for mode in [Mode::SwallowReplies, Mode::CutAtReply, Mode::Garbage, Mode::Delay(DEADLINE * 2)] {
        tasks.spawn(counts_nothing_twice(mode));
    }
    tasks.join_all().await;
}

async fn counts_nothing_twice(mode: Mode) {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let direct = RateLimiter::with_storage(policy(PLENTY), storage(&server.url()).deadline(LONG));
    let ways = ways_to(&url(&proxy), &policy(PLENTY));
    ways.decide().await;
    for _ in 0..2 {
        let before = used(&direct).await;
        proxy.set(mode);
        for _ in 0..2 {
            assert_eq!(ways.all().await, [Answer::Failed; 3], "{mode:?}");
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        let started = Instant::now();
        while ways.limiter.peek(&Key::everybody()).await.is_err() {
            assert!(started.elapsed() < LONG, "{mode:?}");
            sleep(AGAIN).await;
        }
        // To swap, a reply to a load is needed first.
        assert_eq!(used(&direct).await, before, "{mode:?}");
        assert_eq!(ways.all().await, [Answer::Admitted; 3]);
        assert_eq!(used(&direct).await, before + 3);
    }
}

/// Connections that are cut at any moment, also between a swap and its reply.
#[tokio::test]
async fn every_hit_is_counted_once_while_connections_are_cut() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000000/day"), storage(&url(&proxy)));
    let direct = RateLimiter::with_storage(policy("fixed-window 1000000/day"), storage(&server.url()).deadline(LONG));
    let cutter = std::thread::spawn(move || {
        for _ in 0..200 {
            std::thread::sleep(Duration::from_millis(3));
            proxy.cut();
        }
        proxy
    });
    let (mut admitted, mut unknown, mut failed) = (0, 0, 0);
    while !cutter.is_finished() {
        match timely(limiter.hit(&Key::everybody())).await {
            Ok(decision) => admitted += u32::from(decision.is_admitted()),
            Err(error) if error.may_have_counted() => unknown += 1,
            Err(_) => failed += 1,
        }
    }
    let total = used(&direct).await;
    eprintln!("{admitted} admitted, {unknown} unknown, {failed} failed: {total} counted");
    assert!(admitted > 100 && unknown + failed > 0, "{admitted}, {unknown}, {failed}");
    assert!((admitted..=admitted + unknown).contains(&total), "{admitted} and {unknown} unknown: {total}");
}

/// Field defect: after a get that was cancelled the next one returned its value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_go_away_change_nobodys_decision() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    proxy.set(Mode::Delay(Duration::from_millis(2)));
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000/day"), storage(&url(&proxy)).deadline(LONG));
    let mut tasks = JoinSet::new();
    for client in 0..20_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            for round in 0..10 {
                // Somebody else's key, whom nobody waits for.
                let gone = limiter.hit(&Key::from(1_000 + client % 3));
                let _ = tokio::time::timeout(Duration::from_millis(client % 7), gone).await;
                let decision = limiter.hit(&Key::from(client)).await.unwrap();
                assert_eq!(decision.remaining(), 1_000 - round - 1, "client {client}");
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(proxy.connections(), 1);
}

/// Field defect: compare-and-swap out of attempts reported as a store error, which fail-open admits.
#[tokio::test]
async fn contention_is_no_failure_of_the_storage() {
    const LIMIT: u32 = 60;
    let server = Memcached::start(&[]);
    let proxies: Vec<Proxy> = (0..8).map(|_| Proxy::start(server.port())).collect();
    let mut tasks = JoinSet::new();
    for proxy in &proxies {
        proxy.set(Mode::Delay(DEADLINE / 20));
        // Each as a process of its own: what waits for one key inside of one is decided together.
        let (open, inner) =
            limited(&policy(&format!("fixed-window {LIMIT}/day")), Global, &storage(&url(proxy)), OnError::Admit);
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for _ in 0..30 {
                answers.push(Answer::of(&timely(ask(&open, get("/"))).await, OnError::Admit));
            }
            let admitted = answers.iter().filter(|answer| **answer == Answer::Admitted).count();
            assert_eq!(inner.calls(), admitted);
            answers
        });
    }
    let answers = tasks.join_all().await.concat();
    let count = |wanted| answers.iter().filter(|answer| **answer == wanted).count();
    let [admitted, refused, failed] = [Answer::Admitted, Answer::Refused, Answer::Failed].map(count);
    let told = format!("{admitted} admitted, {refused} refused, {failed} failed");
    eprintln!("{told}");
    assert_eq!(failed, 0, "{told}");
    assert!((1..=LIMIT as usize).contains(&admitted), "{told}");
}

#[tokio::test]
async fn a_server_that_dies_or_hangs_takes_only_its_own_keys_with_it() {
    let mut servers = [Memcached::start(&[]), Memcached::start(&[]), Memcached::start(&[])];
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let policy = policy(PLENTY).with_name("p");
    let ways = Ways::of(&policy, storage(&format!("memcached://{}", hosts.join(","))), || Header::new("k"));
    let names: Vec<String> = (0..12).map(|number| format!("k{number}")).collect();
    let answers = async |name: &String| ways.each(&Key::from(&**name), || with("k", name)).await;
    for name in &names {
        assert_eq!(answers(name).await, [Answer::Admitted; 3]);
    }
    let home = |name: &String| {
        let is_at = |server: &Memcached| server.ask(&format!("mg rl:p|t:{name}")) == ["HD"];
        servers.iter().position(is_at).unwrap()
    };
    let homes: Vec<usize> = names.iter().map(home).collect();
    let crowded = (0..3).find(|server| homes.contains(server) && homes.iter().any(|home| home != server)).unwrap();
    for hangs in [false, true] {
        if hangs {
            servers[crowded].stop();
        } else {
            servers[crowded].kill();
        }
        for _ in 0..2 {
            for (name, home) in names.iter().zip(&homes) {
                let expected = if *home == crowded { Answer::Failed } else { Answer::Admitted };
                assert_eq!(answers(name).await, [expected; 3], "{name}, hanging: {hangs}");
            }
        }
        if hangs {
            servers[crowded].go_on();
        } else {
            servers[crowded].restart();
        }
        let started = Instant::now();
        for name in &names {
            while answers(name).await.contains(&Answer::Failed) {
                assert!(started.elapsed() < SECOND, "{name}");
                sleep(AGAIN).await;
            }
        }
    }
}
