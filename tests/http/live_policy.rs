//! Layers whose policy changes while they serve requests.

use std::sync::{Arc, Mutex};

use common::{Behavior, FakeStorage, Inner, ask, get, memory_with_manual_clock, numbers, policy, slow, status, with};
use http::Response;
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{Leases, StorageFuture, StorageRequest};
use tower_ratelimit::{
    ConfigError, Decision, Event, Global, Header, Headers, Key, Lint, LivePolicy, MemoryStorage, OnError, Policy,
    RateLimitLayer, Storage, policy_by,
};

fn api(text: &str) -> Policy {
    policy(text).with_name("api")
}

fn limit<B>(response: &Response<B>) -> &str {
    response.headers()["x-ratelimit-limit"].to_str().unwrap()
}

#[tokio::test]
async fn next_request_uses_the_new_policy() {
    let live = LivePolicy::new(api("fixed-window 2/hour"));
    let layer = RateLimitLayer::new(live.clone(), Global::new()).storage(memory_with_manual_clock().0, OnError::Refuse);
    let service = layer.layer(Inner::default());
    let other = layer.clone().headers(Headers::draft11()).layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    assert_eq!(status(&service, get("/")).await, 200);
    assert_eq!(status(&service, get("/")).await, 429);
    live.set(api("fixed-window 4/hour")).unwrap();
    let response = ask(&service, get("/")).await;
    assert_eq!((limit(&response), numbers(&response).unwrap()[1]), ("4", 1));
    let response = ask(&other, get("/")).await;
    assert_eq!(response.headers()["ratelimit-policy"], "\"api\";q=4;w=3600");
    live.set(api("fixed-window 1/hour")).unwrap();
    assert_eq!(status(&service, get("/")).await, 429);
}

/// A request whose policy changes between its hit and its response uses the old policy throughout.
#[tokio::test(start_paused = true)]
async fn request_uses_one_policy_to_its_end() {
    let live = LivePolicy::new(api("fixed-window 9/hour"));
    let (memory, _clock) = memory_with_manual_clock();
    let storage = slow(memory);
    storage.set(Behavior::WorksAfter(std::time::Duration::from_secs(1)));
    let observed = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&observed);
    let layer = RateLimitLayer::new(live.clone(), Global::new())
        .storage(storage, OnError::Refuse)
        .headers(Headers::x_rate_limit().and(Headers::draft11()))
        .charge_when(|_| false)
        .observer(move |event: &Event<'_>| {
            events.lock().unwrap().push((event.outcome(), event.policy.limits()[0].capacity()));
        });
    let service = layer.layer(Inner::default());
    let request = tokio::spawn(async move { ask(&service, get("/")).await });
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    live.set(api("fixed-window 5/minute; 100/day")).unwrap();
    let response = request.await.unwrap();
    assert_eq!(limit(&response), "9");
    assert_eq!(response.headers()["ratelimit-policy"], "\"api\";q=9;w=3600");
    tokio::time::sleep(std::time::Duration::from_secs(5)).await;
    assert_eq!(*observed.lock().unwrap(), [("admitted", 9), ("refunded", 9)]);
}

#[tokio::test]
async fn chosen_policies_can_be_live() {
    let (free, paid) =
        (LivePolicy::new(policy("2/hour").with_name("free")), LivePolicy::new(policy("5/hour").with_name("paid")));
    let choose = {
        let (free, paid) = (free.clone(), paid.clone());
        move |head: &Head<'_>| match head.headers.get("x-plan")?.as_bytes() {
            b"paid" => Some(paid.clone()),
            _ => Some(free.clone()),
        }
    };
    let service = RateLimitLayer::new(policy_by(choose), Global::new()).layer(Inner::default());
    assert_eq!(limit(&ask(&service, with("x-plan", "paid")).await), "5");
    paid.set(policy("50/hour").with_name("paid")).unwrap();
    assert_eq!(limit(&ask(&service, with("x-plan", "paid")).await), "50");
    assert_eq!(limit(&ask(&service, with("x-plan", "free")).await), "2");
    assert!(!ask(&service, get("/")).await.headers().contains_key("x-ratelimit-limit"));
}

#[tokio::test]
async fn layers_reject_a_policy_that_their_storage_cannot_keep() {
    let live = LivePolicy::new(api("5/hour"));
    let layer = RateLimitLayer::new(live.clone(), Global::new());
    live.set(api("500/hour")).unwrap();
    live.set(api("5/hour")).unwrap();
    let small = FakeStorage::around(MemoryStorage::new()).holding_at_most(50);
    // Options that are set after the storage keep the registration.
    let layer = layer.storage(small, OnError::Refuse).headers(Headers::none()).shadow();
    let service = layer.layer(Inner::default());
    drop(layer);
    assert!(live.set(api("51/hour")).is_err());
    assert!(live.set(api("5/hour; shadow 51/hour")).is_err());
    assert_eq!(live.get(), api("5/hour"));
    drop(service);
    live.set(api("51/hour")).unwrap();
}

