//! Redis Sentinel: primaries that die, hang or are replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::harness::{AGAIN, DEADLINE, SECOND, timely, within};
use common::servers::storage::failed_check;
use common::servers::{Sentinels, Server, wait_until, wait_until_replicated};
use common::time::{EVENTUALLY, Stopwatch};
use common::{message, policy};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};
use tower_ratelimit::storage::RedisStorage;
use tower_ratelimit::{Decision, Key, RateLimiter, Storage};

use super::{LITTLE, LONG, ready, storage, storage_within};

#[tokio::test]
async fn storage_uses_the_primary_that_the_sentinels_report() {
    let mut all = Sentinels::start();
    let url = all.url();
    let storage = storage(&url);
    ready(&storage).await;
    all.sentinels[0].kill();
    assert!(ready(&storage).await < SECOND, "one dead sentinel causes no delay");
    all.sentinels[0].restart();

    let clients = |server: &Server| server.ask(&["CLIENT", "LIST", "TYPE", "normal"]).to_string();
    // The last command of the storage is that of `ready`, or `ROLE`, which checks that the server
    // is the primary.
    let is_ours = |line: &str| {
        !line.contains("name=sentinel") && ["cmd=eval", "cmd=role"].iter().any(|command| line.contains(command))
    };
    let ours = |server: &Server| clients(server).lines().any(is_ours);
    assert!(ours(&all.servers[0]) && !ours(&all.servers[1]));
    all.servers[0].kill();
    ready(&storage).await;
    assert!(ours(&all.servers[1]));

    let unknown = self::storage(&url.replace("mymaster", "other"));
    let error = message(failed_check(&unknown).await);
    assert!(error.contains("does not know the service \"other\""), "{error}");
}

