//! Policies that are looked up asynchronously.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Inner, ask, get, policy, slow, status, with};
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{HeaderValue, Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::Layer;
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::{
    Event, EventKind, Header, Key, LivePolicy, LookupError, MemoryStorage, OnError, Policy, PolicyLookup,
    RateLimitLayer, Tenant,
};

type Lookup = PolicyLookup<HeaderValue>;

/// A database of tenants that counts its queries.
#[derive(Clone)]
struct Database(Arc<State>);

struct State {
    plans: Mutex<BTreeMap<&'static str, &'static str>>,
    behavior: Mutex<Behavior>,
    queries: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
}

#[derive(Clone, Copy)]
enum Behavior {
    Works,
    Fails,
    Hangs,
    Panics,
}

const QUERY: Duration = Duration::from_millis(10);

struct InFlight<'a>(&'a AtomicUsize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Database {
    fn new() -> Self {
        Self(Arc::new(State {
            plans: Mutex::new(BTreeMap::from([("a", "5/hour"), ("b", "7/hour")])),
            behavior: Mutex::new(Behavior::Works),
            queries: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
        }))
    }

    fn set(&self, behavior: Behavior) {
        *self.0.behavior.lock().unwrap() = behavior;
    }

    fn plan(&self, tenant: &'static str, plan: &'static str) {
        self.0.plans.lock().unwrap().insert(tenant, plan);
    }

    fn queries(&self) -> usize {
        self.0.queries.swap(0, Ordering::SeqCst)
    }

    async fn query(&self, tenant: HeaderValue) -> Result<Option<Policy>, &'static str> {
        self.0.queries.fetch_add(1, Ordering::SeqCst);
        let in_flight = self.0.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most_in_flight.fetch_max(in_flight, Ordering::SeqCst);
        let _in_flight = InFlight(&self.0.in_flight);
        sleep(QUERY).await;
        let behavior = *self.0.behavior.lock().unwrap();
        match behavior {
            Behavior::Works => {}
            Behavior::Fails => return Err("the database is down"),
            Behavior::Hangs => pending().await,
            Behavior::Panics => panic!("a bug in the look-up"),
        }
        let plans = self.0.plans.lock().unwrap();
        Ok(plans.get(tenant.to_str().unwrap()).map(|plan| policy(plan).with_name(tenant.to_str().unwrap())))
    }

    fn lookup(&self) -> Lookup {
        let database = self.clone();
        PolicyLookup::new(tenant_of, move |tenant| {
            let database = database.clone();
            async move { database.query(tenant).await }
        })
    }
}

fn tenant_of(head: &Head<'_>) -> Result<Option<HeaderValue>, KeyError> {
    match head.headers.get("x-tenant") {
        Some(tenant) if tenant.is_empty() => Ok(None),
        Some(tenant) => Ok(Some(tenant.clone())),
        None => Err(KeyError::unauthorized("send x-tenant")),
    }
}

fn layer(lookup: Lookup) -> RateLimitLayer {
    RateLimitLayer::new(lookup, Header::new("x-tenant"))
}

fn from(tenant: &str) -> Request<()> {
    with("x-tenant", tenant)
}

fn limit<B>(response: &Response<B>) -> Option<&str> {
    Some(response.headers().get("x-ratelimit-limit")?.to_str().unwrap())
}