#[tokio::test]
async fn limiter_of_a_layer_follows_the_policy() {
    let live = LivePolicy::new(api("5/hour"));
    let limiter = RateLimitLayer::new(live.clone(), Header::new("x-client")).limiter().unwrap();
    live.set(api("7/hour")).unwrap();
    assert_eq!(limiter.peek(&"a".into()).await.unwrap().remaining(), 7);
}

#[tokio::test]
async fn new_policy_is_linted_once() {
    let live = LivePolicy::new(api("5/day"));
    let lints = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&lints);
    let layer = RateLimitLayer::new(live.clone(), Header::new("x-client"))
        .charge_when(|_| true)
        .on_lint(move |lint| kept.lock().unwrap().push(lint));
    let service = layer.layer(Inner::default());
    // More requests than are inspected after the start.
    for _ in 0..1_100 {
        let _ = status(&service, with("x-client", "a")).await;
    }
    assert_eq!(*lints.lock().unwrap(), []);
    for text in ["elastic-window 6/day", "5/day", "elastic-window 7/day"] {
        live.set(api(text)).unwrap();
        let _ = status(&service, with("x-client", "a")).await;
    }
    assert_eq!(*lints.lock().unwrap(), [Lint::ElasticWindowRefunded]);
}

#[tokio::test]
async fn added_shadow_limits_are_decided_on_the_next_request() {
    let live = LivePolicy::new(api("5/day"));
    let observed = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&observed);
    let layer = RateLimitLayer::new(live.clone(), Global::new()).observer(move |event: &Event<'_>| {
        events.lock().unwrap().push(event.policy.identity().to_owned());
    });
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, get("/")).await, 200);
    live.set(api("5/day; shadow 1/day")).unwrap();
    assert_eq!(status(&service, get("/")).await, 200);
    assert_eq!(*observed.lock().unwrap(), ["api", "api", "api\u{b7}shadow-1"]);
}

/// Decides on several keys only if they are within one key, like a Redis Cluster.
#[derive(Clone, Debug)]
struct LikeCluster(MemoryStorage);

impl Storage for LikeCluster {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        self.0.decide(request)
    }

    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        self.0.decide_all(members)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.0.clear(policy, key)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.0.settle(policy, key, decision, actual)
    }

    fn validate_members(&self, _: &[Policy]) -> Result<(), ConfigError> {
        Ok(())
    }

    fn needs_outer_key(&self, _: Option<&str>) -> bool {
        true
    }
}

/// A layer whose policies are leased by name, or whose keys are decided together.
#[tokio::test]
async fn name_that_several_keys_do_not_support_is_rejected() {
    let named = |text: &str, name: &str| policy(text).with_name(name);
    let [user, tenant, all] = ["user", "tenant", "all"].map(|name| LivePolicy::new(named("fixed-window 9/hour", name)));
    let leases = Leases::new(LikeCluster(MemoryStorage::new()), 100).only("all");
    let layer = RateLimitLayer::new(user.clone(), Header::new("x-client"))
        .within(Header::new("x-tenant"))
        .and(tenant.clone(), Header::new("x-tenant"))
        .and(all.clone(), Global::new())
        .storage(leases, OnError::Refuse);
    let error = all.set(named("fixed-window 9/hour", "everyone")).unwrap_err().to_string();
    assert!(error.contains(r#".only("all")"#), "{error}");
    let error = user.set(named("fixed-window 9/hour", "all")).unwrap_err().to_string();
    assert!(error.contains(r#"two policies of the layer are "all""#), "{error}");
    assert_eq!((user.get().name(), all.get().name()), (Some("user"), Some("all")), "the old policies stay");
    all.set(named("fixed-window 8/hour", "all")).unwrap();
    user.set(named("fixed-window 9/hour", "client")).unwrap();
    let mut request = with("x-client", "a");
    request.headers_mut().insert("x-tenant", "t".parse().unwrap());
    assert_eq!(status(&layer.layer(Inner::default()), request).await, 200);

    // Policies that change together are compared after the change.
    let swapped = [(&user, named("9/hour", "tenant")), (&tenant, named("9/hour", "client"))];
    user.set(swapped[0].1.clone()).unwrap_err();
    LivePolicy::set_all(swapped).unwrap();
    let error = LivePolicy::set_all([(&user, named("9/hour", "x")), (&tenant, named("9/hour", "x"))]).unwrap_err();
    assert!(error.to_string().contains(r#"two policies of the layer are "x""#), "{error}");

    // Another storage replaces the rules of the first one.
    let layer = layer.storage(MemoryStorage::new(), OnError::Refuse);
    all.set(named("9/hour", "everyone")).unwrap();
    user.set(named("9/hour", "everyone")).unwrap_err();
    drop(layer);
    user.set(named("9/hour", "everyone")).unwrap();
}
