//! Combined hits: callers that are not polled, several runtimes, hits that are never sent, and
//! servers on which hits must not be combined.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::servers::{Reply, Server, ShardingProxy};
use common::time::eventually;
use common::{outside_of_a_runtime, policy};
use futures_util::future::{join_all, poll_immediate};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::sleep;
use tower_ratelimit::storage::{RedisStorage, StorageErrorKind, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

use super::{LONG, ready, storage, storage_within};

const CLIENTS: u64 = 64;

type Hit = StorageFuture<Decision>;

fn hit(storage: &RedisStorage, policy: &Policy, client: u64) -> Hit {
    storage.decide(StorageRequest::new(policy, &Key::from(client), Op::Hit, 1))
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Polls one hit per client once.
async fn begin(storage: &RedisStorage, policy: &Policy) -> Vec<Hit> {
    let mut hits: Vec<Hit> = (0..CLIENTS).map(|client| hit(storage, policy, client)).collect();
    for hit in &mut hits {
        let ended = poll_immediate(hit).await;
        assert!(ended.is_none(), "{ended:?}");
    }
    hits
}

#[tokio::test]
async fn callers_that_are_not_polled_do_not_stop_other_hits() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage_within(&server.url(), LONG / 4), policy("10/day"));
    ready(&storage).await;
    // The server caches the script, so each hit needs only one call.
    assert!(hit(&storage, &policy, CLIENTS).await.unwrap().is_admitted());
    let unpolled = begin(&storage, &policy).await;
    for round in 1..=3 {
        for result in join_all((0..CLIENTS).map(|client| hit(&storage, &policy, client))).await {
            assert_eq!(result.unwrap().remaining(), 9 - round);
        }
    }
    assert!(join_all(unpolled).await.into_iter().all(|result| result.unwrap().remaining() == 9), "sent at once");
}

#[test]
fn stopped_runtime_does_not_stop_the_hits_of_another() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage_within(&server.url(), LONG / 4), policy("10/day"));
    let [first, second] = [(); 2].map(|()| runtime());
    // The connection belongs to this runtime.
    second.block_on(ready(&storage));
    first.block_on(async {
        for client in 0..8 {
            drop(tokio::spawn(hit(&storage, &policy, client)));
        }
        yield_now().await;
    });
    for client in 0..8 {
        assert!(second.block_on(hit(&storage, &policy, client)).unwrap().is_admitted());
    }
    drop(first);
    assert!(second.block_on(hit(&storage, &policy, 0)).unwrap().is_admitted());
}

#[test]
fn hits_of_a_runtime_that_ends_are_sent_by_their_callers() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage_within(&server.url(), LONG), policy("10/day"));
    let [first, second] = [(); 2].map(|()| runtime());
    // The connection belongs to this runtime.
    second.block_on(ready(&storage));
    // The first four hits are sent at once, without a group. Their timers need their runtime.
    let waiting = first.block_on(async { begin(&storage, &policy).await.split_off(4) });
    drop(first);
    for result in second.block_on(join_all(waiting)) {
        assert_eq!(result.unwrap().remaining(), 9);
    }
    for client in 4..CLIENTS {
        assert_eq!(second.block_on(hit(&storage, &policy, client)).unwrap().remaining(), 8, "counted once");
    }
}

#[tokio::test]
async fn hits_that_were_never_sent_have_not_counted() {
    // The system accepts the connections, and no program replies.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", silent.local_addr().unwrap());
    let (storage, policy) = (storage_within(&url, Duration::from_millis(100)), policy("10/day"));
    for error in join_all((0..CLIENTS).map(|client| hit(&storage, &policy, client))).await {
        let error = error.unwrap_err();
        assert!(error.is_timeout() && !error.may_have_counted(), "{error:#}");
    }
}

#[tokio::test]
async fn dropped_hits_are_not_sent() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage(&server.url()), policy("10/day"));
    ready(&storage).await;
    // The first four hits are sent at once, without a group.
    let mut waiting = begin(&storage, &policy).await;
    waiting.truncate(34);
    join_all(waiting).await.into_iter().for_each(|result| assert!(result.unwrap().is_admitted()));
    let peek = |client| storage.decide(StorageRequest::new(&policy, &Key::from(client), Op::Peek, 1));
    // Full groups have been sent already.
    for client in 0..CLIENTS {
        let remaining = peek(client).await.unwrap().remaining();
        assert!(remaining == 9 || client >= 34, "{client}: {remaining}");
    }
    assert_eq!(peek(CLIENTS - 1).await.unwrap().remaining(), 10);
}

