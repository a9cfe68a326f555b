//! Observers and metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::fake_cas_store::FakeCasStore;
use common::{
    Behavior, FAILURE, FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, policy, poll, status, with,
};
use metrics::{Counter, Gauge, Histogram, HistogramFn, KeyName, Metadata, Recorder, SharedString, Unit};
use tower::Layer;
use tower_ratelimit::storage::{Breaker, Cas, Clock, Leases, ManualClock, OnFull, RefusalCache};
use tower_ratelimit::{
    Event, EventKind, Header, Key, LocalLimiter, MemoryStorage, OnError, RateLimitLayer, RateLimiter, ResponseHead,
    metrics_observer,
};

use crate::log::log_of;

fn layer(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text).with_name("api"), Header::new("x-client"))
        .storage(memory_with_manual_clock().0, OnError::Refuse)
}

#[tokio::test]
async fn observer_gets_key_and_policy_of_each_decision() {
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&outcomes);
    let observer = move |event: &Event<'_>| {
        let numbers = match event.kind {
            EventKind::Decided(decision) => decision.remaining().to_string(),
            _ => "-".to_owned(),
        };
        let key = event.key.map(|key| format!("{key:?}"));
        events.lock().unwrap().push((event.policy.identity().to_owned(), event.outcome(), key, numbers));
    };
    let layer = RateLimitLayer::new(policy("leaky-bucket 1/hour queue 0").with_name("api"), Header::new("x-client"));
    let layer = layer.storage(MemoryStorage::builder().max_keys(1).build().unwrap(), OnError::Refuse);
    let service = layer.observer(observer).layer(Inner::default());
    for (request, expected) in
        [(with("x-client", "a"), 200), (with("x-client", "a"), 429), (with("x-client", "b"), 429), (get("/"), 400)]
    {
        assert_eq!(status(&service, request).await, expected);
    }
    let key = |name: char| Some(format!("Key(\"t{name}\")"));
    let api = "api".to_owned();
    let expected = [
        (api.clone(), "admitted", key('a'), "0".to_owned()),
        (api.clone(), "refused", key('a'), "0".to_owned()),
        (api.clone(), "storage_full", key('b'), "0".to_owned()),
        (api, "missing", None, "-".to_owned()),
    ];
    assert_eq!(*outcomes.lock().unwrap(), expected);
}

#[tokio::test]
async fn observer_gets_failures_with_their_outcome() {
    for (on_error, expected) in [(OnError::Admit, "failed_open"), (OnError::Refuse, "failed_closed")] {
        let outcomes = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::clone(&outcomes);
        let observer = move |event: &Event<'_>| {
            let EventKind::Failed { error, .. } = event.kind else { panic!("{event:?}") };
            events.lock().unwrap().push((event.outcome(), error.to_string()));
        };
        let service = layer("1/day").storage(failing(), on_error).observer(observer).layer(Inner::default());
        status(&service, with("x-client", "a")).await;
        assert_eq!(*outcomes.lock().unwrap(), [(expected, FAILURE.to_owned())]);
    }
}

/// Stores counters by name and labels, and gauges as the bits of their values.
#[derive(Default)]
pub(crate) struct Counters(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        Counter::from_arc(Arc::clone(self.0.lock().unwrap().entry(name).or_default()))
    }

    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        let labels: Vec<&str> = key.labels().map(metrics::Label::value).collect();
        let name = [&[key.name()], &*labels].concat().join(" ");
        Gauge::from_arc(Arc::clone(self.0.lock().unwrap().entry(name).or_default()))
    }

    fn register_histogram(&self, key: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        // Stores the number of values.
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        Histogram::from_arc(Arc::new(Count(Arc::clone(self.0.lock().unwrap().entry(name).or_default()))))
    }
}

/// Counts the values of a histogram.
struct Count(Arc<AtomicU64>);

