//! Three members, some of which die, hang or are unreachable.

use std::time::{Duration, Instant};

use common::harness::{AGAIN, Answer, EntryPoints, timely};
use common::policy;
use common::servers::Etcd;
use common::time::{EVENTUALLY, Stopwatch};
use tokio::time::sleep;
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, PLENTY, entry_points, storage};

/// Makes hits until ten rounds in a row succeed. Returns the number of failures, and the time until
/// the last one.
async fn settles(entry_points: &EntryPoints) -> (usize, Duration) {
    let (watch, mut failed, mut last, mut good) = (Stopwatch::start(), 0, Duration::ZERO, 0);
    while good < 10 {
        let failures = entry_points.hit().await.iter().filter(|answer| **answer == Answer::Failed).count();
        (failed, good) = (failed + failures, if failures == 0 { good + 1 } else { 0 });
        if failures > 0 {
            last = watch.elapsed();
        }
        assert!(watch.wall() < EVENTUALLY, "no decisions");
        sleep(AGAIN).await;
    }
    (failed, last)
}

#[tokio::test]
async fn storage_recovers_when_any_member_dies_or_hangs() {
    let mut etcd = Etcd::start(3);
    let entry_points = entry_points(&etcd.url());
    entry_points.recover().await;
    for hangs in [false, true] {
        for leads in [false, true] {
            let leader = etcd.leader();
            let victim = if leads { leader } else { (leader + 1) % 3 };
            let before = entry_points.used().await;
            if hangs {
                etcd.members[victim].stop();
            } else {
                etcd.members[victim].kill();
            }
            let watch = Stopwatch::start();
            let (failed, last) = settles(&entry_points).await;
            // A busy member may miss the leader's heartbeats, and begin an election.
            let elections = usize::try_from(watch.excess().as_millis() / AGAIN.as_millis()).unwrap();
            eprintln!("leader: {leads}, hangs: {hangs}: {failed} failed, the last after {last:?}");
            // An election takes a few tenths of a second.
            assert!(last < Duration::from_secs(5));
            assert!(leads || failed <= 3 + 3 * elections, "the other members have a leader");
            assert!(entry_points.used().await >= before + 30, "counts are kept");
            if hangs {
                etcd.members[victim].resume();
            } else {
                etcd.members[victim].restart();
            }
            settles(&entry_points).await;
        }
    }
}

#[tokio::test]
async fn hits_fail_until_a_majority_is_back() {
    let mut etcd = Etcd::start(3);
    let entry_points = entry_points(&etcd.url());
    entry_points.recover().await;
    for member in [0, 1] {
        etcd.members[member].kill();
    }
    let (started, mut failing) = (Instant::now(), 0);
    // The remaining member may wait for the others until it notices the loss of the majority.
    while failing < 5 {
        failing = if entry_points.hit().await == [Answer::Failed; 3] { failing + 1 } else { 0 };
        assert!(started.elapsed() < LONG);
    }
    let mut error = entry_points.limiter.hit(&Key::global()).await.unwrap_err();
    while error.is_timeout() {
        assert!(started.elapsed() < LONG, "{error}");
        error = entry_points.limiter.hit(&Key::global()).await.unwrap_err();
    }
    assert!(!error.may_have_counted(), "{error}");
    for member in [0, 1] {
        etcd.members[member].begin_again();
    }
    let (_, last) = settles(&entry_points).await;
    eprintln!("decisions {last:?} after the return");
}

#[tokio::test]
async fn unreachable_member_is_skipped_at_once() {
    let etcd = Etcd::start(1);
    let url = format!("etcd://127.0.0.1:1,127.0.0.1:2,{}", etcd.hosts());
    for _ in 0..8 {
        // Each storage begins with a random member.
        let storage = storage(&url);
        timely(storage.ready(LONG)).await.unwrap();
        let limiter = RateLimiter::with_storage(policy(PLENTY), storage);
        for _ in 0..3 {
            let decision = timely(limiter.hit(&Key::global())).await;
            assert!(decision.is_ok_and(|decision| decision.is_admitted()));
        }
    }
}
