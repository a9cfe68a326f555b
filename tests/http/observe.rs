//! Observers, metrics, the log and lints.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::fake_cas_store::FakeCasStore;
use common::{
    Behavior, FAILURE, FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, policy, poll, status, with,
};
use http::Request;
use metrics::{Counter, Gauge, Histogram, KeyName, Metadata, Recorder, SharedString, Unit};
use tower::Layer;
use tower_ratelimit::extract::{AllowList, Head, Missing};
use tower_ratelimit::storage::{Breaker, Cas, Clock, Leases, ManualClock, OnFull, RefusalCache};
use tower_ratelimit::{
    ClientIp, Event, Global, Header, Key, KeyExtractor, Lint, MemoryStorage, MetricsObserver, Observer, OnError,
    PeerIp, Policy, RateLimitLayer, RateLimiter, ResponseHead, Skip, What,
};
use tracing::field::{Field, Visit};
use tracing::span;

fn layer(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text).with_name("api"), Header::new("x-client"))
        .storage(memory_with_manual_clock().0, OnError::Refuse)
}

#[tokio::test]
async fn observer_gets_key_and_policy_of_each_decision() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    let observer = move |event: &Event<'_>| {
        let numbers = match event.what {
            What::Decided(decision) => decision.remaining().to_string(),
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
        (api.clone(), "crowded", key('b'), "0".to_owned()),
        (api, "missing", None, "-".to_owned()),
    ];
    assert_eq!(*told.lock().unwrap(), expected);
}

#[tokio::test]
async fn observer_gets_failures_with_their_outcome() {
    for (on_error, expected) in [(OnError::Admit, "failed_open"), (OnError::Refuse, "failed_closed")] {
        let told = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::clone(&told);
        let observer = move |event: &Event<'_>| {
            let What::Failed { error, .. } = event.what else { panic!("{event:?}") };
            events.lock().unwrap().push((event.outcome(), error.to_string()));
        };
        let service = layer("1/day").storage(failing(), on_error).observer(observer).layer(Inner::default());
        status(&service, with("x-client", "a")).await;
        assert_eq!(*told.lock().unwrap(), [(expected, FAILURE.to_owned())]);
    }
}

/// Keeps counters by their names and labels, and gauges as the bits of their numbers.
#[derive(Default)]
struct Counters(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

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
        assert_eq!(key.labels().len(), 0);
        Gauge::from_arc(Arc::clone(self.0.lock().unwrap().entry(key.name().to_owned()).or_default()))
    }

    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        panic!("no histograms")
    }
}

impl Counters {
    fn counts(self) -> Vec<String> {
        let counters = self.0.into_inner().unwrap();
        counters.into_iter().map(|(name, count)| format!("{name} {}", count.load(Ordering::SeqCst))).collect()
    }
}

/// Runs `work` on a runtime of its own and returns what it counted.
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
        let storage = Leases::new(RefusalCache::new(MemoryStorage::new()), 5);
        let limiter = RateLimiter::with_storage(policy, storage);
        for _ in 0..110 {
            let _ = limiter.hit(&Key::from("alice")).await.unwrap();
        }
        let (leases, cache) = (limiter.storage(), limiter.storage().inner());
        assert_eq!((leases.answered() + leases.asked() - cache.answered(), cache.held()), (101, 1));
    });
    let counts = counters.counts();
    assert_eq!(counts.len(), 4, "{counts:?}");
    for counted in ["refusal_cache_total{policy=api,by=here} 9", "leases_total{policy=api,by=here} "] {
        assert!(counts.iter().any(|count| count.starts_with(&format!("ratelimit_{counted}"))), "{counts:?}");
    }
}