#[tokio::test(start_paused = true)]
async fn policy_is_looked_up_once_for_many_requests() {
    let database = Database::new();
    let inner = Inner::default();
    let service = layer(database.lookup()).layer(inner.clone());
    let responses = join_all((0..100).map(|i| ask(&service, from(if i % 2 == 0 { "a" } else { "b" })))).await;
    assert_eq!(database.queries(), 2);
    assert_eq!(inner.calls(), 5 + 7);
    for (i, response) in responses.iter().enumerate() {
        assert_eq!(limit(response), Some(if i % 2 == 0 { "5" } else { "7" }));
    }
    assert_eq!(status(&service, from("a")).await, 429);
    assert_eq!(database.queries(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_requests_on_threads_share_one_look_up() {
    let database = Database::new();
    let service = layer(database.lookup()).layer(Inner::default());
    let requests = (0..200).map(|_| {
        let service = service.clone();
        tokio::spawn(async move { status(&service, from("a")).await })
    });
    let statuses = join_all(requests.collect::<Vec<_>>()).await;
    assert_eq!(database.queries(), 1);
    assert_eq!(statuses.into_iter().filter(|status| *status.as_ref().unwrap() == 200).count(), 5);
}

#[tokio::test(start_paused = true)]
async fn result_is_looked_up_again_after_its_time_to_live() {
    let database = Database::new();
    let service = layer(database.lookup().ttl(Duration::from_secs(10))).layer(Inner::default());
    assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
    database.plan("a", "50/hour");
    sleep(Duration::from_secs(9)).await;
    assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
    sleep(Duration::from_secs(1)).await;
    let responses = join_all((0..10).map(|_| ask(&service, from("a")))).await;
    assert!(responses.iter().all(|response| limit(response) == Some("50")));
    assert_eq!(database.queries(), 2);
}

#[tokio::test(start_paused = true)]
async fn last_good_result_is_used_while_look_ups_fail() {
    for behavior in [Behavior::Fails, Behavior::Hangs, Behavior::Panics] {
        let database = Database::new();
        let lookup = database.lookup().ttl(Duration::from_secs(10));
        let service = layer(lookup).layer(Inner::default());
        assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
        database.set(behavior);
        database.queries();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
        // From now on no request waits, and there is at most one look-up per second.
        for _ in 0..100 {
            let asked = Instant::now();
            assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
            assert_eq!(asked.elapsed(), Duration::ZERO);
            sleep(Duration::from_millis(100)).await;
        }
        let queries = database.queries();
        assert!((4..=12).contains(&queries), "{queries}");

        database.set(Behavior::Works);
        database.plan("a", "50/hour");
        sleep(Duration::from_secs(3)).await;
        let _ = ask(&service, from("a")).await;
        sleep(Duration::from_secs(2)).await;
        assert_eq!(limit(&ask(&service, from("a")).await), Some("50"));
    }
}

#[tokio::test(start_paused = true)]
async fn on_error_applies_if_nothing_is_cached() {
    for behavior in [Behavior::Fails, Behavior::Hangs, Behavior::Panics] {
        for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
            let database = Database::new();
            database.set(behavior);
            let inner = Inner::default();
            let errors = Arc::new(Mutex::new(Vec::new()));
            let seen = Arc::clone(&errors);
            let layer = layer(database.lookup()).storage(MemoryStorage::new(), on_error);
            let service = layer
                .observer(move |event: &Event<'_>| {
                    let EventKind::Failed { error, admitted } = event.kind else { panic!("{event:?}") };
                    let error = error.downcast_ref::<LookupError>().unwrap();
                    let source = std::error::Error::source(error).map(ToString::to_string);
                    seen.lock().unwrap().push((error.to_string(), error.is_timeout(), source, admitted));
                })
                .layer(inner.clone());
            let responses = join_all((0..3).map(|_| ask(&service, from("a")))).await;
            assert_eq!(database.queries(), 1);
            for response in responses {
                assert_eq!(response.status(), expected);
                assert_eq!(limit(&response), None);
                assert_eq!(response.headers().contains_key("retry-after"), expected == 503);
            }
            assert_eq!(inner.calls(), if expected == 200 { 3 } else { 0 });
            let (text, is_timeout, source) = match behavior {
                Behavior::Hangs => ("cannot look up the policy: no result within 1s", true, None),
                Behavior::Panics => {
                    ("cannot look up the policy: the look-up panicked, or its runtime has ended", false, None)
                }
                _ => ("cannot look up the policy", false, Some("the database is down")),
            };
            let expected = (text.to_owned(), is_timeout, source.map(str::to_owned), on_error == OnError::Admit);
            assert_eq!(*errors.lock().unwrap(), vec![expected; 3]);
            // The failure is not cached.
            database.set(Behavior::Works);
            assert_eq!(database.queries(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn tenants_without_a_policy_and_requests_without_an_id_are_not_limited() {
    let database = Database::new();
    let service = layer(database.lookup()).layer(Inner::default());
    for _ in 0..20 {
        assert_eq!(limit(&ask(&service, from("unknown")).await), None);
    }
    assert_eq!(database.queries(), 1, "an unlimited tenant is cached");
    assert_eq!(status(&service, from("")).await, 200);
    assert_eq!(status(&service, get("/")).await, 401);
    assert_eq!(database.queries(), 0);
}

#[tokio::test(start_paused = true)]
async fn look_up_can_set_the_key_or_reject_the_request() {
    let lookup = PolicyLookup::new(tenant_of, |api_key: HeaderValue| async move {
        Ok::<_, Infallible>(match api_key.as_bytes() {
            b"first" | b"second" => Tenant::from(policy("2/hour")).key(Key::from(7_u64)),
            b"other" => Tenant::from(policy("2/hour")),
            _ => Tenant::from(KeyError::unauthorized("unknown API key")),
        })
    });
    let service = layer(lookup).layer(Inner::default());
    assert_eq!(status(&service, from("first")).await, 200);
    assert_eq!(status(&service, from("second")).await, 200);
    assert_eq!(status(&service, from("first")).await, 429);
    assert_eq!(status(&service, from("other")).await, 200);
    let rejected = ask(&service, from("invented")).await;
    assert_eq!(
        (rejected.status(), &rejected.headers()["www-authenticate"]),
        (StatusCode::UNAUTHORIZED, &"Bearer".parse::<HeaderValue>().unwrap())
    );
}

#[tokio::test(start_paused = true)]
async fn cached_live_policy_follows_its_changes() {
    let live = LivePolicy::new(policy("2/hour").with_name("plan"));
    let plan = live.clone();
    let lookup = PolicyLookup::new(tenant_of, move |_| {
        let plan = plan.clone();
        async move { Ok::<_, Infallible>(plan) }
    });
    let service = layer(lookup).layer(Inner::default());
    assert_eq!(limit(&ask(&service, from("a")).await), Some("2"));
    live.set(policy("3/hour").with_name("plan")).unwrap();
    assert_eq!(limit(&ask(&service, from("a")).await), Some("3"));
}

#[tokio::test(start_paused = true)]
async fn cache_is_bounded_and_keeps_the_ids_in_use() {
    let database = Database::new();
    let service = layer(database.lookup().max_tenants(100)).layer(Inner::default());
    for i in 0..2_000 {
        let _ = status(&service, from("a")).await;
        let _ = status(&service, from(&format!("flood-{i}"))).await;
    }
    let queries = database.queries();
    assert!((2_001..2_020).contains(&queries), "\"a\" is used often and stays: {queries}");
    for i in 0..2_000 {
        let _ = status(&service, from(&format!("flood-{i}"))).await;
    }
    let queries = database.queries();
    assert!(queries > 1_800, "at most 100 ids are cached: {queries}");
}

#[tokio::test(start_paused = true)]
async fn look_ups_in_flight_are_bounded() {
    let database = Database::new();
    let lookup = database.lookup().max_lookups(3).timeout(Duration::from_millis(35));
    let service = layer(lookup).storage(MemoryStorage::new(), OnError::Refuse).layer(Inner::default());
    let tenants: Vec<_> = (0..30).map(|i| i.to_string()).collect();
    let statuses = join_all(tenants.iter().map(|tenant| status(&service, from(tenant)))).await;
    assert_eq!(database.0.most_in_flight.load(Ordering::SeqCst), 3);
    // Three rounds of three look-ups fit into the timeout.
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 9);
    assert_eq!(statuses.iter().filter(|status| **status == 503).count(), 21);
}

#[tokio::test(start_paused = true)]
async fn dropped_request_spends_nothing_and_does_not_stop_the_look_up() {
    let database = Database::new();
    let service = layer(database.lookup()).layer(Inner::default());
    let dropped = tokio::time::timeout(QUERY / 2, ask(&service, from("a"))).await;
    assert!(dropped.is_err());
    let response = ask(&service, from("a")).await;
    assert_eq!(response.headers()["x-ratelimit-remaining"], "4");
    assert_eq!(database.queries(), 1);
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_the_look_up_then_for_a_slow_storage_and_a_delay() {
    let lookup = PolicyLookup::new(tenant_of, |_| async {
        sleep(QUERY).await;
        Ok::<_, Infallible>(policy("leaky-bucket 1/second queue 5"))
    });
    let layer =
        RateLimitLayer::new(lookup, Header::new("x-tenant")).storage(slow(MemoryStorage::new()), OnError::Refuse);
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, from("a")).await, 200);
    let asked = Instant::now();
    assert_eq!(status(&service, from("a")).await, 200);
    assert!(asked.elapsed() > Duration::from_millis(500), "{:?}", asked.elapsed());
}

#[test]
fn look_up_outside_of_a_runtime_fails() {
    let database = Database::new();
    let service = layer(database.lookup()).storage(MemoryStorage::new(), OnError::Refuse).layer(Inner::default());
    assert_eq!(status(&service, from("a")).now_or_never(), Some(503));
}
