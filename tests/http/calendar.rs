//! A plan of 1,000 requests per month, from the day on which each tenant has signed up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Inner, ask, memory_with_manual_clock, with};
use http::HeaderValue;
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::{
    BoxError, CalendarWindow, Headers, Key, OnError, PeerIp, Policy, PolicyLookup, Quota, RateLimitLayer, Tenant,
};

const HOUR: u64 = 3_600;
const DAY: u64 = 24 * HOUR;

/// Returns the day of the sign-up and the time zone of a tenant.
fn account(tenant: &HeaderValue) -> Result<(u8, &'static str), BoxError> {
    match tenant.as_bytes() {
        b"berlin" => Ok((15, "Europe/Berlin")),
        b"tokyo" => Ok((31, "Asia/Tokyo")),
        _ => Err("unknown tenant".into()),
    }
}

#[tokio::test]
async fn each_tenant_has_the_month_of_its_sign_up_in_its_zone() {
    let amount = Arc::new(AtomicU32::new(1_000));
    let current = Arc::clone(&amount);
    let tenants = PolicyLookup::new(
        |head: &Head<'_>| head.headers.get("x-tenant").cloned(),
        move |tenant: HeaderValue| {
            let amount = current.load(Ordering::Relaxed);
            async move {
                let (day, zone) = account(&tenant)?;
                let window = CalendarWindow::new().first_day(day)?.in_zone(zone)?;
                let plan = Policy::new(window, Quota::per_month(amount)).with_name("plan");
                Ok::<_, BoxError>(Tenant::from(plan).key(Key::from(tenant.as_bytes())))
            }
        },
    );
    let (storage, clock) = memory_with_manual_clock();
    let service = RateLimitLayer::new(tenants.clone(), PeerIp::new())
        .storage(storage, OnError::Refuse)
        .headers(Headers::draft11())
        .layer(Inner::default());
    let fields = async |tenant: &'static str| {
        let response = ask(&service, with("x-tenant", tenant)).await;
        ["ratelimit-policy", "ratelimit"].map(|name| response.headers()[name].to_str().unwrap().to_owned())
    };
    // On 4 October, at 02:00 in Berlin and 09:00 in Tokyo. The month in Berlin is from 15 September to
    // 15 October, and that in Tokyo from 30 September to 31 October.
    let berlin = [format!("\"plan\";q=1000;w={}", 30 * DAY), format!("\"plan\";r=999;t={}", 11 * DAY - 2 * HOUR)];
    assert_eq!(fields("berlin").await, berlin);
    let tokyo = [format!("\"plan\";q=1000;w={}", 31 * DAY), format!("\"plan\";r=999;t={}", 27 * DAY - 9 * HOUR)];
    assert_eq!(fields("tokyo").await, tokyo);
    // A larger plan keeps the spent units, and the next month begins on its day. It has an hour more.
    amount.store(5_000, Ordering::Relaxed);
    tenants.clear();
    clock.advance(Duration::from_secs(11 * DAY - 2 * HOUR - 1));
    assert_eq!(fields("berlin").await[1], "\"plan\";r=4998;t=1");
    clock.advance(Duration::from_secs(1));
    let berlin = [format!("\"plan\";q=5000;w={}", 31 * DAY + HOUR), format!("\"plan\";r=4999;t={}", 31 * DAY + HOUR)];
    assert_eq!(fields("berlin").await, berlin);
}
