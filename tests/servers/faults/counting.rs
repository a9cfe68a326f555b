//! A hit counts at most once, even if its reply is lost.

use std::ops::Range;
use std::time::Duration;

use common::harness::{Answer, DEADLINE, EntryPoints, used};
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::{EVENTUALLY, Stopwatch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;
use tower_ratelimit::{Key, RateLimiter};

use super::backend::Backend;
use super::{LONG, PLENTY, entry_points, limiter, recovers};

on_every_backend! { [tokio::test] [await] [
    lost_reply_never_counts_a_hit_twice,
    every_hit_is_counted_once_while_connections_are_reset,
    peek_whose_reply_is_lost_has_counted_nothing,
] }

async fn peek_whose_reply_is_lost_has_counted_nothing<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let limiter = limiter::<B>(proxy.port(), DEADLINE);
    recovers(&limiter).await;
    for mode in [Mode::SwallowReplies, Mode::CutAtReply] {
        proxy.set(mode);
        let error = limiter.peek(&Key::global()).await.unwrap_err();
        assert!(!error.may_have_counted(), "{mode:?}: {error:#}");
        proxy.set(Mode::Pass);
        proxy.cut();
        recovers(&limiter).await;
    }
}

async fn lost_reply_never_counts_a_hit_twice<B: Backend>() {
    let mut tasks = JoinSet::new();
    for mode in [Mode::SwallowReplies, Mode::CutAtReply, Mode::Garbage, Mode::Delay(DEADLINE * 10)] {
        tasks.spawn(loses_replies::<B>(mode));
    }
    tasks.join_all().await;
}

async fn loses_replies<B: Backend>(mode: Mode) {
    // Starting a server blocks, and other tasks measure their time on this thread.
    let server = spawn_blocking(B::Server::launch).await.unwrap();
    let proxy = Proxy::start(server.port());
    let (direct, entry_points) = (limiter::<B>(server.port(), LONG), entry_points::<B>(proxy.port()));
    entry_points.recover().await;
    recovers(&direct).await;
    let watch = Stopwatch::start();
    while loses_replies_once::<B>(mode, &proxy, &entry_points, &direct, || {}).await == 0
        && !B::READS_FIRST
        && !B::REMEMBERS
    {
        assert!(watch.wall() < EVENTUALLY, "{mode:?}: no hit counts whose reply is lost");
    }
    loses_replies_once::<B>(mode, &proxy, &entry_points, &direct, || B::flush_caches(&server)).await;
}

/// Makes hits whose replies are lost, and returns how many of them have counted. It may be none:
/// PostgreSQL prepares a statement on each new connection, and again after a second, and then that
/// reply is lost. Calls `change` after the last hit whose reply arrives.
async fn loses_replies_once<B: Backend>(
    mode: Mode,
    proxy: &Proxy,
    entry_points: &EntryPoints,
    direct: &RateLimiter,
    change: impl FnOnce(),
) -> u32 {
    let earlier = entry_points.admit().await;
    let before = used(direct).await;
    change();
    proxy.set(mode);
    // A hit that timed out on a busy machine may count late.
    let mut failed = earlier.failed;
    for _ in 0..2 {
        assert_eq!(entry_points.hit().await, [Answer::Failed; 3], "{mode:?}");
        failed += 3;
    }
    proxy.set(Mode::Pass);
    proxy.cut();
    recovers(&entry_points.limiter).await;
    let counted = used(direct).await - before;
    // If a hit reads first, the reply to the read was lost.
    let most = if B::READS_FIRST { 0 } else { failed };
    assert!(counted <= most, "{mode:?}: {counted} of {failed}");
    let more = entry_points.admit().await;
    let least = before + counted + more.admitted;
    let now = used(direct).await;
    assert!(
        (least..=least + more.failed + earlier.failed).contains(&now),
        "{mode:?}: {before}, {counted}, {more:?}: {now}"
    );
    counted
}

/// The results of the hits of one caller.
#[derive(Default)]
struct Hits {
    counted: u32,
    in_doubt: u32,
    failed: u32,
}

/// Connections are reset at any moment, also between a hit and its reply.
async fn every_hit_is_counted_once_while_connections_are_reset<B: Backend>() {
    let server = B::Server::launch();
    let direct = limiter::<B>(server.port(), LONG);
    recovers(&direct).await;
    let mut tasks = JoinSet::new();
    for first in [0, 100, 200] {
        tasks.spawn(hits_while_connections_are_reset::<B>(server.port(), first..first + 100));
    }
    let mut all = Hits::default();
    for (key, hits) in tasks.join_all().await {
        let total = PLENTY - direct.peek(&key).await.unwrap().remaining();
        let Hits { counted, in_doubt, failed } = hits;
        eprintln!("{key}: {counted} counted, {in_doubt} in doubt, {failed} failed: {total} on the server");
        assert!((counted..=counted + in_doubt).contains(&total), "{counted} and {in_doubt} in doubt: {total}");
        all.counted += counted;
        all.failed += in_doubt + failed;
    }
    assert!(all.counted > 150 && all.failed > 0, "{} and {}", all.counted, all.failed);
}

/// Makes a hit in each round. In every third round, the connection is reset some microseconds
/// later.
async fn hits_while_connections_are_reset<B: Backend>(port: u16, rounds: Range<u64>) -> (Key, Hits) {
    let proxy = Proxy::start(port);
    let (limiter, key) = (limiter::<B>(proxy.port(), LONG), Key::from(rounds.start));
    recovers(&limiter).await;
    let mut hits = Hits::default();
    for round in rounds {
        let is_reset = round % 3 == 0;
        let resetting = async {
            if is_reset {
                sleep(Duration::from_micros(round * 7)).await;
                proxy.cut();
            }
        };
        let (hit, ()) = tokio::join!(limiter.hit(&key), resetting);
        match hit {
            Ok(decision) if decision.is_admitted() => hits.counted += 1,
            // A hit in doubt may still be executed and win against the next one.
            Ok(decision) => {
                assert!(decision.is_contended(), "{decision:?}");
                hits.failed += 1;
            }
            // On a connection that was reset before, a hit does not reach the server.
            Err(error) if error.may_have_counted() && is_reset => hits.in_doubt += 1,
            Err(_) => hits.failed += 1,
        }
    }
    (key, hits)
}
