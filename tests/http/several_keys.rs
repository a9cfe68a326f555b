//! Layers with several keys: a user, its tenant, and all clients.

use std::convert::Infallible;
use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    AnswersWithStatus, FakeStorage, Inner, T0, ask, failing, get, memory_with_manual_clock, numbers, policy, poll,
    remaining, retry_after, slow, status,
};
use http::{HeaderValue, Request, Response};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::extract::{Head, KeyError, KeyExtractor};
use tower_ratelimit::storage::{AnyStorage, InOrder, RefusalCache, StorageRequest, TokioClock};
use tower_ratelimit::{
    Decision, EventKind, Global, Header, Headers, Key, LivePolicy, MemoryStorage, OnError, Op, Policy, PolicyLookup,
    RateLimitLayer, RateLimiter, Reservation, Reservations, Storage, Tenant, policy_by,
};

fn named(text: &str, name: &str) -> Policy {
    policy(text).with_name(name)
}

/// A layer with a policy for the user, its tenant, and all clients.
fn layer([user, tenant, all]: [&str; 3], storage: impl Storage) -> RateLimitLayer {
    RateLimitLayer::new(named(user, "user"), Header::new("x-user"))
        .and(named(tenant, "tenant"), Header::new("x-tenant"))
        .and(named(all, "all"), Global::new())
        .storage(storage, OnError::Refuse)
}

fn from(user: &str, tenant: &str) -> Request<()> {
    Request::get("/").header("x-user", user).header("x-tenant", tenant).body(()).unwrap()
}

/// Returns the spent units of the user "u", its tenant "t", and all clients.
async fn spent([user, tenant, all]: [&str; 3], storage: &impl Storage) -> [u32; 3] {
    let mut spent = [0; 3];
    let keys = [Key::from("u"), Key::from("t"), Key::global()];
    let policies = [named(user, "user"), named(tenant, "tenant"), named(all, "all")];
    for (at, (policy, key)) in policies.into_iter().zip(keys).enumerate() {
        let request = StorageRequest::new(&policy, &key, Op::Peek, 1);
        let peek = storage.decide(request).await.unwrap();
        spent[at] = peek.capacity() - peek.remaining();
    }
    spent
}

type Events = Arc<Mutex<Vec<String>>>;

/// Adds an observer that collects the outcomes with the names of their policies.
fn observed(layer: RateLimitLayer) -> (RateLimitLayer, Events) {
    let events = Events::default();
    let seen = Arc::clone(&events);
    let layer = layer.observer(move |event| {
        let mark = if event.shadow { "?" } else { "" };
        seen.lock().unwrap().push(format!("{} {}{mark}", event.outcome(), event.policy.name().unwrap_or("shadow")));
    });
    (layer, events)
}

fn take(events: &Events) -> Vec<String> {
    std::mem::take(&mut events.lock().unwrap())
}

/// Guards against this defect: one user's flood empties the quota of its tenant.
#[tokio::test]
async fn refusal_by_one_key_spends_nothing_of_the_others() {
    let limits = ["fixed-window 2/minute", "fixed-window 3/minute", "fixed-window 100/minute"];
    let storages = |memory: &MemoryStorage| -> [Arc<dyn Storage>; 4] {
        let memory = memory.clone();
        [
            Arc::new(memory.clone()),
            Arc::new(InOrder::new(memory.clone())),
            Arc::new(InOrder::new(slow(memory.clone()))),
            Arc::new(RefusalCache::new(memory)),
        ]
    };
    for case in 0..4 {
        let memory = memory_with_manual_clock().0;
        let storage = storages(&memory)[case].clone();
        let service = layer(limits, storage).layer(Inner::default());
        for (user, expected, left) in [
            ("u", 200, [1, 1, 1]),
            ("u", 200, [2, 2, 2]),
            // The user refuses.
            ("u", 429, [2, 2, 2]),
            ("u", 429, [2, 2, 2]),
            ("v", 200, [2, 3, 3]),
            // The tenant refuses, and its user has a unit left.
            ("v", 429, [2, 3, 3]),
            ("w", 429, [2, 3, 3]),
        ] {
            assert_eq!(status(&service, from(user, "t")).await, expected, "case {case}, user {user}");
            assert_eq!(spent(limits, &memory).await, left, "case {case}, after {user}");
        }
        assert_eq!(status(&service, from("w", "another")).await, 200, "case {case}: the tenant's users are apart");
    }
}