#[tokio::test]
async fn combining_can_be_turned_off() {
    let server = Server::start(&[]);
    let (url, policy) = (server.url(), policy("1000/day"));
    let calls = async |storage: RedisStorage| {
        ready(&storage).await;
        assert!(hit(&storage, &policy, 0).await.unwrap().is_admitted());
        let before = server.calls("evalsha");
        for result in join_all((0..CLIENTS).map(|client| hit(&storage, &policy, client))).await {
            assert!(result.unwrap().is_admitted());
        }
        server.calls("evalsha") - before
    };
    assert_eq!(calls(storage(&format!("{url}?combine=false"))).await, CLIENTS);
    assert_eq!(calls(storage(&format!("{url}?combine=false&prefix=other"))).await, CLIENTS);
    assert!(calls(storage(&format!("{url}?combine=true"))).await < CLIENTS / 4);
}

/// Each hit counts as a call in flight, even if it shares a call with others.
#[tokio::test]
async fn combined_hits_count_towards_the_limit_of_calls_in_flight() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage_within(&server.url(), Duration::from_secs(30)), policy("10/day"));
    ready(&storage).await;
    assert!(hit(&storage, &policy, 0).await.unwrap().is_admitted());
    server.stop();
    let begun = Arc::new(AtomicU32::new(0));
    let hits: Vec<_> = (0..4_096)
        .map(|client| {
            let (begun, hit) = (Arc::clone(&begun), hit(&storage, &policy, client));
            tokio::spawn(async move {
                begun.fetch_add(1, Ordering::SeqCst);
                hit.await
            })
        })
        .collect();
    eventually("all hits have begun", async || begun.load(Ordering::SeqCst) == 4_096).await;
    sleep(Duration::from_millis(200)).await;
    server.resume();
    let (mut admitted, mut refused) = (0, 0);
    for hit in hits {
        match hit.await.unwrap() {
            Ok(decision) => admitted += u32::from(decision.is_admitted()),
            Err(error) => refused += u32::from(error.kind() == StorageErrorKind::Overloaded),
        }
    }
    assert!((1_000..=1_100).contains(&admitted) && admitted + refused == 4_096, "{admitted}, {refused}");
}

/// Makes 40 hits per client, all clients at the same time, and in another order in each round.
/// Returns the admitted hits of each client.
async fn admitted_hits(storage: &RedisStorage, policy: &Policy) -> Vec<usize> {
    let mut admitted = vec![0; usize::try_from(CLIENTS).unwrap()];
    for round in 0..40 {
        let hits = (0..CLIENTS).map(async |number| {
            let client = (number + 5 * round) % CLIENTS;
            (usize::try_from(client).unwrap(), hit(storage, policy, client).await.unwrap())
        });
        for (client, decision) in join_all(hits).await {
            admitted[client] += usize::from(decision.is_admitted());
        }
    }
    admitted
}

/// The servers of the first proxy have equal shares. In the second one, a server has a quarter.
#[tokio::test]
async fn hits_behind_a_proxy_that_distributes_keys_are_not_combined() {
    let (server, policy) = ([Server::start(&[]), Server::start(&[])], policy("10/day"));
    let [one, other] = [server[0].port(), server[1].port()];
    for ports in [vec![one, other], [vec![one; 3], vec![other]].concat()] {
        let url = ShardingProxy::start(&ports).url();
        let name = |text: &str| format!("{url}?prefix={text}-{}", ports.len());
        let unchecked = storage(&format!("{}&combine=always", name("unchecked")));
        ready(&unchecked).await;
        let most = admitted_hits(&unchecked, &policy).await.into_iter().max().unwrap();
        assert!(most > 10, "the proxy splits the hits of a client: {most}");
        for is_ready in [false, true] {
            let storage = storage(&name(if is_ready { "ready" } else { "lazy" }));
            if is_ready {
                ready(&storage).await;
            }
            assert_eq!(admitted_hits(&storage, &policy).await, vec![10; 64]);
        }
    }
}

