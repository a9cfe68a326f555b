//! Forgetting looked-up tenants, and the cache that clones of a lookup share.

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::future::ready;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::{Inner, ask, policy, poll, status};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt};
use tower_ratelimit::extract::Head;
use tower_ratelimit::{MemoryStorage, OnError, Tenant};

use crate::lookup::{Behavior, Database, Lookup, QUERY, from, layer, limit};

fn service(lookup: &Lookup) -> tower_ratelimit::RateLimit<Inner> {
    layer(lookup.clone()).storage(MemoryStorage::new(), OnError::Refuse).layer(Inner::default())
}

/// The header value of an id.
fn id(tenant: &'static str) -> http::HeaderValue {
    http::HeaderValue::from_static(tenant)
}

#[tokio::test(start_paused = true)]
async fn forgotten_tenant_is_looked_up_again_and_others_stay() {
    let database = Database::new();
    let lookup = database.lookup();
    lookup.forget(&id("a"));
    let service = service(&lookup);
    for tenant in ["a", "b"] {
        assert_eq!(status(&service, from(tenant)).await, 200);
    }
    database.plan("a", "50/hour");
    database.plan("b", "70/hour");
    assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
    lookup.forget(&id("a"));
    assert_eq!(limit(&ask(&service, from("a")).await), Some("50"));
    assert_eq!(limit(&ask(&service, from("b")).await), Some("7"));
    lookup.clear();
    assert_eq!(limit(&ask(&service, from("b")).await), Some("70"));
    assert_eq!(limit(&ask(&service, from("a")).await), Some("50"));
    assert_eq!(database.queries(), 2 + 1 + 2);
}

#[tokio::test(start_paused = true)]
async fn last_good_result_is_forgotten_too() {
    let database = Database::new();
    let lookup = database.lookup().ttl(Duration::from_secs(10));
    let service = service(&lookup);
    let forget_a = |lookup: &Lookup| lookup.forget(&id("a"));
    for forget in [forget_a, Lookup::clear] {
        database.set(Behavior::Works);
        assert_eq!(status(&service, from("a")).await, 200);
        database.set(Behavior::Fails);
        sleep(Duration::from_secs(10)).await;
        assert_eq!(status(&service, from("a")).await, 200, "the last good result is used");
        forget(&lookup);
        assert_eq!(status(&service, from("a")).await, 503);
    }
}

