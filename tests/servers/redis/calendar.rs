//! Calendar windows: the process sends the instants, and the server's clock chooses among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use common::servers::Server;
use common::servers::storage::{RUNTIME, on};
use tower_ratelimit::storage::{ManualClock, StorageRequest};
use tower_ratelimit::strategy::{Script, Status, Strategy};
use tower_ratelimit::{CalendarWindow, Decision, Key, MovingWindow, Op, Policy, Quota, Storage, Timestamp};

const DAY: i64 = 86_400_000_000;

/// A calendar window in a process whose clock is ahead of the server's by `lead` microseconds, for
/// the next call.
#[derive(Clone, Debug, Default)]
struct Ahead {
    window: CalendarWindow,
    lead: Arc<AtomicI64>,
    /// The number of scripts that were prepared.
    prepared: Arc<AtomicUsize>,
}

impl Strategy for Ahead {
    fn name(&self) -> &'static str {
        self.window.name()
    }

    common::decides_like!(|strategy: &Self| strategy.window.clone());

    fn script(&self, quota: &Quota, now: Timestamp, cost: u32) -> Option<Script> {
        self.prepared.fetch_add(1, Ordering::Relaxed);
        let now = now.as_micros().saturating_add_signed(self.lead.swap(0, Ordering::Relaxed));
        self.window.script(quota, Timestamp::from_micros(now), cost)
    }
}

/// The instants that a process sends cover the day before and the day after its own. A process that is
/// further away sends them again, by the time of the server.
#[test]
fn windows_end_by_the_clock_of_the_server() {
    let server = Server::start(&[]);
    let (clock, midnight) = (ManualClock::default(), Timestamp::from_micros(1_728_000_000_000_000));
    let storage = on(&server, clock.clone());
    for (ahead, prepared) in [
        (0, 1),
        (1, 1),
        (-1, 1),
        (DAY, 1),
        (-DAY, 1),
        (2 * DAY, 2),
        (-2 * DAY, 2),
        (400 * DAY, 2),
        (-400 * DAY, 2),
        (i64::MAX, 2),
        (i64::MIN, 2),
    ] {
        // The first and the last microsecond of the day.
        for passed in [0, DAY.unsigned_abs() - 1] {
            clock.set(midnight.plus(passed));
            let strategy = Ahead::default();
            let apart = || {
                strategy.lead.store(ahead, Ordering::Relaxed);
                strategy.prepared.store(0, Ordering::Relaxed);
            };
            let policy = Policy::new(strategy.clone(), Quota::per_day(5)).with_name(format!("{ahead} {passed}"));
            let key = |name| Key::from(name);
            let what = format!("{ahead} us ahead, {passed} us after midnight");
            let left = Duration::from_micros(DAY.unsigned_abs() - passed);
            apart();
            let hit = RUNTIME.block_on(decide(&storage, &policy, &key("hit"), Op::Hit, 2));
            assert_eq!((hit.remaining(), hit.reset_after()), (3, left), "{what}");
            assert_eq!(strategy.prepared.load(Ordering::Relaxed), prepared, "{what}");
            apart();
            let charge = RUNTIME.block_on(decide(&storage, &policy, &key("charge"), Op::Charge, 7));
            assert_eq!((charge.remaining(), charge.reset_after()), (0, left), "{what}");
            assert_eq!(strategy.prepared.load(Ordering::Relaxed), prepared, "{what}");
            // The charge of a settled hit starts a window if the key was cleared meanwhile.
            RUNTIME.block_on(storage.clear(&policy, &key("hit"))).unwrap();
            apart();
            RUNTIME.block_on(storage.settle(&policy, &key("hit"), &hit, 3)).unwrap();
            assert_eq!(strategy.prepared.load(Ordering::Relaxed), prepared, "{what}");
            let settled = RUNTIME.block_on(decide(&storage, &policy, &key("hit"), Op::Peek, 1));
            assert_eq!((settled.remaining(), settled.reset_after()), (4, left), "{what}");
        }
    }
}

/// The script does not need the calendar while a window is live.
#[test]
fn live_windows_need_no_instants() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    let strategy = Ahead::default();
    let policy = Policy::new(strategy.clone(), Quota::per_day(5));
    for remaining in [4, 3, 2, 1, 0] {
        let ahead = if remaining == 4 { 0 } else { 400 * DAY };
        strategy.lead.store(ahead, Ordering::Relaxed);
        let hit = RUNTIME.block_on(decide(&storage, &policy, &Key::from("k"), Op::Hit, 1));
        assert_eq!(hit.remaining(), remaining);
    }
    assert_eq!(strategy.prepared.load(Ordering::Relaxed), 5);
}

/// Guards against this defect: the log of a moving window grows before the script of the calendar
/// window ends, and the second run takes the log for lost.
#[test]
fn charge_that_is_not_prepared_writes_no_log() {
    let server = Server::start(&[]);
    let (clock, midnight) = (ManualClock::default(), Timestamp::from_micros(1_728_000_000_000_000));
    let storage = on(&server, clock.clone());
    for hits in 3..=9 {
        // The window of the day ends between the hits and the charge. That of the log does not.
        clock.set(midnight.plus(DAY.unsigned_abs() - 1_000_000));
        let strategy = Ahead::default();
        let log = Policy::new(MovingWindow::new(), Quota::per(20, Duration::from_secs(3_600)));
        let policy = log.limit(strategy.clone(), Quota::per_day(50)).with_name(format!("{hits} hits"));
        for _ in 0..hits {
            let hit = RUNTIME.block_on(decide(&storage, &policy, &Key::from("k"), Op::Hit, 1));
            assert!(hit.is_admitted());
        }
        clock.advance(Duration::from_secs(2));
        strategy.lead.store(400 * DAY, Ordering::Relaxed);
        strategy.prepared.store(0, Ordering::Relaxed);
        let charge = RUNTIME.block_on(decide(&storage, &policy, &Key::from("k"), Op::Charge, 1));
        assert_eq!(strategy.prepared.load(Ordering::Relaxed), 2, "the first run was not prepared");
        let remaining: Vec<u32> = charge.statuses().iter().map(Status::remaining).collect();
        assert_eq!(remaining, [20 - hits - 1, 49], "{hits} hits");
    }
}

/// Hits that share a call are sent again in calls of their own, and none is lost or counted twice.
#[test]
fn hits_that_share_a_call_are_exact_when_the_clocks_are_apart() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    let policies: Vec<Policy> = (0..64).map(|number| far_ahead().with_name(format!("{}", number % 8))).collect();
    let admitted = RUNTIME.block_on(async {
        storage.check().await.unwrap();
        let hits = policies
            .iter()
            .map(|policy| async { decide(&storage, policy, &Key::from("k"), Op::Hit, 1).await.is_admitted() });
        futures_util::future::join_all(hits).await.into_iter().filter(|is_admitted| *is_admitted).count()
    });
    assert_eq!(admitted, 8 * 5);
}

/// A limit of five per day, in a process whose first call is 400 days ahead of the server.
fn far_ahead() -> Policy {
    let strategy = Ahead::default();
    strategy.lead.store(400 * DAY, Ordering::Relaxed);
    Policy::new(strategy, Quota::per_day(5))
}

async fn decide(storage: &impl Storage, policy: &Policy, key: &Key, op: Op, cost: u32) -> Decision {
    storage.decide(StorageRequest::new(policy, key, op, cost)).await.unwrap_or_else(|error| panic!("{error:#}"))
}
