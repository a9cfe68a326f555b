//! Requests without an id, and tenants that reach the handler.

use std::convert::Infallible;
use std::net::SocketAddr;

use common::{Inner, ask, get, policy, status, with};
use http::{HeaderValue, Request, Response};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::{Extension, Head, KeyError};
use tower_ratelimit::{
    Global, Header, Key, LivePolicy, MemoryStorage, OnError, PeerIp, PolicyLookup, RateLimitLayer, RejectReason, Tenant,
};

use crate::lookup::{Behavior, Database, limit};

/// The plan of an account, which the lookup inserts.
#[derive(Clone)]
struct Plan(&'static str);

fn api_key(head: &Head<'_>) -> Option<HeaderValue> {
    head.headers.get("x-api-key").cloned()
}

fn from_address(last: u8) -> Request<()> {
    let mut request = get("/");
    request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, last], 1234)));
    request
}

/// Looks up the API keys "a" and "b", which are two keys of one account, and "c".
fn accounts() -> PolicyLookup<HeaderValue> {
    PolicyLookup::new(api_key, |key: HeaderValue| async move {
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(match key.as_bytes() {
            b"a" | b"b" => {
                Tenant::from(policy("3/hour").with_name("paid")).key(Key::from(7_u64)).extension(Plan("paid"))
            }
            b"open" => Tenant::from(None::<tower_ratelimit::Policy>).extension(Plan("open")),
            _ => Tenant::from(KeyError::unauthorized("unknown API key")).extension(Plan("unknown")),
        })
    })
}

#[tokio::test]
async fn guests_and_key_holders_share_a_layer() {
    let lookup = accounts().anonymous(policy("1/hour").with_name("guests"));
    let service = RateLimitLayer::new(lookup, PeerIp::new()).layer(Inner::default());
    for address in [1, 2] {
        assert_eq!(limit(&ask(&service, from_address(address)).await), Some("1"));
        assert_eq!(status(&service, from_address(address)).await, 429);
    }
    for (key, remaining) in [("a", "2"), ("b", "1"), ("a", "0")] {
        assert_eq!(ask(&service, with("x-api-key", key)).await.headers()["x-ratelimit-remaining"], remaining);
    }
    assert_eq!(status(&service, with("x-api-key", "b")).await, 429);
    assert_eq!(status(&service, with("x-api-key", "made-up")).await, 401);
}

#[tokio::test(start_paused = true)]
async fn anonymous_requests_need_no_look_up() {
    let database = Database::new();
    database.set(Behavior::Hangs);
    let query = database.clone();
    let lookup = PolicyLookup::new(api_key, move |key| {
        let database = query.clone();
        async move { database.query(key).await }
    });
    let lookup = lookup.anonymous(policy("1/hour"));
    let layer = RateLimitLayer::new(lookup, PeerIp::new()).storage(MemoryStorage::new(), OnError::Refuse);
    let service = layer.layer(Inner::default());
    assert_eq!(status(&service, from_address(1)).await, 200);
    assert_eq!(status(&service, from_address(1)).await, 429);
    assert_eq!(database.queries(), 0);
}

#[tokio::test]
async fn anonymous_requests_are_not_limited_or_rejected_or_follow_a_live_policy() {
    let layer = |lookup| RateLimitLayer::new(lookup, PeerIp::new()).layer(Inner::default());
    let unlimited = layer(accounts());
    for _ in 0..3 {
        assert_eq!(limit(&ask(&unlimited, from_address(1)).await), None);
    }

    let rejecting = layer(accounts().anonymous(KeyError::unauthorized("send an API key in x-api-key")));
    let rejected = ask(&rejecting, from_address(1)).await;
    assert_eq!(
        (rejected.status().as_u16(), &rejected.headers()["www-authenticate"]),
        (401, &HeaderValue::from_static("Bearer"))
    );
    assert_eq!(status(&rejecting, with("x-api-key", "a")).await, 200);

    let live = LivePolicy::new(policy("2/hour").with_name("guests"));
    let following = layer(accounts().anonymous(Tenant::from(live.clone()).key(Key::global())));
    assert_eq!(limit(&ask(&following, from_address(1)).await), Some("2"));
    live.set(policy("3/hour").with_name("guests")).unwrap();
    let response = ask(&following, from_address(2)).await;
    assert_eq!(
        (limit(&response), &response.headers()["x-ratelimit-remaining"]),
        (Some("3"), &HeaderValue::from_static("1"))
    );
}

/// Responds with the plan in the extensions.
async fn plan_of(request: Request<()>) -> Result<Response<String>, Infallible> {
    Ok(Response::new(request.extensions().get().map_or("none", |Plan(plan)| plan).to_owned()))
}

