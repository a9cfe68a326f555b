//! Hits that wait at the same time and share a call of a script.

use std::time::Duration;

use common::random::Numbers;
use common::servers::{Mode, Proxy, Server};
use common::{EVERY_STRATEGY, policy};
use futures_util::future::{join_all, poll_immediate};
use tower_ratelimit::storage::{Clock, ManualClock, RedisStorage, StorageError, StorageRequest};
use tower_ratelimit::testing::Model;
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

use super::{LONG, connected, ready, storage, storage_within};

const CLIENTS: u64 = 64;

async fn hit(storage: &RedisStorage, policy: &Policy, client: u64, cost: u32) -> Result<Decision, StorageError> {
    storage.decide(StorageRequest::new(policy, &Key::from(client), Op::Hit, cost)).await
}

/// One hit per client, all at the same time.
async fn hits(storage: &RedisStorage, policy: &Policy) -> Vec<Result<Decision, StorageError>> {
    join_all((0..CLIENTS).map(|client| hit(storage, policy, client, 1))).await
}

#[tokio::test]
async fn combined_hits_decide_like_the_strategies() {
    let server = Server::start(&[]);
    let mut numbers = Numbers(0x5a5a_1234_9876_0001);
    let is_small = |text: &&str| !text.contains("moving-window");
    // Hits with more than eight limits are not combined.
    let several: Vec<_> = EVERY_STRATEGY.into_iter().filter(is_small).filter(|text| !text.contains("burst")).collect();
    let several = several.join("; ");
    for text in EVERY_STRATEGY.into_iter().chain([&*several]) {
        let (clock, mut model, policy) = (ManualClock::default(), Model::default(), policy(text).with_name("p"));
        let storage = connected(&server, clock.clone()).await;
        let before = server.calls("evalsha");
        for step in 0..40 {
            let costs: Vec<u32> = (0..CLIENTS).map(|_| numbers.one_of(&[1, 1, 1, 2, 3])).collect();
            let all = (0..).zip(&costs).map(|(client, cost)| hit(&storage, &policy, client, *cost));
            let decided = join_all(all).await;
            for ((client, cost), decision) in (0..CLIENTS).zip(costs).zip(decided) {
                let expected = model.decide(&policy, &Key::from(client), Op::Hit, cost, clock.now());
                assert_eq!(decision.unwrap(), expected, "{text}, step {step}, client {client}");
            }
            clock.advance(Duration::from_micros(numbers.below(3_000_000)));
        }
        let calls = server.calls("evalsha") - before;
        if is_small(&text) {
            assert!(calls < 40 * CLIENTS / 4, "{text}: {calls} calls");
        }
    }
}

#[tokio::test]
async fn combined_hits_on_one_key_admit_exactly_the_limit() {
    let server = Server::start(&[]);
    for text in ["fixed-window 40/day", "40/day", "token-bucket 40/day", "moving-window 40/day"] {
        let (storage, policy) = (connected(&server, ManualClock::default()).await, policy(text));
        let all = (0..100).map(|_| hit(&storage, &policy, 7, 1));
        let decided = join_all(all).await;
        let admitted = decided.into_iter().map(Result::unwrap).filter(Decision::is_admitted);
        let mut remaining: Vec<u32> = admitted.map(|decision| decision.remaining()).collect();
        remaining.sort_unstable();
        assert_eq!(remaining, (0..40).collect::<Vec<u32>>(), "{text}");
    }
}

#[tokio::test]
async fn scripts_that_the_server_has_forgotten_are_sent_again() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage(&server.url()), policy("10/day"));
    ready(&storage).await;
    for round in 1..=5 {
        for decision in hits(&storage, &policy).await {
            assert_eq!(decision.unwrap().remaining(), 10 - round);
        }
        server.ask(&["SCRIPT", "FLUSH"]);
    }
}

