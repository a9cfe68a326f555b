//! Policies that are looked up asynchronously.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::probe::Probe;
use common::{Inner, ask, get, policy, poll, slow, status, with};
use futures_util::FutureExt;
use futures_util::future::join_all;
use http::{HeaderValue, Request, Response, StatusCode};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{Instant, sleep, timeout};
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service, ServiceExt};
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::{
    Event, EventKind, Header, Key, LivePolicy, LookupError, MemoryStorage, OnError, Policy, PolicyLookup,
    RateLimitLayer, Tenant,
};

pub(crate) type Lookup = PolicyLookup<HeaderValue>;

/// Bounds a wait that ends as soon as the code works.
const GENEROUS: Duration = Duration::from_secs(30);

/// A database of tenants that counts its queries.
#[derive(Clone)]
pub(crate) struct Database(Arc<State>);

struct State {
    plans: Mutex<BTreeMap<&'static str, &'static str>>,
    behavior: Mutex<Behavior>,
    queries: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
}

#[derive(Clone, Copy)]
pub(crate) enum Behavior {
    Works,
    Fails,
    Hangs,
    Panics,
}

pub(crate) const QUERY: Duration = Duration::from_millis(10);

struct InFlight<'a>(&'a AtomicUsize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Database {
    pub(crate) fn new() -> Self {
        Self(Arc::new(State {
            plans: Mutex::new(BTreeMap::from([("a", "5/hour"), ("b", "7/hour")])),
            behavior: Mutex::new(Behavior::Works),
            queries: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
        }))
    }

    pub(crate) fn set(&self, behavior: Behavior) {
        *self.0.behavior.lock().unwrap() = behavior;
    }

    pub(crate) fn plan(&self, tenant: &'static str, plan: &'static str) {
        self.0.plans.lock().unwrap().insert(tenant, plan);
    }

    pub(crate) fn queries(&self) -> usize {
        self.0.queries.swap(0, Ordering::SeqCst)
    }

    pub(crate) async fn query(&self, tenant: HeaderValue) -> Result<Option<Policy>, &'static str> {
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
            Behavior::Panics => panic!("a bug in the lookup"),
        }
        let plans = self.0.plans.lock().unwrap();
        Ok(plans.get(tenant.to_str().unwrap()).map(|plan| policy(plan).with_name(tenant.to_str().unwrap())))
    }

    pub(crate) fn lookup(&self) -> Lookup {
        let database = self.clone();
        PolicyLookup::new(tenant_of, move |tenant| {
            let database = database.clone();
            async move { database.query(tenant).await }
        })
    }
}

pub(crate) fn tenant_of(head: &Head<'_>) -> Result<Option<HeaderValue>, KeyError> {
    match head.headers.get("x-tenant") {
        Some(tenant) if tenant.is_empty() => Ok(None),
        Some(tenant) => Ok(Some(tenant.clone())),
        None => Err(KeyError::unauthorized("send x-tenant")),
    }
}

pub(crate) fn layer(lookup: Lookup) -> RateLimitLayer {
    RateLimitLayer::new(lookup, Header::new("x-tenant"))
}

pub(crate) fn from(tenant: &str) -> Request<()> {
    with("x-tenant", tenant)
}

pub(crate) fn limit<B>(response: &Response<B>) -> Option<&str> {
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
    let service = layer(database.lookup().timeout(GENEROUS)).layer(Inner::default());
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
        // From now on no request waits, and there is at most one lookup per second.
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
                    ("cannot look up the policy: the lookup panicked, or its runtime has ended", false, None)
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
    // Three rounds of three lookups fit into the timeout.
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
        Ok::<_, Infallible>(policy("leaky-bucket 1 per 10 seconds queue 5"))
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
    let without_time = Builder::new_current_thread().build().unwrap();
    assert_eq!(without_time.block_on(status(&service, from("a"))), 503, "a runtime without time");
    assert_eq!(runtime().block_on(status(&service, from("a"))), 200);
}

