//! Lists that the library writes, for random policies.

use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use serde_json::{Value, json};
use sfv::{BareItem, Item};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    Decision, Global, Headers, InFlightLayer, Key, Limit, MemoryStorage, OnError, Policy, RateLimitLayer, Slots,
};

use crate::random::{Numbers, random_limit};
use crate::read::random_name;
use crate::{LISTS, Lines, members, text, thousandths};

fn random_policy(numbers: &mut Numbers) -> Policy {
    let mut limit = || {
        let limit = random_limit(numbers);
        let name = random_name(numbers);
        let is_named = numbers.below(2) == 0 && !name.is_empty();
        let first = numbers.below(4) == 0;
        (if is_named { limit.named(name) } else { limit }, first)
    };
    let mut policy = Policy::from(limit().0);
    while let (limit, true) = limit() {
        // Two limits with the same name are an error.
        policy = policy.clone().try_with(limit).unwrap_or(policy);
    }
    match random_name(numbers) {
        name if numbers.below(2) == 0 => policy.clone().try_with_name(name).unwrap_or(policy),
        _ => policy,
    }
}

/// Returns the fields of a response by a layer.
async fn fields<L, S, B>(layer: &L) -> HeaderMap
where
    L: Layer<Inner, Service = S>,
    S: tower::Service<Request<()>, Response = Response<B>, Error = Infallible>,
{
    let inner: Inner = service_fn(answer);
    layer.layer(inner).oneshot(Request::new(())).await.unwrap().into_parts().0.headers
}

type Answer = std::future::Ready<Result<Response<String>, Infallible>>;
type Inner = tower::util::ServiceFn<fn(Request<()>) -> Answer>;

fn answer(_: Request<()>) -> Answer {
    ready(Ok(Response::default()))
}

/// The seconds in which the whole capacity refills, rounded up.
fn window(limit: &Limit) -> u128 {
    let quota = limit.quota();
    let micros = u128::from(limit.capacity()) * u128::from(quota.period_micros());
    micros.div_ceil(u128::from(quota.amount()) * 1_000_000)
}

fn seconds(duration: Duration) -> u128 {
    duration.as_nanos().div_ceil(1_000_000_000)
}

/// Returns the member that the crate `sfv` reads, as `lists.py` does.
fn read(item: &Item) -> Value {
    let numbers: serde_json::Map<_, _> = item
        .params
        .iter()
        .map(|(name, value)| {
            let value = match value {
                BareItem::Integer(integer) => json!(i64::from(*integer)),
                BareItem::ByteSequence(bytes) => json!(bytes),
                BareItem::String(text) => json!(text.as_str()),
                other => panic!("{} is {other:?}", name.as_str()),
            };
            (name.as_str().to_owned(), value)
        })
        .collect();
    json!([text(item), numbers])
}

/// Checks one field against the crate `sfv`, and adds it to the file for `lists.py`.
fn check(lines: &mut Lines, headers: &HeaderMap, name: &str, expected: &[Value]) {
    let line = headers[name].to_str().unwrap();
    let items = members(line).unwrap_or_else(|| panic!("invalid: {line}"));
    assert!(items.iter().all(|item| thousandths(item, "r").is_none_or(|left| left >= 0)));
    let read: Vec<Value> = items.iter().map(read).collect();
    assert_eq!(read, expected, "{line}");
    lines.add(&json!({ "list": line, "members": read }));
}

#[tokio::test(start_paused = true)]
async fn written_lists_are_read_by_sfv_as_they_are_meant() {
    let (mut numbers, mut lines) = (Numbers(88_172_645_463_325_252), Lines::create("written.jsonl"));
    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
    let mut written = 0;
    for _ in 0..LISTS / 2 {
        clock.advance(Duration::from_micros(numbers.below(5_000_000)));
        let policy = random_policy(&mut numbers);
        let partitioned = numbers.below(2) == 0;
        let headers = Headers::draft11();
        let headers = if partitioned { headers.partition_key([7; 16]) } else { headers };
        let cost = u32::try_from(numbers.below(3)).unwrap();
        let layer = RateLimitLayer::new(policy.clone(), Global::new())
            .storage(storage.clone(), OnError::Refuse)
            .cost(move |_| cost)
            .headers(headers);
        let fields = fields(&layer).await;
        let now: Decision = layer.limiter().unwrap().peek(&Key::global()).await.unwrap();
        let (mut policies, mut limits) = (Vec::new(), Vec::new());
        // The same for each member, because the key is the same.
        let partition = members(fields["ratelimit"].to_str().unwrap()).unwrap()[0].params.get("pk").cloned();
        let partition = partition.map(|value| if let BareItem::ByteSequence(bytes) = value { bytes } else { vec![] });
        assert_eq!(partition.as_ref().map(Vec::len), partitioned.then_some(16));
        for (position, (limit, status)) in policy.limits().iter().zip(now.statuses()).enumerate() {
            let name = policy.limit_name(position).into_owned();
            let (mut policy, mut limit) = (
                json!({ "q": status.capacity(), "w": u64::try_from(window(limit)).unwrap() }),
                json!({ "r": status.remaining(), "t": u64::try_from(seconds(status.reset_after())).unwrap() }),
            );
            if let Some(partition) = &partition {
                policy["pk"] = json!(partition);
                limit["pk"] = json!(partition);
            }
            policies.push(json!([name, policy]));
            limits.push(json!([name, limit]));
        }
        check(&mut lines, &fields, "ratelimit-policy", &policies);
        check(&mut lines, &fields, "ratelimit", &limits);
        written += 2;
    }
    for _ in 0..500 {
        let name = random_name(&mut numbers);
        let name = if name.is_empty() { "slots".to_owned() } else { name };
        let slots = 1 + u32::try_from(numbers.below(1_000_000)).unwrap();
        let layer = InFlightLayer::new(Slots::new(slots).with_name(&*name), Global::new()).headers(Headers::draft11());
        let fields = fields(&layer).await;
        check(&mut lines, &fields, "ratelimit-policy", &[json!([name, { "q": slots, "qu": "concurrent-requests" }])]);
        check(&mut lines, &fields, "ratelimit", &[json!([name, { "r": slots - 1 }])]);
        written += 2;
    }
    println!("{written} lists that this crate writes for random policies: sfv reads the same names and numbers");
}
