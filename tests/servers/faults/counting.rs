//! A hit is counted once at most, whatever happens to its reply.

use std::fmt::Debug;
use std::time::Duration;

use common::harness::{Answer, DEADLINE, timely, used};
use common::servers::{FaultyServer, Mode, Proxy};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::{Decision, Key, RateLimiter, Storage};

use super::backend::{Backend, Failure};
use super::{LONG, entry_points, limiter, recovers};

on_every_backend! { [tokio::test] [await] [
    lost_reply_never_counts_a_hit_twice,
    every_hit_is_counted_once_while_connections_are_reset,
] }

async fn lost_reply_never_counts_a_hit_twice<B: Backend>() {
    let mut tasks = JoinSet::new();
    for mode in [Mode::SwallowReplies, Mode::CutAtReply, Mode::Garbage, Mode::Delay(DEADLINE * 2)] {
        tasks.spawn(loses_replies::<B>(mode));
    }
    tasks.join_all().await;
}

async fn loses_replies<B: Backend>(mode: Mode) {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let (direct, entry_points) = (limiter::<B>(server.port(), LONG), entry_points::<B>(proxy.port()));
    entry_points.recover().await;
    for flush in [false, true] {
        let before = used(&direct).await;
        if flush {
            B::flush_caches(&server);
        }
        proxy.set(mode);
        let mut failed = 0;
        for _ in 0..2 {
            assert_eq!(entry_points.hit().await, [Answer::Failed; 3], "{mode:?}");
            failed += 3;
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        recovers::<B>(&entry_points.limiter).await;
        let counted = used(&direct).await - before;
        if B::READS_FIRST {
            assert_eq!(counted, 0, "{mode:?}: the reply to the read was lost");
        } else {
            assert!(counted <= failed && (counted > 0 || flush), "{mode:?}: {counted} of {failed}");
        }
        assert_eq!(entry_points.hit().await, [Answer::Admitted; 3]);
        assert_eq!(used(&direct).await, before + counted + 3);
    }
}

/// Connections are reset at any moment, also between a hit and its reply.
async fn every_hit_is_counted_once_while_connections_are_reset<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let (direct, limiter) = (limiter::<B>(server.port(), LONG), limiter::<B>(proxy.port(), DEADLINE));
    recovers::<B>(&limiter).await;
    let (mut counted, mut in_doubt, mut failed) = (0, 0, 0);
    for round in 0..300 {
        let is_reset = round % 3 == 0;
        let hit = if is_reset { reset_during_hit::<B>(&limiter, &proxy, round * 7).await } else { hit(&limiter).await };
        match hit {
            Ok(decision) if decision.is_admitted() => counted += 1,
            // A hit in doubt may still be executed, and outrun the next one.
            Ok(decision) => {
                assert!(decision.is_contended(), "{decision:?}");
                failed += 1;
            }
            // On a connection that was reset before, a hit does not reach the server.
            Err(error) if error.may_have_counted() && (is_reset || error.is_timeout()) => in_doubt += 1,
            Err(_) => failed += 1,
        }
    }
    let total = used(&direct).await;
    eprintln!("{counted} counted, {in_doubt} in doubt, {failed} failed: {total} on the server");
    assert!(counted > 150 && in_doubt + failed > 0, "{counted}, {in_doubt}, {failed}");
    assert!((counted..=counted + in_doubt).contains(&total), "{counted} and {in_doubt} in doubt: {total}");
}

async fn hit<St: Storage<Error: Debug>>(limiter: &RateLimiter<St>) -> Result<Decision, St::Error> {
    timely(limiter.hit(&Key::everybody())).await
}

async fn reset_during_hit<B: Backend>(
    limiter: &RateLimiter<B::Storage>,
    proxy: &Proxy,
    micros: u64,
) -> Result<Decision, B::Error> {
    let resetting = async {
        sleep(Duration::from_micros(micros)).await;
        proxy.cut();
    };
    tokio::join!(hit(limiter), resetting).0
}
