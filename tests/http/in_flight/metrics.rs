//! The metrics of slots, and the warning about renewals that fail.

use std::time::Duration;

use common::ask;
use common::fake_cas_store::FakeCasStore;
use tokio::runtime::Builder;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_ratelimit::metrics_observer;

use super::shared::{TIME_TO_LIVE, process, settle};
use super::{layer, of, streams};
use crate::log::log_of;
use crate::observe::Counters;

#[test]
fn slots_in_use_waiting_requests_and_failed_renewals_are_metrics() {
    let counters = Counters::default();
    let gauges = || ["ratelimit_slots_in_use", "ratelimit_slots_waiting"].map(|name| counters.gauge(name));
    let work = async {
        let memory = layer(3).cost(|_| 2).wait(Duration::from_secs(60), 10);
        let held = ask(&streams(&memory), of("a")).await;
        assert_eq!(gauges(), [2, 0]);
        let waits = tokio::spawn(streams(&memory).oneshot(of("a")));
        settle().await;
        assert_eq!(gauges(), [2, 1]);
        drop(held);
        let held = waits.await.unwrap().unwrap();
        assert_eq!(gauges(), [2, 0]);
        drop(held);
        assert_eq!(gauges(), [0, 0]);

        let store = FakeCasStore::default();
        let shared = process(&store, 4);
        let mut held = Vec::new();
        for user in ["a", "b", "c"] {
            held.push(ask(&streams(&shared), of(user)).await);
        }
        assert_eq!(gauges(), [3, 0]);
        store.fail(true);
        sleep(TIME_TO_LIVE / 3).await;
        settle().await;
        drop(held);
        assert_eq!(gauges(), [0, 0]);
    };
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let log = log_of(|| metrics::with_local_recorder(&counters, || runtime.block_on(work)));
    assert_eq!(
        log,
        ["WARN message=slots of requests in flight were not renewed keys=3 error=\"storage failed: the disk is full\""],
        "one event for each round"
    );
    assert_eq!(counters.counts_of("renewals_failed"), ["ratelimit_slot_renewals_failed_total{} 3"]);
}

#[test]
fn requests_and_refusals_are_counted() {
    let counters = Counters::default();
    let work = async {
        let layer = layer(1).observer(metrics_observer());
        let held = ask(&streams(&layer), of("a")).await;
        for expected in [429, 429] {
            assert_eq!(ask(&streams(&layer), of("a")).await.status(), expected);
        }
        drop(held);
    };
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    metrics::with_local_recorder(&counters, || runtime.block_on(work));
    let counts = counters.counts_of("decisions_total");
    assert_eq!(counts.len(), 2, "{counts:?}");
    assert!(counts[0].contains("admitted") && counts[0].ends_with(" 1"), "{counts:?}");
    assert!(counts[1].contains("refused") && counts[1].ends_with(" 2"), "{counts:?}");
}