#[tokio::test(start_paused = true)]
async fn extension_of_a_tenant_reaches_the_handler() {
    let guests = Tenant::from(policy("10/hour").with_name("guests")).extension(Plan("guest"));
    let layer = RateLimitLayer::new(accounts().anonymous(guests), PeerIp::new());
    let service = layer.layer(service_fn(plan_of));
    // The second request of each finds the tenant in the cache.
    for _ in 0..2 {
        for (key, plan) in [("a", "paid"), ("open", "open")] {
            let mut request = with("x-api-key", key);
            request.extensions_mut().insert(Plan("from an outer layer"));
            assert_eq!(ask(&service, request).await.into_body(), plan);
        }
        assert_eq!(ask(&service, from_address(1)).await.into_body(), "guest");
    }

    // The decision of a leaky bucket is awaited.
    let delayed = PolicyLookup::new(api_key, |_| async {
        Ok::<_, Infallible>(Tenant::from(policy("leaky-bucket 1/second queue 5")).extension(Plan("delayed")))
    });
    let service = RateLimitLayer::new(delayed, Header::new("x-api-key")).layer(service_fn(plan_of));
    for _ in 0..2 {
        assert_eq!(ask(&service, with("x-api-key", "a")).await.into_body(), "delayed");
    }
}

#[tokio::test]
async fn extension_of_a_tenant_reaches_the_extractor_the_cost_and_the_rejection() {
    let lookup = PolicyLookup::new(api_key, |key: HeaderValue| async move {
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(match key.as_bytes() {
            b"a" | b"b" => Tenant::from(policy("10/hour").with_name("plan")).extension(Plan("team")),
            b"c" => Tenant::from(policy("10/hour").with_name("plan")).extension(Plan("other")),
            _ => Tenant::from(KeyError::unauthorized("unknown API key")).extension(Plan("unknown")),
        })
    });
    let by_plan = Extension::new(|Plan(plan): &Plan| Key::from(*plan));
    let plan_of = |head: &Head<'_>| head.extensions.get().map_or("none", |Plan(plan)| *plan);
    let layer = RateLimitLayer::new(lookup, by_plan)
        .cost(move |head| if plan_of(head) == "team" { 5_u32 } else { 1 })
        .rejection(move |reason: RejectReason<'_>, head: &Head<'_>| {
            Response::builder().status(reason.status()).body(plan_of(head).to_owned()).unwrap()
        });
    let service = layer.clone().layer(Inner::default());
    let usage = || async { layer.usage(&with("x-api-key", "b")).await.unwrap().unwrap().decision().remaining() };
    assert_eq!(usage().await, 10, "the extractor finds the extension after a lookup");
    for (key, remaining) in [("a", "5"), ("b", "0"), ("c", "9")] {
        assert_eq!(ask(&service, with("x-api-key", key)).await.headers()["x-ratelimit-remaining"], remaining);
    }
    assert_eq!(usage().await, 0, "and in the cache");
    for (key, code, plan) in [("a", 429, "team"), ("made-up", 401, "unknown")] {
        let response = ask(&service, with("x-api-key", key)).await;
        assert_eq!((response.status().as_u16(), &**response.body()), (code, plan));
    }
}

#[tokio::test]
async fn request_whose_look_up_failed_has_no_extension() {
    let failing = PolicyLookup::new(api_key, |_| async { Err::<Tenant, _>("the database is down") });
    let layer = RateLimitLayer::new(failing, PeerIp::new()).storage(MemoryStorage::new(), OnError::Admit);
    let service = layer.layer(service_fn(plan_of));
    assert_eq!(ask(&service, with("x-api-key", "a")).await.into_body(), "none");
}

#[tokio::test]
async fn usage_of_a_guest_is_that_of_the_anonymous_policy() {
    let lookup = accounts().anonymous(policy("2/hour").with_name("guests"));
    let layer = RateLimitLayer::new(lookup, PeerIp::new());
    let service = layer.clone().layer(Inner::default());
    assert_eq!(status(&service, from_address(1)).await, 200);
    for (address, remaining) in [(1, 1), (2, 2)] {
        let usage = layer.usage(&from_address(address)).await.unwrap().unwrap();
        assert_eq!(usage.decision().remaining(), remaining);
    }
}

/// Guards against this defect: the keys of looked-up tenants were shared by all outer keys, if the
/// extractor of the layer is that of all clients.
#[tokio::test]
async fn key_of_a_tenant_is_within_the_outer_key() {
    let layer = RateLimitLayer::new(accounts(), Global::new()).within(Header::new("x-tenant"));
    let service = layer.layer(Inner::default());
    let request = |tenant: &'static str| {
        let mut request = with("x-api-key", "a");
        request.headers_mut().insert("x-tenant", HeaderValue::from_static(tenant));
        request
    };
    for remaining in ["2", "1"] {
        for tenant in ["one", "two"] {
            assert_eq!(ask(&service, request(tenant)).await.headers()["x-ratelimit-remaining"], remaining, "{tenant}");
        }
    }
}
