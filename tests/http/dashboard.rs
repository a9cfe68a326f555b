//! The Grafana dashboard beside the example `observe` queries only metrics that the library
//! exports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use common::fake_cas_store::FakeCasStore;
use common::{Behavior, FakeStorage, Inner, ask, failing, get, policy, with};
use metrics::{Counter, Gauge, Histogram, KeyName, Metadata, Recorder, SharedString, Unit};
use serde_json::Value;
use tower::Layer;
use tower_ratelimit::storage::{Breaker, Cas, Clock, Leases, ManualClock, OnFull, RefusalCache};
use tower_ratelimit::{
    Header, MemoryStorage, OnError, RateLimitLayer, RateLimiter, RedisStorage, Storage, metrics_observer,
};

const DASHBOARD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/observe/dashboard.json"));

/// Labels that Prometheus adds to each metric that it scrapes.
const SCRAPED: [&str; 2] = ["instance", "job"];

/// The values of each label of each metric, by the names in Prometheus's format.
#[derive(Debug, Default)]
struct Exported(Mutex<BTreeMap<String, BTreeMap<String, BTreeSet<String>>>>);

impl Exported {
    fn add(&self, name: &str, key: &metrics::Key) {
        let mut exported = self.0.lock().unwrap();
        let labels = exported.entry(name.to_owned()).or_default();
        for label in key.labels() {
            labels.entry(label.key().to_owned()).or_default().insert(label.value().to_owned());
        }
    }
}

impl Recorder for Exported {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &metrics::Key, _: &Metadata<'_>) -> Counter {
        self.add(key.name(), key);
        Counter::noop()
    }

    fn register_gauge(&self, key: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        self.add(key.name(), key);
        Gauge::noop()
    }

    fn register_histogram(&self, key: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        for suffix in ["bucket", "count", "sum"] {
            self.add(&format!("{}_{suffix}", key.name()), key);
        }
        let mut exported = self.0.lock().unwrap();
        let bucket = exported.get_mut(&format!("{}_bucket", key.name())).unwrap();
        bucket.entry("le".to_owned()).or_default();
        Histogram::noop()
    }
}

/// Runs everything that exports metrics.
async fn run() {
    async fn requests(storage: impl Storage, on_error: OnError) {
        let layer = RateLimitLayer::new(policy("2/day; shadow 1/day").with_name("api"), Header::new("x-client"));
        let layer = layer.storage(storage, on_error).observer(metrics_observer());
        let free = layer.clone().charge_when(|_| false).layer(Inner::default());
        let service = layer.layer(Inner::default());
        for client in ["alice", "alice", "alice", "bob"] {
            ask(&service, with("x-client", client)).await;
        }
        ask(&service, get("/")).await;
        ask(&free, with("x-client", "carol")).await;
    }
    async fn hits(limit: &str, storage: impl Storage) {
        let limiter = RateLimiter::with_storage(policy(limit), storage);
        for client in 0..9_u64 {
            for _ in 0..3 {
                let _ = limiter.hit(&(client % 3).into()).await;
            }
        }
    }
    requests(MemoryStorage::new(), OnError::Refuse).await;
    requests(failing(), OnError::Refuse).await;
    requests(failing(), OnError::Admit).await;
    requests(MemoryStorage::builder().max_keys(1).build().unwrap(), OnError::Refuse).await;
    let raced = FakeCasStore::default();
    raced.lose(u64::MAX);
    requests(Cas::new(raced), OnError::Refuse).await;
    let (storage, _) = FakeStorage::in_memory(Behavior::Works);
    storage.set_changes(Behavior::Fails);
    requests(storage, OnError::Refuse).await;
    let queue =
        RateLimitLayer::new(policy("leaky-bucket 4/second queue 5").with_name("queue"), Header::new("x-client"));
    let queue = queue.observer(metrics_observer()).layer(Inner::default());
    tokio::join!(ask(&queue, with("x-client", "dave")), ask(&queue, with("x-client", "dave")));

    hits("fixed-window 99/day", Leases::new(RefusalCache::new(MemoryStorage::new()), 5)).await;
    hits("fixed-window 1/day", RefusalCache::new(MemoryStorage::new())).await;
    hits("1/day", Breaker::new(MemoryStorage::new())).await;
    hits("9/day", Breaker::new(failing()).failures(1).fallback(MemoryStorage::new(), 3)).await;
    hits("1/day", Breaker::new(failing()).failures(1)).await;
    for (limit, on_full) in [("1/day", OnFull::Refuse), ("1/day", OnFull::Admit), ("9/day", OnFull::Refuse)] {
        hits(limit, MemoryStorage::builder().max_keys(1).on_full(on_full).build().unwrap()).await;
    }
    hits("9/day", RedisStorage::new("redis://127.0.0.1:1").unwrap()).await;
    let (store, clock) = (FakeCasStore::default(), ManualClock::default());
    let ahead = ManualClock::new(clock.now().plus(31_536_000_000_000));
    hits("99/day", Cas::new(store.clone()).clock(ahead)).await;
    hits("99/day", Cas::new(store).clock(clock)).await;
}