/// 40 lookups of made-up ids hang. The inner service serves four requests at the same time.
async fn assert_known_tenant_is_served_during_look_ups<S>(inner: S)
where
    S: Service<Request<()>, Response = Response<String>, Error: std::fmt::Debug + Send, Future: Send>
        + Clone
        + Send
        + 'static,
{
    let database = Database::new();
    let lookup = database.lookup().timeout(Duration::from_secs(3_600));
    let service = layer(lookup).layer(inner);
    assert_eq!(status(&service, from("a")).await, 200);
    database.set(Behavior::Hangs);
    let mut pending = Vec::new();
    for i in 0..40 {
        // All requests go through the same service, as those of one connection do.
        let mut service = service.clone();
        let request = service.ready().await.unwrap().call(from(&format!("made-up-{i}")));
        let mut request = Box::pin(request);
        assert!(poll(&mut request).is_pending());
        pending.push((service, request));
    }
    for left in ["3", "2", "1", "0"] {
        let response = timeout(GENEROUS, ask(&service, from("a"))).await.expect("a lookup holds no ready service");
        assert_eq!(response.headers()["x-ratelimit-remaining"], left);
    }
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(pending.iter_mut().all(|(_, request)| poll(request).is_pending()));
    assert_eq!(database.queries(), 41);
}

#[tokio::test(start_paused = true)]
async fn look_up_holds_no_permit_of_a_concurrency_limit() {
    assert_known_tenant_is_served_during_look_ups(ConcurrencyLimit::new(Inner::default(), 4)).await;
}

#[tokio::test(start_paused = true)]
async fn look_up_holds_no_slot_of_a_buffer() {
    assert_known_tenant_is_served_during_look_ups(Buffer::new(Inner::default(), 4)).await;
}