#[tokio::test]
async fn refusing_policy_with_the_longest_wait_is_shown() {
    let (storage, clock) = memory_with_manual_clock();
    let limits = ["fixed-window 1/minute", "fixed-window 1/hour", "fixed-window 9/day"];
    let service = layer(limits, storage).layer(Inner::default());
    assert_eq!(numbers(&ask(&service, from("u", "t")).await), Some([1, 0, T0 + 3_600]), "the longer reset");
    let refused = ask(&service, from("u", "t")).await;
    assert_eq!((numbers(&refused), retry_after(&refused)), (Some([1, 0, T0 + 3_600]), Some(3_600)));
    let refusal = refused.extensions().get::<Decision>().unwrap();
    assert_eq!(refusal.retry_after(), Some(Duration::from_secs(3_600)));
    clock.advance(Duration::from_secs(60));
    let refused = ask(&service, from("u", "t")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(3_540)), "only the tenant refuses");
    clock.advance(Duration::from_secs(3_540));
    assert_eq!(status(&service, from("u", "t")).await, 200);
}

/// Guards against this defect: the refusal reports the wait of another key, which is shorter than the lock.
#[tokio::test]
async fn refusal_that_starts_a_lock_reports_its_end() {
    let (storage, clock) = memory_with_manual_clock();
    let user = "fixed-window 1/second; lockout 2 refusals/minute for 1h";
    let service = layer([user, "fixed-window 1 per 30 seconds", "100/minute"], storage).layer(Inner::default());
    assert_eq!(status(&service, from("u", "t")).await, 200);
    for wait in [30, 3_600] {
        let refused = ask(&service, from("u", "t")).await;
        assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(wait)));
        let refusal = refused.extensions().get::<Decision>().unwrap();
        assert_eq!(refusal.retry_after(), Some(Duration::from_secs(wait)));
    }
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(status(&service, from("u", "t")).await, 200);
}

#[tokio::test]
async fn admitted_response_shows_the_fewest_remaining_units() {
    let limits = ["fixed-window 100/minute", "fixed-window 5 per 30 seconds", "fixed-window 50/minute"];
    let service = layer(limits, memory_with_manual_clock().0).layer(Inner::default());
    assert_eq!(numbers(&ask(&service, from("u", "t")).await), Some([5, 4, T0 + 30]));
}

#[tokio::test]
async fn ietf_lists_name_all_policies() {
    let limits = ["fixed-window 1/minute", "fixed-window 5/minute; fixed-window 9/hour", "fixed-window 50/minute"];
    let layer = layer(limits, memory_with_manual_clock().0).headers(Headers::draft11().and(Headers::draft6()));
    let service = layer.layer(Inner::default());
    for (expected, limits) in [
        (200, r#""user";r=0;t=60, "tenant-1";r=4;t=60, "tenant-2";r=8;t=3600, "all";r=49;t=60"#),
        (429, r#""user";r=0;t=60, "tenant-1";r=4;t=60, "tenant-2";r=8;t=3600, "all";r=49;t=60"#),
    ] {
        let response = ask(&service, from("u", "t")).await;
        let field = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(response.status(), expected);
        assert_eq!(field("ratelimit"), limits);
        assert_eq!(
            field("ratelimit-policy"),
            r#""user";q=1;w=60, "tenant-1";q=5;w=60, "tenant-2";q=9;w=3600, "all";q=50;w=60"#
        );
        assert_eq!(field("ratelimit-remaining"), "0");
    }
}

#[tokio::test]
async fn observer_gets_only_the_policies_that_refuse() {
    let limits = ["fixed-window 1/minute", "fixed-window 1/minute", "fixed-window 50/minute; shadow 1/minute"];
    let (layer, events) = observed(layer(limits, memory_with_manual_clock().0));
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, from("u", "t")).await, 200);
    assert_eq!(take(&events), ["admitted user", "admitted tenant", "admitted all", "admitted shadow?"]);
    assert_eq!(status(&service, from("u", "t")).await, 429);
    assert_eq!(take(&events), ["refused user", "refused tenant"]);
    assert_eq!(status(&service, from("u", "another")).await, 429);
    assert_eq!(take(&events), ["refused user"]);
    // A shadow limit never refuses.
    assert_eq!(status(&service, from("v", "another")).await, 200);
    assert_eq!(take(&events), ["admitted user", "admitted tenant", "admitted all", "refused shadow?"]);
}

