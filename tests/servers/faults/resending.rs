//! A hit that was sent is not sent again.

use common::harness::{SECOND, used, within};
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::wait_until;
use tower_ratelimit::Key;

use super::backend::CountsReplies;
use super::{LONG, limiter, recovers};

on_backends! { [tokio::test] [await] [hit_is_never_sent_twice]
    redis: Redis, redis_swap: RedisSwap, memcached: MemcachedServer
}

/// The fault occurs exactly after the hit was sent.
async fn hit_is_never_sent_twice<B: CountsReplies>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    // The timeout suffices for the replies before the fault.
    let timeout = SECOND;
    let (direct, limiter) = (limiter::<B>(server.port(), LONG), limiter::<B>(proxy.port(), timeout));
    let key = Key::global();
    for (mode, executed) in
        [(Mode::SwallowReplies, 1), (Mode::CutAtReply, 1), (Mode::Garbage, 1), (Mode::SwallowRequests, 0)]
    {
        recovers(&limiter).await;
        // From here on the script is loaded.
        while !limiter.hit(&key).await.is_ok_and(|hit| hit.is_admitted()) {}
        let (before, writes) = (used(&direct).await, B::writes(&server));
        proxy.set_after(B::REPLIES_BEFORE_COUNTING, mode);
        let error = within(timeout + B::MARGIN, limiter.hit(&key)).await.unwrap_err();
        assert!(error.may_have_counted(), "{mode:?}: {error}");
        wait_until("the server executes the hit", || B::writes(&server) - writes >= executed);
        assert_eq!(B::writes(&server) - writes, executed, "{mode:?}");
        if B::READS_FIRST || B::REMEMBERS {
            let error = within(timeout + B::MARGIN, limiter.hit(&key)).await.unwrap_err();
            assert!(!error.may_have_counted(), "{mode:?}: {error}");
        }
        proxy.set(Mode::Pass);
        proxy.cut();
        recovers(&limiter).await;
        assert_eq!(u64::from(used(&direct).await - before), executed, "{mode:?}");
    }
}