/// The lookup in flight may have read the tenant before it was changed.
#[tokio::test(start_paused = true)]
async fn result_of_a_look_up_that_was_in_flight_is_not_cached() {
    let database = Database::new();
    let lookup = database.lookup();
    let service = service(&lookup);
    let forget_a = |lookup: &Lookup| lookup.forget(&id("a"));
    for (forget, is_asked_meanwhile) in [(forget_a as fn(&Lookup), false), (forget_a, true), (Lookup::clear, false)] {
        lookup.clear();
        database.queries();
        database.plan("a", "5/hour");
        let mut waiting = Box::pin(service.clone().oneshot(from("a")));
        assert!(poll(&mut waiting).is_pending());
        sleep(QUERY / 2).await;
        forget(&lookup);
        let mut next = Box::pin(service.clone().oneshot(from("a")));
        if is_asked_meanwhile {
            assert!(poll(&mut next).is_pending());
        }
        // The first lookup reads the old plan, and the second one reads the new plan.
        assert_eq!(limit(&waiting.await.unwrap()), Some("5"));
        database.plan("a", "50/hour");
        assert!(poll(&mut next).is_pending(), "it waits for a lookup that began later");
        assert_eq!(limit(&next.await.unwrap()), Some("50"));
        assert_eq!(limit(&ask(&service, from("a")).await), Some("50"));
        assert_eq!(database.queries(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn look_up_that_times_out_after_it_was_forgotten_keeps_the_newer_result() {
    let database = Database::new();
    let lookup = database.lookup();
    let service = service(&lookup);
    database.set(Behavior::Hangs);
    let mut waiting = Box::pin(service.clone().oneshot(from("a")));
    assert!(poll(&mut waiting).is_pending());
    sleep(QUERY * 2).await;
    lookup.forget(&id("a"));
    database.set(Behavior::Works);
    assert_eq!(status(&service, from("a")).await, 200);
    let asked = Instant::now();
    assert_eq!(waiting.await.unwrap().status(), 200, "it uses the newer result");
    assert!(asked.elapsed() > Duration::from_millis(900), "{:?}", asked.elapsed());
    assert_eq!(limit(&ask(&service, from("a")).await), Some("5"));
    assert_eq!(database.queries(), 2);
}

#[tokio::test(start_paused = true)]
async fn forgotten_lookups_run_on_within_max_lookups_and_do_not_count_as_waiting() {
    let database = Database::new();
    let lookup = database.lookup().max_lookups(2);
    let service = service(&lookup);
    database.set(Behavior::Hangs);
    let mut requests = Vec::new();
    for round in 0..3 {
        for i in 0..35 {
            let mut request = Box::pin(service.clone().oneshot(from(&i.to_string())));
            // Two lookups run, and 32 wait.
            assert_eq!(poll(&mut request).is_pending(), i < 34, "{i} in round {round}");
            requests.push(request);
        }
        sleep(QUERY * 2).await;
        lookup.clear();
    }
    assert_eq!(database.queries(), 2, "the first two lookups keep their permits");
}

#[tokio::test(start_paused = true)]
async fn clones_share_a_cache_until_a_setting_changes() {
    let database = Database::new();
    let lookup = database.lookup();
    let (first, second) = (service(&lookup), service(&lookup));
    for service in [&first, &second] {
        assert_eq!(status(service, from("a")).await, 200);
    }
    assert_eq!(database.queries(), 1);
    let other = service(&lookup.clone().ttl(Duration::from_secs(120)));
    assert_eq!(status(&other, from("a")).await, 200);
    assert_eq!(database.queries(), 1);
    lookup.clear();
    for service in [&first, &second, &other] {
        assert_eq!(status(service, from("a")).await, 200);
    }
    assert_eq!(database.queries(), 1, "the other cache is not cleared");
}

/// A value or an error that forgets the tenant when it is dropped.
#[derive(Clone)]
struct Forgets(Arc<OnceLock<Lookup>>);

impl Drop for Forgets {
    fn drop(&mut self) {
        if let Some(lookup) = self.0.get() {
            lookup.forget(&id("a"));
        }
    }
}

impl fmt::Debug for Forgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forgets")
    }
}

impl fmt::Display for Forgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("forgets")
    }
}

impl Error for Forgets {}

/// Guards against this defect: values are dropped under the lock that their `Drop` may need.
#[tokio::test(start_paused = true)]
async fn dropped_value_may_use_the_lookup() {
    let configured = |configure: fn(Lookup) -> Lookup| {
        let own = Arc::new(OnceLock::new());
        let value = Forgets(Arc::clone(&own));
        let lookup = configure(Lookup::new(
            |head: &Head<'_>| head.headers.get("x-tenant").cloned(),
            move |_| {
                let tenant = Tenant::from(policy("9/hour")).extension(value.clone());
                async { Ok::<_, Infallible>(tenant) }
            },
        ));
        own.set(lookup.clone()).ok().unwrap();
        (service(&lookup), lookup)
    };
    let (service, _) = configured(|lookup| lookup.ttl(Duration::from_secs(1)));
    for _ in 0..2 {
        assert_eq!(status(&service, from("a")).await, 200, "replaced");
        sleep(Duration::from_secs(2)).await;
    }
    let (service, _) = configured(|lookup| lookup.max_tenants(1));
    for tenant in ["a", "b", "c"] {
        assert_eq!(status(&service, from(tenant)).await, 200, "evicted");
    }
    let own = Arc::new(OnceLock::new());
    let (error, queries) = (Forgets(Arc::clone(&own)), AtomicUsize::new(0));
    let lookup = Lookup::new(
        |head: &Head<'_>| head.headers.get("x-tenant").cloned(),
        move |_| {
            let is_first = queries.fetch_add(1, Ordering::SeqCst) == 0;
            ready(if is_first { Ok(policy("9/hour")) } else { Err(error.clone()) })
        },
    );
    let lookup = lookup.ttl(Duration::from_secs(1));
    own.set(lookup.clone()).ok().unwrap();
    let failing = self::service(&lookup);
    for _ in 0..2 {
        assert_eq!(status(&failing, from("a")).await, 200, "an error, replaced by the last good result");
        sleep(Duration::from_secs(2)).await;
    }
    let (service, lookup) = configured(|lookup| lookup);
    for forget in [|lookup: &Lookup| lookup.forget(&id("a")), Lookup::clear] {
        assert_eq!(status(&service, from("a")).await, 200);
        forget(&lookup);
    }
}