/// Returns the names and label values that the library exports.
fn exported() -> BTreeMap<String, BTreeMap<String, BTreeSet<String>>> {
    let exported = Exported::default();
    metrics::with_local_recorder(&exported, || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run());
    });
    exported.0.into_inner().unwrap()
}

/// A metric in a query, with its matchers: a label, and the values that it is compared with.
#[derive(Debug)]
struct Selector<'a> {
    name: &'a str,
    matchers: Vec<(&'a str, Vec<&'a str>)>,
}

fn selectors(query: &str) -> Vec<Selector<'_>> {
    let starts = query.match_indices("ratelimit_").map(|(at, _)| at);
    starts
        .map(|at| {
            let rest = &query[at..];
            let (name, rest) =
                rest.split_at(rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len()));
            let inside = rest.strip_prefix('{').map_or("", |rest| rest.split('}').next().unwrap());
            let matchers = inside.split(',').filter(|matcher| !matcher.is_empty());
            Selector { name, matchers: matchers.map(matcher).collect() }
        })
        .collect()
}

fn matcher(text: &str) -> (&str, Vec<&str>) {
    let (label, rest) = text.split_at(text.find(['=', '!']).unwrap());
    let values = rest.trim_start_matches(['=', '!', '~']).trim_matches('"');
    (label, values.split('|').collect())
}

/// The labels in all `by (..)` of a query.
fn grouped(query: &str) -> BTreeSet<&str> {
    let groups = query.split("by (").skip(1).map(|rest| rest.split(')').next().unwrap());
    groups.flat_map(|labels| labels.split(", ")).collect()
}

/// All queries with their legends.
fn queries(dashboard: &Value) -> Vec<(&str, &str)> {
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap())).collect()
}

#[test]
fn every_query_names_exported_metrics_and_labels() {
    let (exported, dashboard) = (exported(), serde_json::from_str(DASHBOARD).unwrap());
    for (query, legend) in queries(&dashboard) {
        let selectors = selectors(query);
        assert!(!selectors.is_empty(), "no metric: {query}");
        for Selector { name, matchers } in &selectors {
            let labels = exported.get(*name).unwrap_or_else(|| panic!("{name} is not exported: {query}"));
            for label in grouped(query) {
                assert!(SCRAPED.contains(&label) || labels.contains_key(label), "{name} has no label {label}: {query}");
            }
            for (label, values) in matchers.iter().filter(|(label, _)| !SCRAPED.contains(label)) {
                let known = labels.get(*label).unwrap_or_else(|| panic!("{name} has no label {label}: {query}"));
                for value in values {
                    assert!(known.contains(*value), "{name} is never exported with {label}={value}, only {known:?}");
                }
            }
        }
        for label in legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap()) {
            assert!(grouped(query).contains(label), "the legend {legend:?} names a label that {query} removes");
        }
    }
}

#[test]
fn dashboard_shows_every_metric() {
    let dashboard = serde_json::from_str(DASHBOARD).unwrap();
    let queries = queries(&dashboard);
    let shown: BTreeSet<&str> = queries.iter().flat_map(|(query, _)| selectors(query)).map(|one| one.name).collect();
    for name in exported().keys().filter(|name| !name.ends_with("_sum")) {
        assert!(shown.contains(name.as_str()), "no panel shows {name}");
    }
}

#[test]
fn labels_have_few_values_and_never_a_key() {
    for (name, labels) in exported() {
        for (label, values) in labels {
            assert!(values.len() <= 12, "{name} {label}: {values:?}");
            let clients = ["alice", "bob", "carol", "dave"];
            assert!(!values.iter().any(|value| clients.iter().any(|client| value.contains(client))), "{name} {label}");
        }
    }
}