/// The user has no right to the keys of the clients from number 50 on.
#[tokio::test]
async fn hits_on_forbidden_keys_do_not_fail_the_other_hits() {
    let server = Server::start(&[]);
    server.ask(&[
        "ACL",
        "SETUSER",
        "some",
        "on",
        ">password",
        "+@all",
        "~rl:{ready*",
        "~rl:{p|n:?}v1",
        "~rl:{p|n:[1-4]?}v1",
    ]);
    let storage = storage(&server.url().replace("redis://", "redis://some:password@"));
    let policy = policy("10/day").with_name("p");
    ready(&storage).await;
    let _ = hit(&storage, &policy, 1, 1).await.unwrap();
    for round in 1..=3 {
        for (client, result) in hits(&storage, &policy).await.into_iter().enumerate() {
            match result {
                Ok(decision) => {
                    assert!(client < 50);
                    assert_eq!(decision.remaining(), 10 - round - u32::from(client == 1), "{client}");
                }
                Err(error) => {
                    assert!(client >= 50 && format!("{error:#}").contains("NOPERM"), "{client}: {error:#}");
                    assert!(!error.may_have_counted());
                }
            }
        }
    }
}

#[tokio::test]
async fn unreadable_values_of_some_keys_do_not_fail_the_other_hits() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage(&server.url()), policy("fixed-window 10/day; 20/day").with_name("p"));
    ready(&storage).await;
    hits(&storage, &policy).await.into_iter().for_each(|result| assert!(result.unwrap().is_admitted()));
    server.ask(&["DEL", "rl:{p|n:9}v1", "rl:{p|n:10}v1"]);
    server.ask(&["RPUSH", "rl:{p|n:9}v1", "a"]);
    server.ask(&["SET", "rl:{p|n:10}v1", "no record"]);
    for (client, result) in (0..).zip(hits(&storage, &policy).await) {
        if client == 10 {
            let error = result.unwrap_err();
            assert!(format!("{error:#}").contains("unknown format") && !error.may_have_counted(), "{error:#}");
        } else {
            assert_eq!(result.unwrap().remaining(), if client == 9 { 9 } else { 8 }, "{client}");
        }
    }
}

#[tokio::test]
async fn lost_reply_fails_every_hit_that_waits_for_it() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let (storage, policy) = (storage(&url), policy("10/day"));
    let quick = storage_within(&url, Duration::from_secs(2));
    storage.ready(LONG).await.unwrap();
    quick.ready(LONG).await.unwrap();
    hits(&storage, &policy).await.into_iter().for_each(|result| assert!(result.unwrap().is_admitted()));
    let before = server.calls("evalsha");
    proxy.set(Mode::SwallowReplies);
    for error in hits(&quick, &policy).await.into_iter().map(Result::unwrap_err) {
        assert!(error.is_timeout() && error.may_have_counted(), "{error:#}");
    }
    assert!(server.calls("evalsha") - before < CLIENTS / 4, "no hit is sent twice");
    proxy.set(Mode::Pass);
    proxy.cut();
    storage.ready(LONG).await.unwrap();
    let after = hits(&storage, &policy).await;
    assert!(after.into_iter().all(|result| result.unwrap().remaining() == 7), "every hit counted once");
}

#[tokio::test]
async fn dropped_hits_do_not_affect_those_that_wait_with_them() {
    let server = Server::start(&[]);
    let (storage, policy) = (storage(&server.url()), policy("10/day"));
    ready(&storage).await;
    for round in 1..=8 {
        let mut waiting: Vec<_> =
            (0..CLIENTS).map(|client| Some(Box::pin(hit(&storage, &policy, client, 1)))).collect();
        for hit in waiting.iter_mut().flatten() {
            assert!(poll_immediate(hit).await.is_none());
        }
        // Drops a hit that is in flight, or that waits in a group.
        waiting[usize::try_from(round).unwrap()] = None;
        let rest = join_all(waiting.into_iter().flatten()).await;
        assert!(rest.into_iter().all(|result| result.unwrap().is_admitted()), "round {round}");
    }
    for (client, result) in (0..CLIENTS).zip(hits(&storage, &policy).await) {
        let least = if client == 0 || client > 8 { 1 } else { 2 };
        assert!((1..=least).contains(&result.unwrap().remaining()), "client {client}");
    }
}