impl HistogramFn for Count {
    fn record(&self, seconds: f64) {
        assert!((0.0..60.0).contains(&seconds), "{seconds}");
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Counters {
    /// Returns the value of a gauge, which is a whole number.
    pub(crate) fn gauge(&self, name: &str) -> u32 {
        let bits = self.0.lock().unwrap().get(name).map_or(0, |gauge| gauge.load(Ordering::SeqCst));
        f64::from_bits(bits).to_string().parse().unwrap()
    }

    /// Returns all counters with their values.
    pub(crate) fn counts(self) -> Vec<String> {
        self.counts_of("_total")
    }

    /// Returns the metrics whose name contains `part`, with their values.
    pub(crate) fn counts_of(self, part: &str) -> Vec<String> {
        let counters = self.0.into_inner().unwrap().into_iter().filter(|(name, _)| name.contains(part));
        counters.map(|(name, count)| format!("{name} {}", count.load(Ordering::SeqCst))).collect()
    }
}

/// Runs `work` on a new runtime and returns its counters.
fn counters_of(work: impl Future<Output = ()>) -> Counters {
    let counters = Counters::default();
    metrics::with_local_recorder(&counters, || {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work);
    });
    counters
}

#[test]
fn metrics_count_cache_hits_and_leases() {
    let counters = counters_of(async {
        let policy = common::policy("fixed-window 100/day").with_name("api");
        let cache = RefusalCache::new(MemoryStorage::new());
        let leases = Leases::new(cache.clone(), 5);
        let limiter = RateLimiter::with_storage(policy, leases.clone());
        for _ in 0..110 {
            let _ = limiter.hit(&Key::from("alice")).await.unwrap();
        }
        assert_eq!((leases.local_decisions() + leases.misses() - cache.local_decisions(), cache.len()), (101, 1));
    });
    let counts = counters.counts();
    assert_eq!(counts.len(), 4, "{counts:?}");
    for counted in ["refusal_cache_total{policy=api,by=here} 9", "leases_total{policy=api,by=here} "] {
        assert!(counts.iter().any(|count| count.starts_with(&format!("ratelimit_{counted}"))), "{counts:?}");
    }
}

#[test]
fn metrics_have_labels_for_policy_and_outcome_but_not_for_the_key() {
    let counters = counters_of(async {
        let layer = layer("2/day; shadow 1/day").observer(metrics_observer());
        let charging = layer.clone().charge_when(|response| response.status != 200);
        let service = layer.layer(Inner::default());
        for client in ["alice", "alice", "alice", "bob"] {
            ask(&service, with("x-client", client)).await;
        }
        ask(&service, get("/")).await;
        ask(&charging.layer(Inner::default()), with("x-client", "carol")).await;
    });
    let counts = counters.counts();
    let shadow = "api\u{b7}shadow-1";
    assert_eq!(
        counts,
        [
            "ratelimit_decisions_total{policy=api,outcome=admitted,mode=enforced} 4".to_owned(),
            "ratelimit_decisions_total{policy=api,outcome=missing,mode=enforced} 1".to_owned(),
            "ratelimit_decisions_total{policy=api,outcome=refused,mode=enforced} 1".to_owned(),
            format!("ratelimit_decisions_total{{policy={shadow},outcome=admitted,mode=shadow}} 3"),
            format!("ratelimit_decisions_total{{policy={shadow},outcome=refused,mode=shadow}} 1"),
            "ratelimit_settled_units_total{policy=api,outcome=refunded,mode=enforced} 1".to_owned(),
            format!("ratelimit_settled_units_total{{policy={shadow},outcome=refunded,mode=shadow}} 1"),
            "ratelimit_settlements_total{policy=api,outcome=refunded,mode=enforced} 1".to_owned(),
            format!("ratelimit_settlements_total{{policy={shadow},outcome=refunded,mode=shadow}} 1"),
        ]
    );
}

#[test]
fn metrics_count_refunded_and_charged_units() {
    let counters = counters_of(async {
        let (storage, _) = FakeStorage::in_memory(Behavior::Works);
        let cost = |response: &ResponseHead<'_>| Some(u32::from(response.status.as_u16()));
        let service = layer("token-bucket 1000/day")
            .storage(storage.clone(), OnError::Refuse)
            .observer(metrics_observer())
            .cost(|head| head.uri().path()[1..].parse::<u32>().unwrap())
            .settle(cost)
            .layer(Inner::default());
        let of_cost = |cost: &str| http::Request::get(cost).header("x-client", "a").body(()).unwrap();
        for request in ["/150", "/230", "/230"] {
            ask(&service, of_cost(request)).await;
        }
        storage.set_changes(Behavior::Fails);
        ask(&service, of_cost("/195")).await;
    });
    let (policy, mode) = ("policy=api", "mode=enforced");
    let expected = [
        ("decisions", "admitted", 4),
        ("settled_units", "charged", 50),
        ("settled_units", "refunded", 60),
        ("settled_units", "settle_failed", 5),
        ("settlements", "charged", 1),
        ("settlements", "refunded", 2),
        ("settlements", "settle_failed", 1),
    ];
    let expected = expected
        .map(|(name, outcome, count)| format!("ratelimit_{name}_total{{{policy},outcome={outcome},{mode}}} {count}"));
    assert_eq!(counters.counts(), expected);
}

#[test]
fn gauge_counts_open_breakers() {
    let counters = Counters::default();
    metrics::with_local_recorder(&counters, || {
        let open = || {
            let gauge = counters.0.lock().unwrap().get("ratelimit_breakers_open").cloned();
            f64::from_bits(gauge.map_or(0, |gauge| gauge.load(Ordering::SeqCst))).to_string()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let key = Key::global();
            let primary = failing();
            let limiters = [primary.clone(), primary.clone()]
                .map(|primary| RateLimiter::with_storage(policy("1/day"), Breaker::new(primary).failures(1)));
            for (number, limiter) in limiters.iter().enumerate() {
                assert_eq!(open(), number.to_string());
                for _ in 0..3 {
                    assert!(limiter.hit(&key).await.is_err());
                }
            }
            assert_eq!(open(), "2");
            let [back, away] = limiters;
            primary.set(Behavior::Works);
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            assert!(back.hit(&key).await.is_ok());
            assert_eq!(open(), "1");
            drop(away);
            assert_eq!(open(), "0");
            drop(back);
        });
        assert_eq!(open(), "0");
    });
}