#[tokio::test]
async fn one_server_is_proved_once_per_connection() {
    let (server, policy) = (Server::start(&[]), policy("10/day"));
    let (proxy, storages) = (ShardingProxy::start(&[server.port()]), ["", "?combine=always"]);
    for (url, proofs) in storages.map(|query| proxy.url() + query).into_iter().zip([1, 0]) {
        let storage = storage(&url);
        // The server caches the script of a single hit. On a busy machine, the first attempt to connect may
        // take too long.
        eventually("a hit is admitted", async || {
            hit(&storage, &policy, CLIENTS).await.is_ok_and(|hit| hit.is_admitted())
        })
        .await;
        let evals = server.calls("eval");
        eventually("hits are combined", async || {
            let before = server.calls("evalsha");
            assert_eq!(admitted_hits(&storage, &policy).await.len(), 64);
            server.calls("evalsha") - before < 40 * CLIENTS / 4
        })
        .await;
        // The first calls of the script of several hits send its text.
        let sent = server.calls("eval") - evals;
        assert!((proofs * 64..=proofs * 64 + 8).contains(&sent), "{url}: {sent}");
    }
}

/// Guards against this defect: hits that a proxy had given up were sent again.
#[tokio::test]
async fn hits_whose_reply_a_proxy_does_not_get_are_counted_once() {
    let (server, policy) = (Server::start(&[]), policy("10/day"));
    let proxy = ShardingProxy::start(&[server.port()]);
    let storage = storage(&(proxy.url() + "?combine=always"));
    ready(&storage).await;
    let hits = || join_all((0..CLIENTS).map(|client| hit(&storage, &policy, client)));
    assert!(hits().await.into_iter().all(|result| result.is_ok()), "the server caches the scripts");
    for (round, error) in (2..).zip(["ERR Connection timed out", "upstream failure"]) {
        proxy.lose_replies(Some(error));
        for result in hits().await {
            let error = result.unwrap_err();
            assert!(error.may_have_counted(), "{error:#}");
        }
        proxy.lose_replies(None);
        for client in 0..CLIENTS {
            let peek = storage.decide(StorageRequest::new(&policy, &Key::from(client), Op::Peek, 1));
            assert_eq!(peek.await.unwrap().remaining(), 10 - round, "{error}");
        }
    }
}

/// Guards against this defect: a hit outside of a runtime begins the proof of one server, and panics.
#[test]
fn hit_outside_of_a_runtime_beside_others_is_an_error() {
    let server = Server::start(&[]);
    let (storage, policy, runtime) = (storage(&server.url()), policy("10/day"), runtime());
    let _others = runtime.block_on(async {
        eventually("a hit is admitted", async || hit(&storage, &policy, 0).await.is_ok_and(|hit| hit.is_admitted()))
            .await;
        let mut hits: Vec<Hit> = (0..4).map(|client| hit(&storage, &policy, client)).collect();
        for hit in &mut hits {
            assert!(poll_immediate(hit).await.is_none());
        }
        hits
    });
    let error = outside_of_a_runtime(hit(&storage, &policy, 9)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Cancelled, "{error:#}");
}

#[tokio::test]
async fn first_check_on_a_connection_makes_the_proof() {
    let server = Server::start(&[]);
    let storage = storage(&server.url());
    for checks in 1..=3 {
        storage.check().await.unwrap();
        assert_eq!(server.calls("eval"), 65 + checks, "64 scripts, and one that deletes the token");
    }
    ready(&storage).await;
    assert_eq!(server.calls("eval"), 69);
    assert_eq!(server.ask(&["DBSIZE"]).to_string(), "0", "the token is deleted");
}

#[tokio::test]
async fn server_of_a_cluster_ends_combining() {
    let server = Server::start(&["--cluster-enabled", "yes"]);
    let slots: Vec<String> = (0..16_384).map(|slot| slot.to_string()).collect();
    let all = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(|slot| &**slot)).collect::<Vec<_>>();
    server.ask(&all);
    let policy = policy("10/day");
    let refused = || {
        let Reply::Text(stats) = server.ask(&["INFO", "errorstats"]) else { panic!("no text") };
        let count = stats.lines().find_map(|line| line.strip_prefix("errorstat_CROSSSLOT:count=").map(str::to_owned));
        count.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    for query in ["?prefix=proved", "?prefix=unproved&combine=always"] {
        let mut before = refused();
        let storage = storage(&(server.url() + query));
        ready(&storage).await;
        for round in 1..=3 {
            for result in join_all((0..CLIENTS).map(|client| hit(&storage, &policy, client))).await {
                assert_eq!(result.unwrap().remaining(), 10 - round);
            }
            let now = refused();
            assert!(if round == 1 { now > before } else { now == before }, "{query}, {round}: {before}, {now}");
            before = now;
        }
    }
}