/// [`Probe`] panics if a clone is called that was not polled ready.
#[tokio::test(start_paused = true)]
async fn clone_becomes_ready_and_is_called_after_the_look_up() {
    let database = Database::new();
    let mut service = layer(database.lookup()).layer(Probe::new());
    for (id, clones) in [("2", 2), ("1", 2), ("1", 2)] {
        let response = service.ready().await.unwrap().call(from("a")).await.unwrap();
        assert_eq!(response.into_body(), id, "a cached tenant needs no clone");
        assert_eq!(service.get_ref().clones.load(Ordering::SeqCst), clones);
    }
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_a_busy_inner_service_after_its_look_up_and_spends_nothing() {
    let database = Database::new();
    let limit = ConcurrencyLimit::new(Inner::default(), 1);
    let service = layer(database.lookup()).layer(limit.clone());
    let mut busy = limit;
    let mut waiting = Box::pin(service.clone().oneshot(from("a")));
    assert!(poll(&mut waiting).is_pending());
    busy.ready().await.unwrap();
    sleep(QUERY * 2).await;
    assert!(poll(&mut waiting).is_pending(), "the only permit is taken");
    drop(waiting);
    let waiting = tokio::spawn(service.clone().oneshot(from("a")));
    sleep(QUERY).await;
    drop(busy);
    let response = waiting.await.unwrap().unwrap();
    assert_eq!(response.headers()["x-ratelimit-remaining"], "4", "the dropped request spent nothing");
    assert_eq!(database.queries(), 1);
}

#[tokio::test(start_paused = true)]
async fn error_of_poll_ready_after_the_look_up_is_returned() {
    let database = Database::new();
    let (mut service, mut handle) =
        tower_test::mock::spawn_layer::<Request<()>, Response<String>, _>(layer(database.lookup()));
    handle.allow(1);
    assert!(service.poll_ready::<Request<()>>().is_ready());
    let response = service.call(from("a"));
    handle.send_error("closed for today");
    let response = timeout(GENEROUS, response).await.expect("the service becomes ready");
    assert_eq!(response.unwrap_err().to_string(), "closed for today");
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().build().unwrap()
}

/// A service whose storage is in memory, and that refuses requests if their lookup fails.
fn service(lookup: Lookup) -> tower_ratelimit::RateLimit<Inner> {
    layer(lookup).storage(MemoryStorage::new(), OnError::Refuse).layer(Inner::default())
}

/// Servers with a runtime for each thread share the lookups in flight.
#[test]
fn request_that_joins_a_look_up_of_a_stalled_runtime_has_its_own_timeout() {
    let database = Database::new();
    let service = service(database.lookup().timeout(Duration::from_secs(3)));
    let (stalled, running) = (runtime(), runtime());
    let mut first = Box::pin(service.clone().oneshot(from("a")));
    stalled.block_on(async {
        assert!(poll(&mut first).is_pending());
        tokio::task::yield_now().await;
    });
    // From here on, nothing polls the tasks of the first runtime.
    running.block_on(async {
        let joined = timeout(GENEROUS, ask(&service, from("a"))).await.expect("it has a timeout of its own");
        assert_eq!(joined.status(), 503);
        // The time of the first lookup is over, so the next request starts another one.
        let next = timeout(GENEROUS, ask(&service, from("a"))).await.unwrap();
        assert_eq!(next.headers()["x-ratelimit-remaining"], "4");
        let cached = timeout(GENEROUS, ask(&service, from("a"))).await.unwrap();
        assert_eq!(cached.headers()["x-ratelimit-remaining"], "3");
    });
    let late = stalled.block_on(async { timeout(GENEROUS, first).await.unwrap().unwrap() });
    assert!([200, 503].contains(&late.status().as_u16()), "{late:?}");
}

#[test]
fn request_that_joined_a_look_up_of_a_runtime_that_ended_starts_another_one() {
    for is_started in [false, true] {
        let database = Database::new();
        let service = service(database.lookup().timeout(GENEROUS));
        let (ended, running) = (runtime(), runtime());
        let mut first = Box::pin(service.clone().oneshot(from("a")));
        ended.block_on(async {
            assert!(poll(&mut first).is_pending());
            if is_started {
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
            }
        });
        let mut joined = Box::pin(service.clone().oneshot(from("a")));
        running.block_on(async { assert!(poll(&mut joined).is_pending()) });
        drop(ended);
        running.block_on(async {
            let response = timeout(GENEROUS, joined).await.unwrap().unwrap();
            assert_eq!(response.headers()["x-ratelimit-remaining"], "4");
        });
        assert_eq!(database.queries(), 1 + usize::from(is_started));
    }
}

#[test]
fn look_up_of_a_runtime_that_ended_does_not_stay_in_flight() {
    let database = Database::new();
    let service = service(database.lookup().timeout(GENEROUS));
    let ended = runtime();
    // The lookup's task never runs.
    ended.block_on(async { assert!(poll(&mut Box::pin(service.clone().oneshot(from("a")))).is_pending()) });
    drop(ended);
    assert_eq!(runtime().block_on(status(&service, from("a"))), 200);
}

#[tokio::test(start_paused = true)]
async fn look_ups_that_wait_are_bounded() {
    let database = Database::new();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&errors);
    let service = layer(database.lookup().max_lookups(2).ttl(Duration::from_secs(10)))
        .storage(MemoryStorage::new(), OnError::Refuse)
        .observer(move |event: &Event<'_>| {
            if let EventKind::Failed { error, .. } = event.kind {
                let error = error.downcast_ref::<LookupError>().unwrap();
                seen.lock().unwrap().push((error.to_string(), error.is_timeout()));
            }
        })
        .layer(Inner::default());
    assert_eq!(status(&service, from("a")).await, 200);
    sleep(Duration::from_secs(10)).await;
    database.set(Behavior::Hangs);
    let (mut pending, mut refused) = (Vec::new(), 0);
    for i in 0..100 {
        // Requests of the same id wait for one lookup.
        for _ in 0..2 {
            let mut request = Box::pin(service.clone().oneshot(from(&i.to_string())));
            match poll(&mut request) {
                std::task::Poll::Pending => pending.push(request),
                std::task::Poll::Ready(response) => {
                    assert_eq!(response.unwrap().status(), 503);
                    refused += 1;
                }
            }
        }
    }
    // Two lookups run, and 16 times as many wait.
    assert_eq!((pending.len(), refused), (2 * 34, 2 * 66));
    let text = "cannot look up the policy: 34 lookups are in flight or wait already";
    assert_eq!(*errors.lock().unwrap(), vec![(text.to_owned(), false); 132]);
    assert_eq!(limit(&ask(&service, from("a")).await), Some("5"), "the last good result is used");
    drop(pending);

    // The lookups of clients that have left end at their timeouts.
    sleep(Duration::from_millis(1_001)).await;
    database.set(Behavior::Works);
    assert_eq!(status(&service, from("b")).await, 200);
}