#[test]
fn metrics_count_decisions_by_source() {
    let counters = counters_of(async {
        let key = tower_ratelimit::Key::global();
        let good = RateLimiter::with_storage(policy("1/day"), Breaker::new(memory_with_manual_clock().0));
        let fallen = Breaker::new(failing()).fallback(memory_with_manual_clock().0, 2);
        let fallen = RateLimiter::with_storage(policy("1/day"), fallen);
        let bad = RateLimiter::with_storage(policy("1/day"), Breaker::new(failing()));
        for _ in 0..2 {
            let _ = good.hit(&key).await.unwrap();
        }
        for _ in 0..7 {
            let _ = fallen.hit(&key).await.unwrap();
        }
        for _ in 0..8 {
            assert!(bad.hit(&key).await.is_err());
        }
    });
    let counts = counters.0.into_inner().unwrap();
    let counts = counts.iter().filter(|(name, _)| name.contains("path"));
    let counts: Vec<_> = counts.map(|(name, count)| (name.as_str(), count.load(Ordering::SeqCst))).collect();
    let expected = [("path=fallback", 7), ("path=none", 8), ("path=primary", 2)];
    let expected = expected.map(|(label, count)| (format!("ratelimit_path_total{{{label}}}"), count));
    assert_eq!(counts, expected.each_ref().map(|(name, count)| (name.as_str(), *count)));
}

#[test]
fn failed_refund_is_reported_as_settle_failed() {
    for later in [false, true] {
        let outcomes = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::clone(&outcomes);
        let (storage, _) = FakeStorage::in_memory(Behavior::Works);
        storage.set_changes(if later { Behavior::Hangs } else { Behavior::Fails });
        let layer = layer("fixed-window 5/minute").storage(storage, OnError::Refuse);
        let service = layer
            .charge_when(|_| false)
            .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()))
            .layer(Inner::default());
        // Outside of a runtime no task can be spawned, so a pending refund fails.
        let mut response = Box::pin(ask(&service, with("x-client", "a")));
        assert!(poll(&mut response).is_ready());
        assert_eq!(*outcomes.lock().unwrap(), ["admitted", "settle_failed"], "later: {later}");
    }
}

#[tokio::test]
async fn free_requests_are_not_refunded() {
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&outcomes);
    let service = layer("5/minute; shadow 4/minute")
        .cost(|_| 0)
        .charge_when(|_| false)
        .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()))
        .layer(Inner::default());
    assert_eq!(status(&service, with("x-client", "a")).await, 200);
    assert_eq!(*outcomes.lock().unwrap(), ["admitted"]);
}

/// A node with a correct clock decides after a node whose clock is a year ahead.
#[test]
fn clock_that_is_too_far_ahead_is_always_counted_and_logged_once() {
    let key = Key::from("alice");
    let mut counts = Vec::new();
    let lines = log_of(|| {
        counts = counters_of(async {
            let (store, right) = (FakeCasStore::default(), ManualClock::default());
            let wrong = ManualClock::new(right.now().plus(31_536_000_000_000));
            let storage = |clock| Cas::new(store.clone()).timeout(std::time::Duration::from_secs(60)).clock(clock);
            let node = |clock| RateLimiter::with_storage(policy("9/day"), storage(clock));
            assert!(node(wrong.clone()).hit(&key).await.unwrap().is_admitted());
            let limiter = node(right);
            for _ in 0..3 {
                let _ = limiter.peek(&key).await.unwrap();
            }
        })
        .counts();
    });
    assert_eq!(counts, ["ratelimit_clock_skew_total{} 3"]);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("WARN ") && lines[0].contains("check NTP") && lines[0].contains("max_skew=5s"));
}