#[tokio::test]
async fn lock_of_a_member_is_reported_once() {
    let limits = ["lockout 2/minute for 10m", "fixed-window 9/minute", "fixed-window 50/minute"];
    let (layer, events) = observed(layer(limits, memory_with_manual_clock().0));
    let service = layer.layer(Inner::default());
    for expected in [200, 200, 429] {
        assert_eq!(status(&service, from("u", "t")).await, expected);
    }
    let locked: Vec<_> = take(&events).into_iter().filter(|event| event.starts_with("locked")).collect();
    assert_eq!(locked, ["locked user"]);
}

#[tokio::test]
async fn head_of_the_response_refunds_all_keys() {
    let limits = ["fixed-window 2/minute", "fixed-window 3/minute", "fixed-window 100/minute"];
    for (memory, is_slow) in [(memory_with_manual_clock().0, false), (memory_with_manual_clock().0, true)] {
        let storage: Arc<dyn Storage> =
            if is_slow { Arc::new(InOrder::new(slow(memory.clone()))) } else { Arc::new(memory.clone()) };
        let (layer, events) = observed(layer(limits, storage));
        let service = layer.charge_when(|response| response.status != 304).layer(AnswersWithStatus);
        let request = |path: &str| {
            let mut request = from("u", "t");
            *request.uri_mut() = path.parse().unwrap();
            request
        };
        let response = ask(&service, request("/304")).await;
        common::time::eventually("the hits are refunded", async || spent(limits, &memory).await == [0, 0, 0]).await;
        if !is_slow {
            assert_eq!(remaining(&response), Some(2), "the fields report the refund");
        }
        let refunded: Vec<_> = take(&events).into_iter().filter(|event| event.starts_with("refunded")).collect();
        assert_eq!(refunded, ["refunded user", "refunded tenant", "refunded all"]);
        assert_eq!(status(&service, request("/200")).await, 200);
        assert_eq!(spent(limits, &memory).await, [1, 1, 1]);
    }
}

/// A service that keeps the reservation of each request.
fn keeps_reservation(
    taken: &Arc<Mutex<Option<Reservation>>>,
) -> impl Service<
    Request<()>,
    Response = Response<String>,
    Error = Infallible,
    Future: Future<Output = Result<Response<String>, Infallible>> + Send,
> + Clone
+ use<> {
    let taken = Arc::clone(taken);
    service_fn(move |request: Request<()>| {
        *taken.lock().unwrap() = request.extensions().get().and_then(|all: &Reservations| all.take_policy("tenant"));
        ready(Ok(Response::new(String::new())))
    })
}