/// After a manual failover, the old primary accepts writes for up to ten more seconds.
#[tokio::test]
async fn storage_leaves_a_demoted_primary() {
    let all = Sentinels::start();
    let storage = storage(&all.url());
    ready(&storage).await;
    assert_eq!(all.sentinels[0].ask(&["SENTINEL", "FAILOVER", "mymaster"]).to_string(), "OK");
    let started = Instant::now();
    let ours = || all.servers[1].ask(&["CLIENT", "LIST", "TYPE", "normal"]).to_string().contains("cmd=ping");
    while !ours() {
        assert!(started.elapsed() < LONG);
        let _ = storage.ready(SECOND / 10).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_from_a_dead_primary_loses_at_most_unreplicated_writes() {
    fail_over(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_from_a_hanging_primary_loses_at_most_unreplicated_writes() {
    fail_over(true).await;
}

/// Kills or stops the primary while tasks make hits. Replication is asynchronous, so a primary that
/// dies loses an unknown number of writes. The test asserts that:
///
/// - keys that were used up and replicated stay used up
/// - any other key is admitted at most as often as its limit, plus its admissions in the last
///   second before the death, because a replica on the same machine lags less than that
async fn fail_over(hangs: bool) {
    const LIMIT: u32 = 400;
    const TASKS: usize = 4;
    let mut all = Sentinels::start();
    let url = all.url();
    let limits = policy(&format!("fixed-window {LIMIT}/day; moving-window {LIMIT} per 2 days"));
    let new_storage = || storage_within(&url, DEADLINE);
    let limiter_on = |storage: RedisStorage| RateLimiter::with_storage(limits.clone(), storage);
    let key = |name: &str, number: usize| Key::from(&*format!("{name}{number}"));
    let (storage, patient) = (new_storage(), limiter_on(storage_within(&url, EVENTUALLY)));
    ready(&storage).await;
    let limiter = limiter_on(storage);
    for number in 0..TASKS {
        assert!(patient.hit_with_cost(&key("spent", number), LIMIT).await.unwrap().is_admitted());
    }
    wait_until_replicated(&all.servers[0], &all.servers[1]);

    let (watch, began) = (Stopwatch::start(), Instant::now());
    let at = move |moment: Instant| u64::try_from((moment - began).as_micros()).unwrap();
    let killed_at = Arc::new(AtomicU64::new(u64::MAX));
    let admitted = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for number in 0..TASKS {
        let (limiter, killed_at, admitted, key) =
            (limiter.clone(), Arc::clone(&killed_at), Arc::clone(&admitted), key("fresh", number));
        tasks.spawn(async move {
            // One request every few milliseconds, because failures return at once.
            let mut pace = interval(AGAIN);
            let (mut hits, mut failures) = (Vec::new(), Vec::new());
            loop {
                pace.tick().await;
                match timely(limiter.hit(&key)).await {
                    Ok(decision) if decision.is_admitted() => {
                        hits.push(at(Instant::now()));
                        admitted.fetch_add(1, Ordering::SeqCst);
                    }
                    // A refusal before the primary died would end the test too early.
                    Ok(_) => {
                        assert_ne!(killed_at.load(Ordering::SeqCst), u64::MAX);
                        return (hits, failures);
                    }
                    Err(_) => failures.push(at(Instant::now())),
                }
                let counts = (hits.len(), failures.len());
                assert!(began.elapsed() < LONG, "the failover does not end: (admitted, failed) {counts:?}");
            }
        });
    }
    wait_until("100 hits are admitted", || admitted.load(Ordering::SeqCst) >= 100);
    killed_at.store(at(Instant::now()), Ordering::SeqCst);
    if hangs {
        all.servers[0].stop();
    } else {
        all.servers[0].kill();
    }
    let killed_at = killed_at.load(Ordering::SeqCst);
    wait_until("the replica is the primary", || all.servers[1].ask(&["ROLE"]).list()[0].to_string() == "master");
    let promoted = (at(Instant::now()) - killed_at) / 1_000;
    let new = all.servers[1].port().to_string();
    let named_by = || {
        let names = |sentinel: &&Server| {
            let reply = sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"]);
            reply.list().get(1).is_some_and(|port| port.to_string() == new)
        };
        all.sentinels.iter().filter(names).count()
    };
    wait_until("a sentinel names the new primary", || named_by() > 0);
    let named = (at(Instant::now()) - killed_at) / 1_000;
    wait_until("all sentinels name the new primary", || named_by() == all.sentinels.len());
    let agreed = (at(Instant::now()) - killed_at) / 1_000;
    eprintln!(
        "hanging: {hangs}: the replica was the primary {promoted} ms after the death; a sentinel named it after {named} ms, all after {agreed} ms"
    );
    for (number, (hits, failures)) in tasks.join_all().await.into_iter().enumerate() {
        let total = u32::try_from(hits.len()).unwrap();
        let lag = u64::try_from((SECOND + watch.excess()).as_micros()).unwrap();
        let doubtful = hits.iter().filter(|&&hit| (killed_at.saturating_sub(lag)..=killed_at).contains(&hit)).count();
        let (first, last) = (failures.first().copied().unwrap(), failures.last().copied().unwrap());
        eprintln!(
            "hanging: {hangs}: task {number}: {} failed, the first {} ms and the last {} ms after the death; {total} admitted of {LIMIT}",
            failures.len(),
            first.saturating_sub(killed_at) / 1_000,
            last.saturating_sub(killed_at) / 1_000,
        );
        assert!(total <= LIMIT + u32::try_from(doubtful).unwrap(), "{total} admitted, {doubtful} in doubt");
        // A reply that comes too late is a failure, perhaps of the hit that reached the limit.
        let ended = last.min(killed_at + (promoted + 1) * 1_000);
        assert!(hits.iter().any(|hit| *hit > ended), "hits were decided after the failover");
    }
    // The old primary still considers itself the primary, with the counts from before the failover
    // or none. Neither this process nor a new one uses it.
    let other = new_storage();
    if hangs {
        all.servers[0].resume();
    } else {
        all.servers[0].restart();
    }
    other.ready(LONG).await.unwrap();
    let other = limiter_on(other);
    for (number, name) in (0..TASKS).flat_map(|number| [(number, "spent"), (number, "fresh")]) {
        for limiter in [&limiter, &other] {
            let is_refused = decided(limiter, &key(name, number)).await.is_refused();
            assert!(is_refused, "{name}: replicated states stay");
        }
    }
}

/// Makes a hit, and repeats it if its timeout passed only because the machine is busy.
async fn decided(limiter: &RateLimiter, key: &Key) -> Decision {
    loop {
        let watch = Stopwatch::start();
        match timely(limiter.hit(key)).await {
            Ok(decision) => return decision,
            Err(error) => assert!(watch.excuses(DEADLINE), "{error}"),
        }
    }
}

/// After a failover the old primary may accept writes for ten more seconds.
#[tokio::test]
async fn storage_leaves_a_replying_primary_that_the_sentinels_have_replaced() {
    let all = Sentinels::start();
    let storage = storage_within(&all.url(), SECOND / 10);
    ready(&storage).await;
    let limiter = RateLimiter::with_storage(policy("fixed-window 1000000/day"), storage);
    // The old primary rejects the sentinels' commands, but not the storage's.
    all.servers[0].ask(&["ACL", "SETUSER", "default", "-ping"]);
    wait_until("another primary is named", || {
        let question = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        let new = all.servers[1].port().to_string();
        all.sentinels.iter().all(|sentinel| sentinel.ask(&question).list()[1].to_string() == new)
    });
    let (watch, mut on_the_old) = (Stopwatch::start(), 0);
    let hits = || all.servers[1].calls("evalsha") + all.servers[1].calls("eval");
    let before = hits();
    while hits() == before {
        let hit = within(SECOND / 10 + LITTLE, limiter.hit(&Key::from("k"))).await;
        on_the_old += usize::from(hit.is_ok());
        watch.assert_below(3 * SECOND, "the storage leaves the old primary");
        sleep(AGAIN).await;
    }
    assert!(on_the_old > 0, "the old primary replied");
}