#[test]
fn hits_on_a_full_memory_storage_are_counted() {
    let counters = counters_of(async {
        for on_full in [OnFull::Refuse, OnFull::Admit] {
            let builder = MemoryStorage::builder().max_keys(1).on_full(on_full);
            let limiter = RateLimiter::with_storage(policy("fixed-window 1/day"), builder.build().unwrap());
            for client in 0..3_u64 {
                let _ = limiter.hit(&client.into()).await.unwrap();
            }
        }
    });
    let mut counts = counters.counts();
    counts.sort();
    assert_eq!(
        counts,
        ["ratelimit_memory_full_total{outcome=admitted} 2", "ratelimit_memory_full_total{outcome=refused} 2"]
    );
}

#[test]
fn calls_to_a_store_are_measured_by_outcome_and_counted_while_in_flight() {
    let counters = Counters::default();
    metrics::with_local_recorder(&counters, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let store = FakeCasStore::default();
            let limiter = RateLimiter::with_storage(policy("9/day"), Cas::new(store.clone()).metrics_label("mine"));
            let key = Key::from("alice");
            let _ = limiter.hit(&key).await.unwrap();
            let _ = limiter.peek(&key).await.unwrap();
            assert_eq!(counters.gauge("ratelimit_storage_in_flight mine"), 0);

            store.hang(true);
            let mut abandoned = Box::pin(limiter.hit(&key));
            assert!(poll(&mut abandoned).is_pending());
            assert_eq!(counters.gauge("ratelimit_storage_in_flight mine"), 1);
            drop(abandoned);
            assert_eq!(counters.gauge("ratelimit_storage_in_flight mine"), 0);
            assert!(limiter.hit(&key).await.unwrap_err().is_timeout());
        });
    });
    assert_eq!(
        counters.counts_of("_duration_seconds"),
        [
            "ratelimit_storage_duration_seconds{storage=mine,outcome=dropped} 1",
            "ratelimit_storage_duration_seconds{storage=mine,outcome=ok} 2",
            "ratelimit_storage_duration_seconds{storage=mine,outcome=timeout} 1",
        ]
    );
}

#[test]
fn metrics_report_keys_in_memory_and_evictions() {
    let counters = Counters::default();
    let evictions = || {
        let counters = counters.0.lock().unwrap();
        counters.get("ratelimit_memory_evictions_total{}").map_or(0, |count| count.load(Ordering::SeqCst))
    };
    let keys = || counters.gauge("ratelimit_memory_keys");
    metrics::with_local_recorder(&counters, || {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let other = LocalLimiter::new(policy("fixed-window 2/minute"));
        assert!(other.admit(&Key::from("alice")));
        let limiter = LocalLimiter::with_storage(policy("fixed-window 2/minute"), storage.clone());
        for client in 0..10_u64 {
            assert!(limiter.admit(&client.into()));
        }
        assert_eq!((keys(), evictions()), (11, 0), "a small number of keys is exact");
        for client in 10..1_500_u64 {
            assert!(limiter.admit(&client.into()));
        }
        let stats = storage.stats();
        assert_eq!((stats.keys, stats.evicted), (1_000, 500));
        assert!((900..=1_001).contains(&keys()), "{}", keys());
        assert!((450..=500).contains(&evictions()), "{}", evictions());

        clock.advance(std::time::Duration::from_secs(60));
        for _ in 0..20_000 {
            let _ = limiter.admit(&Key::from(0));
        }
        assert_eq!(storage.stats().evicted, 500, "expired keys are not evicted");
        assert_eq!((keys(), evictions()), (2, 500), "a sweep publishes everything");
        drop((limiter, storage, other));
    });
    assert_eq!(keys(), 0, "the keys of dropped storages are gone");
}

#[test]
fn metrics_count_near_limits_and_their_hits_once() {
    let counters = counters_of(async {
        let layer = RateLimitLayer::new(policy("fixed-window 5/day").with_name("api"), Header::new("x-client"));
        let service = layer.near_limit(0.8).observer(metrics_observer()).layer(Inner::default());
        for client in ["alice", "bob"].repeat(5) {
            ask(&service, with("x-client", client)).await;
        }
    });
    let expected = [
        "ratelimit_decisions_total{policy=api,outcome=admitted,mode=enforced} 10",
        "ratelimit_near_limit_total{policy=api,outcome=near_limit,mode=enforced} 2",
    ];
    assert_eq!(counters.counts(), expected);
}