#[tokio::test]
async fn one_reservation_settles_all_keys() {
    let limits = ["fixed-window 20/minute", "fixed-window 30/minute", "fixed-window 100/minute"];
    let memory = memory_with_manual_clock().0;
    for storage in [Arc::new(memory.clone()) as Arc<dyn Storage>, Arc::new(InOrder::new(slow(memory.clone())))] {
        let taken = Arc::default();
        let layer = layer(limits, storage).cost(|_| 5).settle_later();
        let service = layer.layer(keeps_reservation(&taken));
        let take = || taken.lock().unwrap().take().expect("the reservation names every policy");

        assert_eq!(status(&service, from("u", "t")).await, 200);
        let reservation = take();
        assert_eq!(reservation.policy().name(), Some("user"), "the fewest units remain for the user");
        assert_eq!(spent(limits, &memory).await, [5, 5, 5]);
        reservation.settle(2).await.unwrap();
        assert_eq!(spent(limits, &memory).await, [2, 2, 2]);

        assert_eq!(status(&service, from("u", "t")).await, 200);
        take().settle(6).await.unwrap();
        assert_eq!(spent(limits, &memory).await, [8, 8, 8]);

        assert_eq!(status(&service, from("u", "t")).await, 200);
        drop(take().refund());
        common::time::eventually("the hits are refunded", async || spent(limits, &memory).await == [8, 8, 8]).await;

        assert_eq!(status(&service, from("u", "t")).await, 200);
        let _ = take().keep();
        assert_eq!(spent(limits, &memory).await, [13, 13, 13]);

        assert_eq!(status(&service, from("u", "t")).await, 200);
        take().clear().await.unwrap();
        assert_eq!(spent(limits, &memory).await, [0, 0, 0]);
    }
}

#[tokio::test]
async fn costs_of_policies_may_differ() {
    let limits = ["fixed-window 20/minute", "fixed-window 30/minute", "fixed-window 100/minute"];
    let memory = memory_with_manual_clock().0;
    let limited =
        |at: usize| [named(limits[0], "user"), named(limits[1], "tenant"), named(limits[2], "all")][at].clone();
    let first = || RateLimitLayer::new(limited(0), Header::new("x-user")).storage(memory.clone(), OnError::Refuse);
    let (tenant, all) = (Header::new("x-tenant"), Global::new());
    let same = first().and(limited(1), tenant.clone()).and(limited(2), all).cost(|_| 3);
    let inherited = first().cost(|_| 3).and(limited(1), tenant.clone()).and(limited(2), all);
    let own = first().cost(|_| 3).and(limited(1), tenant.clone()).cost(|_| 2).and(limited(2), all).cost(|_| 7);
    let replaced = first().cost(|_| 9).cost(|_| 3).and(limited(1), tenant.clone()).and(limited(2), all).cost(|_| 0);
    for (layer, costs) in [(same, [3, 3, 3]), (inherited, [3, 3, 3]), (own, [3, 2, 7]), (replaced, [3, 3, 0])] {
        let service = layer.layer(Inner::default());
        assert_eq!(status(&service, from("u", "t")).await, 200);
        assert_eq!(spent(limits, &memory).await, costs);
        memory.clear_all().await.unwrap();
    }
    let refused = first().and(limited(1), tenant).cost(|_| Err::<u32, _>(KeyError::client("no size")));
    assert_eq!(status(&refused.layer(Inner::default()), from("u", "t")).await, 400);
    assert_eq!(spent(limits, &memory).await, [0, 0, 0]);
}

