//! Several memcached servers, each with a part of the keys.

use common::harness::{AGAIN, Answer, DEADLINE, EntryPoints, SECOND};
use common::servers::{Memcached, with_timeout};
use common::time::{EVENTUALLY, Stopwatch, eventually};
use common::{policy, with};
use tokio::time::sleep;
use tower_ratelimit::storage::MemcachedStorage;
use tower_ratelimit::{Header, Key, RateLimiter, Storage};

use super::{LONG, not_ready, storage, url_of};

#[tokio::test]
async fn storage_is_ready_when_all_servers_reply() {
    let (one, mut other) = (Memcached::start(&[]), Memcached::start(&[]));
    other.kill();
    let storage = storage(&format!("memcached://127.0.0.1:{},127.0.0.1:{}", one.port(), other.port()));
    let cause = format!("cannot reach 127.0.0.1:{}: ", other.port());
    eventually("the error names the server", async || format!("{:#}", not_ready(&storage).await).contains(&cause))
        .await;
    other.restart();
    storage.ready(LONG).await.unwrap();
    one.stop();
    not_ready(&storage).await;
    one.resume();
    storage.ready(LONG).await.unwrap();
}

#[tokio::test]
async fn server_that_dies_or_hangs_fails_only_its_own_keys() {
    let mut servers = [Memcached::start(&[]), Memcached::start(&[]), Memcached::start(&[])];
    let policy = policy("fixed-window 1000000/day; moving-window 1000/day").with_name("p");
    let entry_points =
        EntryPoints::new(&policy, MemcachedStorage::new(&with_timeout(&url_of(&servers), DEADLINE)).unwrap(), || {
            Header::new("k")
        });
    let names: Vec<String> = (0..12).map(|number| format!("k{number}")).collect();
    let answers = async |name: &String| entry_points.hit_as(&Key::from(&**name), || with("k", name)).await;
    let all = Stopwatch::start();
    let expect = async |name: &String, expected: Answer| loop {
        let watch = Stopwatch::start();
        let answers = answers(name).await;
        if answers == [expected; 3] {
            return;
        }
        // A hit that timed out on a busy machine may win its swap late. The limit is out of reach, so a
        // refusal is contended.
        let is_contended = !answers.contains(&Answer::Failed) && !all.excess().is_zero() && all.wall() < EVENTUALLY;
        assert!(
            expected == Answer::Admitted && (watch.excuses(DEADLINE) || is_contended),
            "{name}: {answers:?} instead of {expected:?}"
        );
    };
    for name in &names {
        expect(name, Answer::Admitted).await;
    }
    let home = |name: &String| {
        let is_at = |server: &Memcached| server.ask(&format!("mg rl:p|t:{name}")) == ["HD"];
        servers.iter().position(is_at).unwrap()
    };
    let homes: Vec<usize> = names.iter().map(home).collect();
    let victim = (0..3).find(|server| homes.contains(server) && homes.iter().any(|home| home != server)).unwrap();
    for hangs in [false, true] {
        if hangs {
            servers[victim].stop();
        } else {
            servers[victim].kill();
        }
        for _ in 0..2 {
            for (name, home) in names.iter().zip(&homes) {
                let expected = if *home == victim { Answer::Failed } else { Answer::Admitted };
                expect(name, expected).await;
            }
        }
        if hangs {
            servers[victim].resume();
        } else {
            servers[victim].restart();
        }
        let watch = Stopwatch::start();
        for name in &names {
            while answers(name).await.contains(&Answer::Failed) {
                watch.assert_below(SECOND, name);
                sleep(AGAIN).await;
            }
        }
    }
}

#[tokio::test]
async fn restarted_server_loses_only_its_own_keys() {
    let mut servers = [(); 3].map(|()| Memcached::start(&[]));
    let storage = storage(&url_of(&servers));
    storage.ready(LONG).await.unwrap();
    let limiter = RateLimiter::with_storage(policy("fixed-window 9/day"), storage);
    let keys: Vec<Key> = (0..60_u64).map(Key::from).collect();
    for key in &keys {
        assert!(limiter.hit(key).await.unwrap().is_admitted());
    }
    let counts: Vec<u64> = servers.iter().map(|server| server.stat("curr_items")).collect();
    assert!(counts.iter().all(|count| *count > 5) && counts.iter().sum::<u64>() == 60, "{counts:?}");
    servers[1].kill();
    let dead = format!("127.0.0.1:{}", servers[1].port());
    let mut failed = 0;
    for key in &keys {
        match limiter.peek(key).await {
            Ok(decision) => assert_eq!(decision.remaining(), 8),
            Err(error) => {
                assert!(format!("{error:#}").contains(&dead), "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!(failed, counts[1]);
    servers[1].restart();
    let (watch, mut fresh) = (Stopwatch::start(), 0);
    for key in &keys {
        let decision = loop {
            match limiter.peek(key).await {
                Ok(decision) => break decision,
                Err(error) => watch.assert_below(SECOND, &error.to_string()),
            }
            sleep(AGAIN).await;
        };
        fresh += u64::from(decision.remaining() == 9);
    }
    assert_eq!(fresh, counts[1], "no key has moved to another server");
}
