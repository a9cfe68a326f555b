//! Decisions while etcd fails: each answer comes in time, what a failure means is what `OnError` says, nothing is counted twice, and
//! decisions come back without anything being built anew.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, DEADLINE, Ways, timely, used};
use common::policy;
use common::servers::{Etcd, Mode, Proxy, wait_until};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::storage::EtcdStorage;
use tower_ratelimit::{Global, Key, Policy, RateLimiter};

const LONG: Duration = Duration::from_secs(20);

/// Never reached.
const PLENTY: &str = "fixed-window 10000/day; moving-window 10000/day";

fn storage(url: &str) -> EtcdStorage {
    EtcdStorage::new(url).unwrap_or_else(|error| panic!("{error}")).deadline(DEADLINE)
}

fn ways(url: &str) -> Ways<EtcdStorage> {
    Ways::of(&policy(PLENTY), storage(url), || Global)
}

/// Field defect: a limiter that cannot start while its store is down.
#[tokio::test]
async fn etcd_may_start_after_the_layer_and_die_and_come_back() {
    let mut etcd = Etcd::start(1);
    etcd.members[0].kill();
    let ways = ways(&etcd.url());
    ways.fail().await;
    etcd.members[0].restart();
    ways.decide().await;
    for _ in 0..2 {
        let before = ways.used().await;
        etcd.members[0].kill();
        ways.fail().await;
        etcd.members[0].restart();
        ways.decide().await;
        assert!(ways.used().await >= before + 3, "what was counted stays");
    }
}

/// Field defect: requests that hang when the server stops answering.
#[tokio::test]
async fn a_lone_member_that_hangs_holds_nobody_up() {
    let etcd = Etcd::start(1);
    let ways = ways(&etcd.url());
    ways.decide().await;
    etcd.members[0].stop();
    ways.fail().await;
    etcd.members[0].go_on();
    ways.decide().await;
}

/// Asks until nothing fails any more for a while; how many failed, and for how long.
async fn settles(ways: &Ways<EtcdStorage>) -> (usize, Duration) {
    let (started, mut failed, mut last, mut good) = (Instant::now(), 0, Duration::ZERO, 0);
    while good < 10 {
        let failures = ways.all().await.iter().filter(|answer| **answer == Answer::Failed).count();
        (failed, good) = (failed + failures, if failures == 0 { good + 1 } else { 0 });
        if failures > 0 {
            last = started.elapsed();
        }
        assert!(started.elapsed() < LONG, "no decisions");
        sleep(AGAIN).await;
    }
    (failed, last)
}

#[tokio::test]
async fn any_member_may_die_hang_and_come_back() {
    let mut etcd = Etcd::start(3);
    let ways = ways(&etcd.url());
    ways.decide().await;
    for hangs in [false, true] {
        for leads in [false, true] {
            let leader = etcd.leader();
            let victim = if leads { leader } else { (leader + 1) % 3 };
            let before = ways.used().await;
            if hangs {
                etcd.members[victim].stop();
            } else {
                etcd.members[victim].kill();
            }
            let (failed, last) = settles(&ways).await;
            eprintln!("leader: {leads}, hangs: {hangs}: {failed} failed, the last after {last:?}");
            // An election takes some tenths of a second here.
            assert!(last < Duration::from_secs(5));
            assert!(leads || failed <= 3, "others lead, and answer");
            assert!(ways.used().await >= before + 30, "what was counted stays");
            if hangs {
                etcd.members[victim].go_on();
            } else {
                etcd.members[victim].restart();
            }
            settles(&ways).await;
        }
    }
}

#[tokio::test]
async fn without_a_majority_nothing_is_decided_and_then_it_is() {
    let mut etcd = Etcd::start(3);
    let ways = ways(&etcd.url());
    ways.decide().await;
    for member in [0, 1] {
        etcd.members[member].kill();
    }
    let (started, mut failing) = (Instant::now(), 0);
    // Until the last one knows that it is alone, it may wait for the others.
    while failing < 5 {
        failing = if ways.all().await == [Answer::Failed; 3] { failing + 1 } else { 0 };
        assert!(started.elapsed() < LONG);
    }
    let error = ways.limiter.hit(&Key::everybody()).await.unwrap_err();
    assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
    for member in [0, 1] {
        etcd.members[member].begin_again();
    }
    let (_, last) = settles(&ways).await;
    eprintln!("decisions {last:?} after the return");
}