#[tokio::test]
async fn missing_key_follows_its_extractor() {
    let limits = ["fixed-window 2/minute", "fixed-window 3/minute", "fixed-window 100/minute"];
    let memory = memory_with_manual_clock().0;
    let (layer, events) = observed(layer(limits, memory.clone()));
    let service = layer.layer(Inner::default());
    let without = |field: &str| {
        let mut request = from("u", "t");
        request.headers_mut().remove(field);
        request
    };
    assert_eq!(status(&service, without("x-tenant")).await, 400);
    assert_eq!(take(&events), ["missing tenant"]);
    assert_eq!(spent(limits, &memory).await, [0, 0, 0]);

    let optional = |head: &Head<'_>| head.headers.get("x-tenant").map(|tenant| Key::from(tenant.as_bytes()));
    let service = RateLimitLayer::new(named(limits[0], "user"), Header::new("x-user"))
        .and(named(limits[1], "tenant"), optional)
        .storage(memory.clone(), OnError::Refuse)
        .layer(Inner::default());
    for expected in [200, 200, 429] {
        assert_eq!(status(&service, without("x-tenant")).await, expected);
    }
    // No policy applies.
    let nothing = |_: &Head<'_>| None::<Key>;
    let layer = RateLimitLayer::new(named("1/minute", "a"), nothing).and(named("1/minute", "b"), nothing);
    let service = layer.layer(Inner::default());
    for _ in 0..3 {
        assert_eq!(numbers(&ask(&service, get("/")).await), None);
    }
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_the_longest_delay_and_a_drop_refunds_all_keys() {
    let limits = ["leaky-bucket 1/second queue 5", "leaky-bucket 10/second queue 50", "fixed-window 100/minute"];
    let memory = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let service = layer(limits, memory.clone()).layer(Inner::default());
    let start = tokio::time::Instant::now();
    assert_eq!(status(&service, from("u", "t")).await, 200);
    assert_eq!(status(&service, from("u", "t")).await, 200);
    assert_eq!(start.elapsed(), Duration::from_secs(1), "the user waits for a second, the tenant for 100 ms");
    let before = spent(limits, &memory).await;
    let mut waiting = Box::pin(ask(&service, from("u", "t")));
    assert!(poll(&mut waiting).is_pending());
    assert_ne!(spent(limits, &memory).await, before);
    drop(waiting);
    assert_eq!(spent(limits, &memory).await, before);
}

#[tokio::test]
async fn failed_storage_is_one_failure() {
    let limits = ["fixed-window 2/minute", "fixed-window 3/minute", "fixed-window 100/minute"];
    let (layer, events) = observed(layer(limits, InOrder::new(failing())));
    let service = layer.layer(Inner::default());
    let refused = ask(&service, from("u", "t")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (503, Some(1)));
    assert_eq!(take(&events), ["failed_closed user"]);
}

#[tokio::test]
async fn policies_may_be_chosen_live_or_looked_up() {
    let memory = memory_with_manual_clock().0;
    let plan = |header: &'static str, name: &'static str| {
        PolicyLookup::new(
            move |head: &Head<'_>| head.headers.get(header).cloned(),
            move |id: HeaderValue| async move {
                tokio::task::yield_now().await;
                let amount = id.to_str().unwrap().len();
                Ok::<_, Infallible>(Tenant::from(named(&format!("fixed-window {amount}/minute"), name)))
            },
        )
    };
    let live = LivePolicy::new(named("fixed-window 100/minute", "all"));
    let service = RateLimitLayer::new(plan("x-user", "user"), Header::new("x-user"))
        .and(plan("x-tenant", "tenant"), Header::new("x-tenant"))
        .and(live.clone(), Global::new())
        .and(
            policy_by(|head| (head.uri().path() == "/").then(|| named("fixed-window 50/minute", "path"))),
            Global::new(),
        )
        .storage(memory, OnError::Refuse)
        .layer(Inner::default());
    // The user has three units, and the tenant two.
    for (user, expected) in [("ann", 200), ("bob", 200), ("ann", 429), ("bob", 429)] {
        assert_eq!(status(&service, from(user, "ab")).await, expected);
    }
    let shown = ask(&service, from("ann", "abcdef")).await;
    assert_eq!(numbers(&shown), Some([3, 1, T0 + 60]));
    live.set(named("fixed-window 2/minute", "all")).unwrap();
    assert_eq!(status(&service, from("somebody", "abcdef")).await, 429, "three hits were spent before");
}

#[tokio::test]
async fn usage_lists_every_policy_and_spends_nothing() {
    let limits = ["fixed-window 2/minute", "fixed-window 1/hour", "fixed-window 100/minute"];
    let memory = memory_with_manual_clock().0;
    let layer = layer(limits, memory.clone());
    assert_eq!(status(&layer.clone().layer(Inner::default()), from("u", "t")).await, 200);
    let usage = layer.usage(&from("u", "t")).await.unwrap().unwrap();
    let members: Vec<_> = usage.members().map(|(policy, peek)| (policy.identity(), peek.remaining())).collect();
    assert_eq!(members, [("user", 1), ("tenant", 0), ("all", 99)]);
    assert_eq!((usage.policy().identity(), usage.decision().is_refused()), ("tenant", true));
    let json: serde_json::Value = serde_json::from_str(&usage.to_json()).unwrap();
    assert_eq!((&json["admitted"], &json["retry_after"]), (&false.into(), &3_600.into()));
    let names: Vec<_> = json["limits"].as_array().unwrap().iter().map(|limit| limit["name"].clone()).collect();
    assert_eq!(names, ["user", "tenant", "all"]);
    assert_eq!(spent(limits, &memory).await, [1, 1, 1]);
}

#[test]
fn policies_that_would_share_their_states_are_an_error() {
    let layer = RateLimitLayer::new(named("1/minute", "user"), Header::new("x-user"));
    let error = layer.try_and(named("2/minute", "user"), Global::new()).unwrap_err().to_string();
    assert!(error.contains("\"user\"") && error.contains("its own name"), "{error}");
}

#[tokio::test]
async fn equal_policies_and_keys_of_a_request_are_an_error() {
    let any = || policy_by(|_| named("fixed-window 5/minute", "same"));
    let memory = memory_with_manual_clock().0;
    let errors = Events::default();
    let seen = Arc::clone(&errors);
    let layer = RateLimitLayer::new(any(), Header::new("x-user"))
        .and(any(), Header::new("x-tenant"))
        .storage(memory.clone(), OnError::Refuse)
        .observer(move |event| {
            if let EventKind::Failed { error, .. } = event.kind {
                seen.lock().unwrap().push(error.to_string());
            }
        });
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, from("a", "a")).await, 503);
    let error = take(&errors).remove(0);
    assert!(error.contains("\"same\""), "{error}");
    assert_eq!(status(&service, from("a", "b")).await, 200);
}

