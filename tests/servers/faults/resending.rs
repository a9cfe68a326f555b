//! A hit that was sent is not sent again.

use common::harness::used;
use common::servers::{FaultyServer, Mode, Proxy};
use tower_ratelimit::Key;

use super::backend::CountsReplies;
use super::{LONG, QUICK, limiter, quick_hit, recovers};

on_backends! { [tokio::test] [await] [hit_is_never_sent_twice]
    redis: Redis, redis_swap: RedisSwap, memcached: MemcachedServer
}

/// The fault occurs exactly after the hit was sent.
async fn hit_is_never_sent_twice<B: CountsReplies>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let (direct, limiter) = (limiter::<B>(server.port(), LONG), limiter::<B>(proxy.port(), QUICK));
    let key = Key::everybody();
    for (mode, executed) in
        [(Mode::SwallowReplies, 1), (Mode::CutAtReply, 1), (Mode::Garbage, 1), (Mode::SwallowRequests, 0)]
    {
        recovers::<B>(&limiter).await;
        // From here on the script is loaded.
        assert!(limiter.hit(&key).await.unwrap().is_admitted());
        let (before, writes) = (used(&direct).await, B::writes(&server));
        proxy.set_after(B::REPLIES_BEFORE_COUNTING, mode);
        let error = quick_hit::<B>(&limiter, &key).await.unwrap_err();
        assert!(error.may_have_counted(), "{mode:?}: {error}");
        assert_eq!(B::writes(&server) - writes, executed, "{mode:?}");
        if B::READS_FIRST {
            let error = quick_hit::<B>(&limiter, &key).await.unwrap_err();
            assert!(!error.may_have_counted(), "{mode:?}: {error}");
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        recovers::<B>(&limiter).await;
        assert_eq!(u64::from(used(&direct).await - before), executed, "{mode:?}");
    }
}