#[tokio::test]
async fn a_member_that_nobody_listens_at_is_passed_over_at_once() {
    let etcd = Etcd::start(1);
    let url = format!("etcd://127.0.0.1:1,127.0.0.1:2,{}", etcd.hosts());
    for _ in 0..8 {
        // Each begins with any of them.
        let limiter = RateLimiter::with_storage(policy(PLENTY), storage(&url));
        for _ in 0..3 {
            let decision = timely(limiter.hit(&Key::everybody())).await;
            assert!(decision.is_ok_and(|decision| decision.is_admitted()));
        }
    }
}

/// With a user `app` who may use what begins with `rl`, if `password` is right.
fn with_logins(etcd: &Etcd, password: &str) -> String {
    let ask = |path: &str, body: Value| etcd.ask(&format!("auth/{path}"), &body);
    ask("user/add", json!({ "name": "root", "password": "root" }));
    ask("role/add", json!({ "name": "root" }));
    ask("user/grant", json!({ "user": "root", "role": "root" }));
    ask("user/add", json!({ "name": "app", "password": password }));
    ask("role/add", json!({ "name": "limits" }));
    // From `rl` to `rm`.
    let range = json!({ "permType": 2, "key": "cmw=", "range_end": "cm0=" });
    ask("role/grant", json!({ "name": "limits", "perm": range }));
    ask("user/grant", json!({ "user": "app", "role": "limits" }));
    ask("enable", json!({}));
    let login = ask("authenticate", json!({ "name": "root", "password": "root" }));
    login["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_wrong_password_can_be_put_right() {
    let etcd = Etcd::start(1);
    let nobody = ways(&etcd.url());
    let user = ways(&format!("etcd://app:first@{}", etcd.hosts()));
    // While there are no logins, anybody may.
    nobody.decide().await;
    user.decide().await;
    let root = with_logins(&etcd, "first");
    nobody.fail().await;
    let error = nobody.limiter.hit(&Key::everybody()).await.unwrap_err().to_string();
    assert!(error.contains("write etcd://user:password@"), "{error}");
    user.decide().await;
    let change = |password: &str| {
        let body = json!({ "name": "app", "password": password });
        etcd.members[0].ask("auth/user/changepw", &body, Some(&root)).unwrap();
    };
    change("second");
    user.fail().await;
    let error = user.limiter.hit(&Key::everybody()).await.unwrap_err();
    assert!(!error.may_have_counted() && !error.to_string().contains("first"), "{error}");
    change("first");
    user.decide().await;
    let elsewhere = storage(&format!("etcd://app:first@{}?prefix=other", etcd.hosts()));
    let error = elsewhere.ready(Duration::from_millis(300)).await.unwrap_err().to_string();
    assert!(error.contains("permission denied"), "{error}");
}

#[tokio::test]
async fn a_login_that_etcd_has_forgotten_is_renewed_and_nobody_notices() {
    let mut etcd = Etcd::start(1);
    let ways = ways(&format!("etcd://app:secret@{}", etcd.hosts()));
    let root = with_logins(&etcd, "secret");
    ways.decide().await;
    for _ in 0..3 {
        // It takes all logins back, though the password is the same.
        let body = json!({ "name": "app", "password": "secret" });
        etcd.members[0].ask("auth/user/changepw", &body, Some(&root)).unwrap();
        assert_eq!(ways.all().await, [Answer::Admitted; 3]);
    }
    // With its memory goes what it knew of logins.
    etcd.members[0].restart();
    ways.decide().await;
}

/// A hit that was sent is not sent again.
#[tokio::test]
async fn nothing_is_counted_twice_whatever_becomes_of_replies() {
    let mut tasks = JoinSet::new();
    for mode in [Mode::SwallowReplies, Mode::CutAtReply, Mode::Garbage, Mode::Delay(DEADLINE * 2)] {
        tasks.spawn(counts_nothing_twice(mode));
    }
    tasks.join_all().await;
}

async fn counts_nothing_twice(mode: Mode) {
    let etcd = Etcd::start(1);
    let proxy = Proxy::start(etcd.members[0].port());
    let direct = RateLimiter::with_storage(policy(PLENTY), storage(&etcd.url()).deadline(LONG));
    let ways = ways(&format!("etcd://127.0.0.1:{}", proxy.port()));
    ways.decide().await;
    for _ in 0..2 {
        let before = used(&direct).await;
        proxy.set(mode);
        let mut in_doubt = 0;
        for _ in 0..2 {
            assert_eq!(ways.all().await, [Answer::Failed; 3], "{mode:?}");
            in_doubt += 3;
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        let started = Instant::now();
        while ways.limiter.peek(&Key::everybody()).await.is_err() {
            assert!(started.elapsed() < LONG, "{mode:?}");
            sleep(AGAIN).await;
        }
        let counted = used(&direct).await - before;
        assert!(counted <= in_doubt, "{mode:?}: {counted} of {in_doubt}");
        assert_eq!(ways.all().await, [Answer::Admitted; 3]);
        assert_eq!(used(&direct).await, before + counted + 3);
    }
}

/// Whatever is cut off, and whenever: each hit is counted once, or it is known that it may not have been.
#[tokio::test]
async fn every_hit_is_counted_once_while_connections_are_cut() {
    let etcd = Etcd::start(1);
    let proxy = Proxy::start(etcd.members[0].port());
    let direct = RateLimiter::with_storage(policy(PLENTY), storage(&etcd.url()).deadline(LONG));
    let ways = ways(&format!("etcd://127.0.0.1:{}", proxy.port()));
    ways.decide().await;
    let before = used(&direct).await;
    let (mut counted, mut unknown) = (0, 0);
    for round in 0..300 {
        if round % 3 == 0 {
            let cutting = async {
                sleep(Duration::from_micros(round * 7)).await;
                proxy.cut();
            };
            let (hit, ()) = tokio::join!(ways.limiter.hit(&Key::everybody()), cutting);
            counted += u32::from(hit.is_ok());
            unknown += u32::from(hit.is_err_and(|error| error.may_have_counted()));
        } else {
            counted += u32::from(ways.limiter.hit(&Key::everybody()).await.is_ok());
        }
    }
    let total = used(&direct).await - before;
    eprintln!("{counted} counted, {unknown} in doubt, {total} there");
    assert!(counted > 150 && (counted..=counted + unknown).contains(&total), "{counted} + {unknown}: {total}");
}

/// A lease that is gone before it should be (an operator revokes it, etcd has been restored from a copy) is replaced.
#[tokio::test]
async fn a_lease_that_is_gone_is_replaced() {
    let etcd = Etcd::start(1);
    let ways = ways(&etcd.url());
    ways.decide().await;
    for lease in etcd.leases() {
        etcd.ask("lease/revoke", &json!({ "ID": lease }));
    }
    assert_eq!(ways.used().await, 0, "its keys go with it");
    assert_eq!(ways.all().await, [Answer::Admitted; 3]);
    assert_eq!(ways.used().await, 3);
}

/// Field defects: keys that never expire; an index set that grows forever.
#[tokio::test]
async fn all_keys_are_gone_when_they_matter_no_longer() {
    let etcd = Etcd::start(1);
    let storage = storage(&etcd.url()).deadline(LONG);
    let mut most = 0;
    for text in ["fixed-window 3 per 200ms", "moving-window 3 per 200ms", "token-bucket 3 per 200ms"] {
        let limiter = RateLimiter::with_storage(text.parse::<Policy>().unwrap(), storage.clone());
        for client in 0..20_u64 {
            assert!(limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
        }
        most = most.max(etcd.leases().len());
    }
    assert!((1..=4).contains(&most), "{most} leases for 60 keys");
    assert_eq!(etcd.all().len(), 60);
    wait_until("all keys have expired", || etcd.all().is_empty() && etcd.leases().is_empty());
}

/// One slow key does not stall another, and what is sent at once is answered at once.
#[tokio::test]
async fn calls_share_a_connection_and_do_not_wait_for_each_other() {
    let etcd = Etcd::start(1);
    let proxy = Proxy::start(etcd.members[0].port());
    let storage = storage(&format!("etcd://127.0.0.1:{}", proxy.port())).deadline(LONG);
    storage.ready(LONG).await.unwrap();
    let limiter = RateLimiter::with_storage(policy(PLENTY), storage);
    proxy.set(Mode::Delay(Duration::from_millis(20)));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for client in 0..100_u64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.hit(&Key::from(client)).await.unwrap() });
    }
    assert!(tasks.join_all().await.iter().all(tower_ratelimit::Decision::is_admitted));
    // One after the other would be 4 seconds.
    eprintln!("100 keys in {:?}", started.elapsed());
    assert_eq!(proxy.connections(), 1);
}