#[test]
fn unsupported_combinations_are_rejected_when_built() {
    let layer = || layer(["1/minute", "2/minute", "3/minute"], MemoryStorage::new());
    let error = layer().try_storage(FakeStorage::around(MemoryStorage::new()), OnError::Admit).unwrap_err().to_string();
    assert!(error.contains("InOrder::new(storage)"), "{error}");
    let (first, storage) = (named("1/minute", "user"), FakeStorage::around(MemoryStorage::new()));
    let single = RateLimitLayer::new(first, Global::new()).storage(storage, OnError::Admit);
    let error = single.try_and(named("1/minute", "all"), Global::new()).unwrap_err().to_string();
    assert!(error.contains("InOrder::new(storage)"), "{error}");

    assert!(catch_unwind(|| layer().wait(Duration::from_secs(1), 9)).is_err());
    assert!(catch_unwind(|| layer().shadow()).is_err());
    let waiting = || RateLimitLayer::new(named("1/minute", "user"), Global::new()).wait(Duration::from_secs(1), 9);
    assert!(catch_unwind(|| waiting().and(named("1/minute", "all"), Global::new())).is_err());
    assert!(catch_unwind(|| waiting().within(Global::new())).is_err());
    let eight = (3..8).fold(layer(), |layer, at| layer.and(named("1/minute", &format!("{at}")), Global::new()));
    assert!(catch_unwind(AssertUnwindSafe(|| eight.and(named("1/minute", "ninth"), Global::new()))).is_err());
}