/// With `Admit`, a client that makes up enough ids is not limited.
#[tokio::test(start_paused = true)]
async fn on_error_applies_beyond_the_bound_of_look_ups() {
    for (on_error, expected) in [(OnError::Admit, 200), (OnError::Refuse, 503)] {
        let database = Database::new();
        let lookup = database.lookup().max_lookups(1);
        let service = layer(lookup).storage(MemoryStorage::new(), on_error).layer(Inner::default());
        // One lookup runs, and 16 wait.
        let mut pending = Vec::new();
        for i in 0..17 {
            let mut request = Box::pin(service.clone().oneshot(from(&i.to_string())));
            assert!(poll(&mut request).is_pending());
            pending.push(request);
        }
        for _ in 0..10 {
            let response = ask(&service, from("made-up")).await;
            assert_eq!((response.status().as_u16(), limit(&response)), (expected, None));
        }
        drop(pending);
    }
}

/// The recipe of the guide.
fn bounded_id(head: &Head<'_>) -> Result<Option<String>, KeyError> {
    let Some(value) = head.headers.get("x-tenant") else { return Ok(None) };
    match value.to_str() {
        Ok(id) if id.len() <= 128 => Ok(Some(id.to_owned())),
        _ => Err(KeyError::unauthorized("invalid id")),
    }
}

#[tokio::test]
async fn id_that_its_closure_rejects_needs_no_look_up() {
    let queries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&queries);
    let lookup = PolicyLookup::new(bounded_id, move |id: String| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move { Ok::<_, Infallible>(policy("1/hour").with_name(id)) }
    });
    let service = RateLimitLayer::new(lookup.clone(), Header::new("x-tenant")).layer(Inner::default());
    let [longest, too_long] = [128, 129].map(|len| "a".repeat(len));
    for expected in [200, 429] {
        assert_eq!(status(&service, from(&longest)).await, expected);
        assert_eq!(status(&service, from(&too_long)).await, 401);
    }
    assert_eq!(queries.load(Ordering::SeqCst), 1);
    lookup.forget(&longest);
    assert_eq!(status(&service, from(&longest)).await, 429);
    assert_eq!(queries.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn cache_holds_max_tenants_ids() {
    for max_tenants in [0, 1, 2, 3, 31, 32, 33, 100, 1_000, 10_000] {
        let database = Database::new();
        let service = layer(database.lookup().max_tenants(max_tenants).ttl(Duration::MAX)).layer(Inner::default());
        let capacity = max_tenants.max(1);
        let ids: Vec<_> = (0..3 * capacity).map(HeaderValue::from).collect();
        let request = |id: &HeaderValue| {
            let mut request = get("/");
            request.headers_mut().insert("x-tenant", id.clone());
            request
        };
        for _ in 0..3 {
            for id in &ids[..capacity] {
                assert_eq!(status(&service, request(id)).await, 200);
            }
        }
        assert_eq!(database.queries(), capacity, "{max_tenants} ids in three rounds");
        for id in &ids {
            assert_eq!(status(&service, request(id)).await, 200);
        }
        database.queries();
        for id in ids.iter().rev() {
            assert_eq!(status(&service, request(id)).await, 200);
        }
        let cached = ids.len() - database.queries();
        assert!(cached <= capacity, "{cached} of at most {max_tenants} ids are cached");
    }
}