#[test]
fn metrics_count_by_policy_and_outcome_and_never_by_key() {
    let counters = counters_of(async {
        let layer = layer("2/day; shadow 1/day").observer(MetricsObserver::new());
        let charging = layer.clone().charge_when(|response: &ResponseHead<'_>| response.status != 200);
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
            "ratelimit_refunds_total{policy=api,outcome=refunded,mode=enforced} 1".to_owned(),
            format!("ratelimit_refunds_total{{policy={shadow},outcome=refunded,mode=shadow}} 1"),
        ]
    );
}

/// The log of an outage has the failures that opened the breaker and its opening, but no line per
/// request after that.
#[test]
fn an_outage_does_not_flood_the_log() {
    let lines = log_of(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let hour = std::time::Duration::from_secs(3_600);
            let storage = RefusalCache::new(Breaker::new(failing()).failures(2).probe_after(hour, hour));
            let layer = RateLimitLayer::new(policy("1/day"), Header::new("x-client"));
            let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
            for _ in 0..20 {
                assert_eq!(status(&service, with("x-client", "a")).await, 503);
            }
        });
    });
    let of =
        |level: &str, what: &str| lines.iter().filter(|line| line.starts_with(level) && line.contains(what)).count();
    assert_eq!((of("WARN", "the rate limit storage failed"), of("WARN", "left alone for now")), (2, 1), "{lines:?}");
    assert_eq!((of("DEBUG", "was not asked"), of("WARN", "")), (18, 3), "{lines:?}");
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
            let key = Key::everybody();
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
fn metrics_count_which_of_two_storages_decided() {
    let counters = counters_of(async {
        let key = tower_ratelimit::Key::everybody();
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

/// Keeps the events of this crate as lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

/// The lines that are logged meanwhile. Where there is one subscriber, an event that is met first
/// on a thread without it is taken for one that nobody wants; so there are two.
fn log_of(work: impl FnOnce()) -> Vec<String> {
    let (log, _another) = (Log::default(), tracing::Dispatch::new(Log::default()));
    tracing::subscriber::with_default(log.clone(), work);
    let lines = log.0.lock().unwrap();
    lines.clone()
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("tower_ratelimit")
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = event.metadata().level().to_string();
        event.record(&mut Fields(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        panic!("no spans")
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

/// What is logged while requests go through a layer.
fn logged<R, St>(layer: &RateLimitLayer<St, R>, requests: Vec<Request<()>>) -> Vec<String>
where
    St: tower_ratelimit::Storage,
    R: tower_ratelimit::Rejection<String>,
{
    log_of(|| {
        let service = layer.layer(Inner::default());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for request in requests {
            runtime.block_on(ask(&service, request));
        }
    })
}

#[test]
fn the_log_names_refusals_at_debug_and_storage_trouble_at_warn_and_no_keys() {
    let alice = || with("x-client", "alice@example.org");
    let layer = layer("fixed-window 1/minute");
    let lines = logged(&layer, vec![alice(), alice(), get("/")]);
    assert_eq!(lines.len(), 2, "nothing about what is admitted: {lines:?}");
    for part in ["DEBUG", "refused", "policy=\"api\"", "60s"] {
        assert!(lines[0].contains(part), "{part}: {lines:?}");
    }
    assert!(lines[1].contains("DEBUG") && lines[1].contains("x-client"), "{lines:?}");
    assert!(!lines.concat().contains("alice"), "{lines:?}");

    let lines = logged(&layer.clone().log_keys(), vec![alice()]);
    assert!(lines[0].contains("alice@example.org"), "asked for: {lines:?}");
    let forged = || with("x-client", "a shadow=true outcome=admitted \"");
    let lines = logged(&layer.clone().log_keys(), vec![forged(), forged()]);
    assert!(lines[0].contains("key=\"ta shadow=true outcome=admitted"), "in quotes: {lines:?}");

    let lines = logged(&layer.storage(failing(), OnError::Admit), vec![alice()]);
    assert!(lines[0].contains("WARN") && lines[0].contains(FAILURE), "{lines:?}");
    assert!(!lines.concat().contains("alice"), "{lines:?}");

    let broken = |_: &Head<'_>| -> Result<tower_ratelimit::Key, Missing> { Err(Missing::server("no table")) };
    let lines = logged(&RateLimitLayer::new(policy("1/day"), broken), vec![get("/")]);
    assert!(lines[0].contains("ERROR") && lines[0].contains("no table"), "{lines:?}");
}

#[test]
fn breaker_logs_when_it_opens_and_closes() {
    let lines = log_of(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (primary, _) = FakeStorage::in_memory(Behavior::Fails);
            let breaker = Breaker::new(primary.clone()).fallback(memory_with_manual_clock().0, 2);
            let limiter = RateLimiter::with_storage(policy("100/day"), breaker);
            for _ in 0..50 {
                let _ = limiter.hit(&tower_ratelimit::Key::everybody()).await.unwrap();
            }
            primary.set(Behavior::Works);
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let _ = limiter.hit(&tower_ratelimit::Key::everybody()).await.unwrap();
        });
    });
    let [left_alone, back] = &lines[..] else { panic!("once each: {lines:?}") };
    for part in ["WARN", "left alone", "failures=5", FAILURE] {
        assert!(left_alone.contains(part), "{part}: {lines:?}");
    }
    assert!(back.contains("INFO") && back.contains("back"), "{lines:?}");
}

/// Keeps the lints it is told.
#[derive(Clone, Default)]
struct Linted(Arc<Mutex<Vec<Lint>>>);

impl Observer for Linted {
    fn observe(&self, _: &Event<'_>) {}

    fn warn(&self, lint: Lint) {
        self.0.lock().unwrap().push(lint);
    }
}

impl Linted {
    fn layer(&self, key: impl KeyExtractor) -> RateLimitLayer {
        RateLimitLayer::new(Policy::from(tower_ratelimit::Quota::per_day(5)), key).observer(self.clone())
    }

    fn told(&self) -> Vec<Lint> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn forwarded(name: &str) -> Request<()> {
    let mut request = with(name, "203.0.113.7");
    request.extensions_mut().insert(SocketAddr::from(([10, 0, 0, 1], 80)));
    request
}

#[tokio::test]
async fn ipv6_prefix_lint_is_reported_once() {
    let linted = Linted::default();
    for (prefix, expected) in
        [(48, vec![]), (64, vec![]), (65, vec![Lint::Ipv6PerAddress]), (128, vec![Lint::Ipv6PerAddress])]
    {
        let layer = linted.layer(Header::new("x-client").or(Global.and(PeerIp::new().ipv6_prefix(prefix))));
        for _ in 0..3 {
            let _ = layer.clone().layer(Inner::default());
        }
        assert_eq!(linted.told(), expected, "/{prefix}");
    }
}

#[tokio::test]
async fn trusts_every_address_lint_is_reported_once() {
    for (trusted, expected) in [
        (&["10.0.0.0/8"][..], vec![]),
        (&["0.0.0.0/0"], vec![Lint::TrustsEveryAddress]),
        (&["10.0.0.0/8", "::/0"], vec![Lint::TrustsEveryAddress]),
        (&["0.0.0.0/1", "128.0.0.0/1"], vec![Lint::TrustsEveryAddress]),
    ] {
        let linted = Linted::default();
        let layer = linted.layer(ClientIp::behind(trusted).unwrap().and(Global));
        for _ in 0..3 {
            ask(&layer.layer(Inner::default()), forwarded("x-forwarded-for")).await;
        }
        assert_eq!(linted.told(), expected, "{trusted:?}");
    }
    let linted = Linted::default();
    let _ = linted.layer(ClientIp::behind_hops(1).ipv6_prefix(128)).layer(Inner::default());
    assert_eq!(linted.told(), [Lint::Ipv6PerAddress]);
}

#[tokio::test]
async fn forwarded_peer_lint_is_reported_once() {
    for name in ["x-forwarded-for", "forwarded", "x-real-ip", "cf-connecting-ip"] {
        let linted = Linted::default();
        let service = linted.layer(PeerIp::new()).layer(Inner::default());
        let mut direct = get("/");
        direct.extensions_mut().insert(SocketAddr::from(([10, 0, 0, 1], 80)));
        ask(&service, direct).await;
        assert_eq!(linted.told(), []);
        for _ in 0..3 {
            ask(&service, forwarded(name)).await;
        }
        assert_eq!(linted.told(), [Lint::ForwardedPeer], "{name}");
        let other = linted.layer(Header::new(name)).layer(Inner::default());
        ask(&other, forwarded(name)).await;
        assert_eq!(linted.told(), [], "{name} is the key");
    }
}

#[tokio::test]
async fn same_layer_twice_lint_is_reported_once() {
    let linted = Linted::default();
    let layer = linted.layer(Global);
    let twice = layer.layer(layer.clone().layer(Inner::default()));
    for _ in 0..2 {
        ask(&twice, get("/")).await;
    }
    assert_eq!(linted.told(), [Lint::SameLayerTwice]);

    let [outer, inner] = [linted.layer(Global), linted.layer(Global)];
    let stacked = outer.layer(inner.layer(Inner::default()));
    for _ in 0..2 {
        ask(&stacked, get("/")).await;
    }
    assert_eq!(linted.told(), [], "two layers are two layers");
}

#[tokio::test]
async fn small_storage_lint_is_reported_once_with_the_number_of_clients() {
    for (text, max_bytes, clients) in [
        ("moving-window 10000/day", 128_000_000, Some(900..1_100)),
        ("moving-window 10000/day", 2_000_000_000, None),
        ("fixed-window 10000/day", 128_000_000, None),
        ("fixed-window 10000/day", 80_000, Some(2_000..2_001)),
    ] {
        let storage = MemoryStorage::builder().max_bytes(max_bytes).build().unwrap();
        let linted = Linted::default();
        let with_storage = RateLimitLayer::with_storage(policy(text), Global, storage.clone());
        let set_later = RateLimitLayer::new(policy(text), Global).storage(storage, OnError::Refuse);
        for layer in [with_storage, set_later] {
            let layer = layer.observer(linted.clone());
            for _ in 0..2 {
                let _ = layer.clone().layer(Inner::default());
            }
            match (&linted.told()[..], &clients) {
                ([], None) => {}
                ([Lint::SmallStorage { clients: told }], Some(clients)) => {
                    assert!(clients.contains(told), "{text}: {told}")
                }
                (told, _) => panic!("{text} on {max_bytes} bytes: {told:?}"),
            }
        }
    }
    let lint = Lint::SmallStorage { clients: 980 };
    assert_eq!((lint.code(), lint.to_string().starts_with("980 clients")), ("RL005", true));
    assert!(lint.docs().ends_with("#variant.SmallStorage"));
}

#[test]
fn hits_without_room_are_counted() {
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

#[tokio::test]
async fn lints_are_reported_once_and_only_if_they_apply() {
    let linted = Linted::default();
    let all = ClientIp::behind(["0.0.0.0/0"]).unwrap().ipv6_prefix(128);
    let _ = linted.layer(all.clone().or(PeerIp::new().ipv6_prefix(128))).layer(Inner::default());
    assert_eq!(linted.told(), [Lint::Ipv6PerAddress, Lint::TrustsEveryAddress], "each once");

    let _ = linted.layer(Global).skip(AllowList::by(all).allow("10.0.0.0/8")).layer(Inner::default());
    assert_eq!(linted.told(), [Lint::TrustsEveryAddress], "who may say where it is from may say it is allowed");

    for key in [
        Box::new(ClientIp::behind(["10.0.0.0/8"]).unwrap().or(PeerIp::new())) as Box<dyn KeyExtractor>,
        Box::new(Header::new("x-forwarded-for").or(PeerIp::new())),
    ] {
        ask(&linted.layer(key).layer(Inner::default()), forwarded("x-forwarded-for")).await;
        assert_eq!(linted.told(), [], "the header is read");
    }
    ask(&linted.layer(Header::new("x-api-key").or(PeerIp::new())).layer(Inner::default()), forwarded("forwarded"))
        .await;
    assert_eq!(linted.told(), [Lint::ForwardedPeer], "for those without a key");

    let skipping = linted.layer(PeerIp::new()).skip(|_: &Head<'_>| true);
    let twice = skipping.layer(skipping.layer(Inner::default()));
    ask(&twice, forwarded("forwarded")).await;
    assert_eq!(linted.told(), [], "what is not limited is charged to nobody");
}

#[test]
fn failed_refund_is_reported_as_not_refunded() {
    for later in [false, true] {
        let told = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::clone(&told);
        let (storage, _) = FakeStorage::in_memory(Behavior::Works);
        storage.set_changes(if later { Behavior::Hangs } else { Behavior::Fails });
        let layer = layer("fixed-window 5/minute").storage(storage, OnError::Refuse);
        let service = layer
            .charge_when(|_: &ResponseHead<'_>| false)
            .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()))
            .layer(Inner::default());
        // Outside of a runtime nobody can wait for what does not come at once.
        let mut response = Box::pin(ask(&service, with("x-client", "a")));
        assert!(poll(&mut response).is_ready());
        assert_eq!(*told.lock().unwrap(), ["admitted", "not_refunded"], "later: {later}");
    }
}

#[tokio::test]
async fn free_requests_are_not_refunded() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&told);
    let service = layer("5/minute; shadow 4/minute")
        .cost(|_: &Head<'_>| 0)
        .charge_when(|_: &ResponseHead<'_>| false)
        .observer(move |event: &Event<'_>| events.lock().unwrap().push(event.outcome()))
        .layer(Inner::default());
    assert_eq!(status(&service, with("x-client", "a")).await, 200);
    assert_eq!(*told.lock().unwrap(), ["admitted"]);
}

#[tokio::test]
async fn one_observer_may_watch_several_layers() {
    let linted: Arc<dyn Observer> = Arc::new(Linted::default());
    let skip: Arc<dyn Skip> = Arc::new(|_: &Head<'_>| false);
    let [one, two] = ["1/day", "2/day"].map(|text| layer(text).observer(Arc::clone(&linted)).skip(Arc::clone(&skip)));
    let service = one.layer(two.layer(Inner::default()));
    assert_eq!(status(&service, with("x-client", "a")).await, 200);
}

#[test]
fn lint_is_logged_as_a_warning_with_code_and_link() {
    let key = PeerIp::new().ipv6_prefix(128);
    let lines = logged(&RateLimitLayer::new(policy("1/day"), key), vec![forwarded("x-forwarded-for")]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, code, anchor) in
        [(&lines[0], "RL001", "variant.Ipv6PerAddress"), (&lines[1], "RL003", "variant.ForwardedPeer")]
    {
        assert!(line.contains("WARN") && line.contains(code) && line.contains(anchor), "{line}");
    }
    let lints = [Lint::Ipv6PerAddress, Lint::TrustsEveryAddress, Lint::ForwardedPeer, Lint::SameLayerTwice];
    for lint in lints {
        assert!(lint.docs().ends_with(&format!("#variant.{lint:?}")), "{lint:?}");
    }
}

/// A node whose clock is right, after a hit of a node in another year.
#[test]
fn clock_that_is_too_far_ahead_is_counted_and_warned_of_once() {
    let key = Key::from("alice");
    let mut counts = Vec::new();
    let lines = log_of(|| {
        counts = counters_of(async {
            let (store, right) = (FakeCasStore::default(), ManualClock::default());
            let wrong = ManualClock::new(right.now().plus(31_536_000_000_000));
            let node = |clock| RateLimiter::with_storage(policy("9/day"), Cas::new(store.clone()).clock(clock));
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