#[tokio::test]
async fn limiters_reserve_all_keys_or_none() {
    let memory = memory_with_manual_clock().0;
    let limiter = |text: &str, name: &str| RateLimiter::with_storage(named(text, name), memory.clone());
    let (user, tenant) = (limiter("fixed-window 9/minute", "user"), limiter("fixed-window 4/hour", "tenant"));
    let (u, t) = (Key::from("u"), Key::from("t"));
    let remaining = async || [user.peek(&u).await.unwrap().remaining(), tenant.peek(&t).await.unwrap().remaining()];
    let hit = RateLimiter::reserve_all(&[(&user, &u), (&tenant, &t)], 3).await.unwrap();
    assert_eq!((hit.is_admitted(), hit.policy().name(), hit.remaining()), (true, Some("tenant"), 1));
    assert_eq!(remaining().await, [6, 1]);
    hit.settle(1).await.unwrap();
    assert_eq!(remaining().await, [8, 3]);
    let refused = RateLimiter::reserve_all(&[(&user, &u), (&tenant, &t)], 4).await.unwrap();
    assert_eq!((refused.is_refused(), refused.policy().name()), (true, Some("tenant")));
    refused.refund().await.unwrap();
    assert_eq!(remaining().await, [8, 3], "a refusal has nothing to refund");

    let other = RateLimiter::new(policy("1/minute"));
    for (pairs, why) in [
        (&[][..], "no limiter"),
        (&[(&user, &u), (&other, &t)], "different storages"),
        (&[(&user, &u), (&user, &u)], "\"user\""),
    ] {
        let error = RateLimiter::reserve_all(pairs, 1).await.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(remaining().await, [8, 3]);
}

/// Each limiter wraps its clone of the storage in a handle of its own.
#[tokio::test]
async fn limiters_with_clones_of_a_storage_reserve_together() {
    let memory = memory_with_manual_clock().0;
    let served = FakeStorage::around(memory.clone());
    let (in_order, cache) = (InOrder::new(served.clone()), RefusalCache::new(memory.clone()));
    let (u, t) = (Key::from("u"), Key::from("t"));
    let limiters = |storage: &dyn Fn() -> AnyStorage| {
        ["user", "tenant"].map(|name| RateLimiter::with_storage(named("fixed-window 9/minute", name), storage()))
    };
    for [user, tenant] in [
        limiters(&|| AnyStorage::new(in_order.clone())),
        limiters(&|| AnyStorage::new(InOrder::new(served.clone()))),
        limiters(&|| AnyStorage::new(cache.clone())),
    ] {
        let hit = RateLimiter::reserve_all(&[(&user, &u), (&tenant, &t)], 3).await.unwrap();
        assert!(hit.is_admitted());
        assert_eq!([user.peek(&u).await.unwrap().remaining(), tenant.peek(&t).await.unwrap().remaining()], [6, 6]);
        hit.refund().await.unwrap();
        assert_eq!([user.peek(&u).await.unwrap().remaining(), tenant.peek(&t).await.unwrap().remaining()], [9, 9]);
    }
    let [user, _] = limiters(&|| AnyStorage::new(in_order.clone()));
    for other in [AnyStorage::new(InOrder::new(memory)), AnyStorage::new(MemoryStorage::new())] {
        let other = RateLimiter::with_storage(named("1/minute", "tenant"), other);
        let error = RateLimiter::reserve_all(&[(&user, &u), (&other, &t)], 1).await.unwrap_err().to_string();
        assert!(error.contains("clones of one storage"), "{error}");
    }
}

#[tokio::test]
async fn free_member_stays_in_the_fields_after_a_settlement() {
    let member = |text: &str, name: &str| named(text, name);
    for (actual, left) in [(None, 95), (Some(5), 95), (Some(4), 96), (Some(7), 93)] {
        let layer = RateLimitLayer::new(member("fixed-window 100/minute", "user"), Header::new("x-user"))
            .cost(|_| 5)
            .and(member("fixed-window 3/minute", "tenant"), Global::new())
            .cost(|_| 0)
            .storage(memory_with_manual_clock().0, OnError::Refuse)
            .headers(Headers::x_rate_limit().and(Headers::draft11()))
            .settle(move |_| actual);
        let (layer, events) = observed(layer);
        let response = ask(&layer.layer(Inner::default()), from("u", "t")).await;
        assert_eq!(numbers(&response).map(|[limit, remaining, _]| [limit, remaining]), Some([3, 3]));
        let list = format!(r#""user";r={left};t=60, "tenant";r=3;t=0"#);
        assert_eq!(response.headers()["ratelimit"], list, "{actual:?}");
        let settled: Vec<_> = take(&events).into_iter().filter(|event| !event.starts_with("admitted")).collect();
        assert!(settled.iter().all(|event| event.ends_with("user")), "{settled:?}");
    }
}

#[tokio::test]
async fn refusal_after_a_refusing_hit_is_forwarded_by_no_failure() {
    let fake = FakeStorage::around(memory_with_manual_clock().0);
    let limits = ["fixed-window 9/minute", "fixed-window 1/minute", "fixed-window 9/minute"];
    let service = layer(limits, MemoryStorage::new()).storage(InOrder::new(fake.clone()), OnError::Admit);
    let service = service.layer(Inner::default());
    assert_eq!(status(&service, from("u", "t")).await, 200);
    fake.set_changes(common::Behavior::Fails);
    assert_eq!(status(&service, from("u", "t")).await, 429);
}

/// A layer whose keys are within the tenant, or within all clients for a request without one. One
/// with the tenant "none" gets an error.
fn layer_within([user, tenant, all]: [&str; 3], storage: impl Storage) -> RateLimitLayer {
    let tenant_key = |head: &Head<'_>| match head.headers.get("x-tenant").map(HeaderValue::as_bytes) {
        Some(b"none") => Err(KeyError::unauthorized("no tenant")),
        tenant => Ok(tenant.map(Key::from)),
    };
    RateLimitLayer::new(named(user, "user"), Header::new("x-user"))
        .within(tenant_key)
        .and(named(tenant, "tenant"), tenant_key)
        .and(named(all, "all"), Global::new())
        .storage(storage, OnError::Refuse)
}

#[tokio::test]
async fn users_within_different_tenants_have_counts_of_their_own() {
    let limits = ["fixed-window 1/minute", "fixed-window 9/minute", "fixed-window 4/minute"];
    let memory = memory_with_manual_clock().0;
    let layer = layer_within(limits, memory.clone());
    let service = layer.layer(Inner::default());
    let without_tenant = || Request::get("/").header("x-user", "u").body(()).unwrap();
    assert_eq!(status(&service, from("u", "t")).await, 200);
    assert_eq!(status(&service, from("u", "t")).await, 429);
    assert_eq!(status(&service, from("u", "other")).await, 200);
    assert_eq!(status(&service, without_tenant()).await, 200);
    assert_eq!(status(&service, without_tenant()).await, 429);
    assert_eq!(status(&service, from("u", "none")).await, 401);

    let (u, t) = (Key::from("u"), Key::from("t"));
    let keys = [u.within(&t), t.within(&t), Key::global(), u.within(&Key::global()), t];
    let names = ["user", "tenant", "all", "user", "tenant"];
    let mut left = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let policy = named(limits[at % 3], names[at]);
        left.push(memory.decide(StorageRequest::new(&policy, key, Op::Peek, 1)).await.unwrap().remaining());
    }
    assert_eq!(left[..4], [0, 8, 1, 0]);
    let usage = layer.usage(&from("u", "t")).await.unwrap().unwrap();
    assert_eq!(usage.members().map(|(_, decision)| decision.remaining()).collect::<Vec<_>>(), [0, 8, 1]);
}

/// A Redis Cluster could not decide on such a key together with others.
#[tokio::test]
async fn key_of_an_extractor_that_falls_back_to_all_clients_is_within_the_tenant() {
    let key = Header::new("x-user").or(Global::new());
    let layer = RateLimitLayer::new(named("fixed-window 1/minute", "user"), key).within(Header::new("x-tenant"));
    let service = layer.layer(Inner::default());
    let of = |tenant| Request::get("/").header("x-tenant", tenant).body(()).unwrap();
    for (tenant, expected) in [("t", 200), ("t", 429), ("other", 200)] {
        assert_eq!(status(&service, of(tenant)).await, expected, "{tenant}");
    }
}

#[tokio::test]
async fn one_key_can_be_within_another() {
    let layer = RateLimitLayer::new(named("1/minute", "user"), Header::new("x-user")).within(Header::new("x-tenant"));
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, from("u", "t")).await, 200);
    assert_eq!(status(&service, from("u", "t")).await, 429);
    assert_eq!(status(&service, from("u", "other")).await, 200);
    let missing = Request::get("/").header("x-user", "u").body(()).unwrap();
    assert_eq!(status(&service, missing).await, 400, "the extractor returns an error");
}
