//! Executes one code path a given number of times. Nothing else depends on that number, so the
//! difference between two runs is the cost of the path. Run by `scripts/instructions`. The clock is
//! manual, so the counts are reproducible.
//!
//! The arguments are a path and a number. Without arguments, it lists the paths.

mod support;

use std::convert::Infallible;
use std::future::ready;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::storage::{ManualClock, StorageRequest};
use tower_ratelimit::{
    Decision, FixedWindow, Headers, InFlightLayer, IntoPolicy, Key, LivePolicy, LocalLimiter, Lockout, MemoryStorage,
    Meter, Op, PeerIp, Policy, Quota, RateLimitLayer, RateLimiter, SlidingWindowCounter, Storage, TokenBucket,
};

use support::hits::address;
use support::limiters::{Generous, admits, bursting, full_log, several, stingy, with_manual_clock};
use support::services::{BURST, Hello, answer, request};

/// The number of inputs that are created. It does not depend on the number of calls.
const INPUTS: u32 = 20_000;

const MINUTE: Duration = Duration::from_secs(60);

type Path = fn(usize);

const PATHS: [(&str, Path); 26] = [
    ("admit token bucket", |times| admit(TokenBucket::generous(), times)),
    ("admit live token bucket", |times| admit(LivePolicy::new(TokenBucket::generous()), times)),
    ("admit three limits", |times| admit(several(3, u32::MAX), times)),
    ("admit refusal", admit_refusal),
    ("local hit token bucket", local_hit),
    ("hit token bucket", |times| hit(TokenBucket::generous(), times)),
    ("hit sliding window counter", hit_after_a_previous_window),
    ("hit fixed window", |times| hit(FixedWindow::generous(), times)),
    ("hit lockout", |times| hit(Policy::new(Lockout::lasting(MINUTE), Quota::per_minute(u32::MAX)), times)),
    ("hit moving window", hit_moving_window),
    ("hit live token bucket", |times| hit(LivePolicy::new(TokenBucket::generous()), times)),
    ("hit three limits", |times| hit(several(3, u32::MAX), times)),
    ("hit three keys", hit_three_keys),
    ("refuse three keys", refuse_three_keys),
    ("refusal", refusal),
    ("new key", new_key),
    ("new key at the cap", new_key_at_the_cap),
    ("no middleware", |times| serve(Hello, times)),
    ("middleware no headers", |times| serve(layer(bursting(BURST)).headers(Headers::none()).layer(Hello), times)),
    ("middleware live no headers", |times| {
        serve(layer(LivePolicy::new(bursting(BURST))).headers(Headers::none()).layer(Hello), times);
    }),
    ("middleware three headers", |times| serve(layer(bursting(BURST)).layer(Hello), times)),
    ("middleware refusal", |times| serve(layer(stingy::<TokenBucket>()).layer(Hello), times)),
    ("meter hit", meter_hit),
    ("in flight no headers", |times| serve(in_flight().headers(Headers::none()).layer(Hello), times)),
    ("in flight two headers", |times| serve(in_flight().layer(Hello), times)),
    ("in flight refusal", in_flight_refusal),
];

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    if let [name, times] = &*arguments {
        let path = PATHS
            .iter()
            .find(|(path, _)| path == name)
            .expect("an unknown path; run without arguments to list the paths")
            .1;
        path(times.parse().expect("a number of times"));
    } else {
        PATHS.iter().for_each(|(name, _)| println!("{name}"));
    }
}

fn local_hit(times: usize) {
    let (limiter, _) = with_manual_clock(TokenBucket::generous());
    let key = alice();
    (0..times).for_each(|_| assert!(admits(&limiter, &key)));
}

fn hit(policy: impl IntoPolicy, times: usize) {
    let (limiter, _) = with_manual_clock(policy);
    repeat(limiter, times, true);
}

/// The limits of `several`, each with its own key.
fn hit_three_keys(times: usize) {
    three_keys(TokenBucket::generous(), true, times);
}

fn refuse_three_keys(times: usize) {
    three_keys(stingy::<TokenBucket>(), false, times);
}

/// Hits two keys with limits that admit every hit, and one under `last`, which admits only the first hit
/// or all.
fn three_keys(last: Policy, admits: bool, times: usize) {
    let storage = MemoryStorage::builder().clock(ManualClock::default()).build().expect("the configuration is valid");
    let policies = [TokenBucket::generous().with_name("user"), TokenBucket::generous().with_name("tenant"), last];
    let keys = [1, 2, 3].map(address);
    let members = [0, 1, 2].map(|at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, 1));
    for at in 0..times {
        let mut deciding = storage.decide_all(&members);
        match Pin::new(&mut deciding).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(decisions)) => {
                assert!(decisions.iter().all(Decision::is_admitted) == (admits || at == 0));
            }
            _ => panic!("a memory storage never waits and never fails"),
        }
    }
}

fn admit(policy: impl IntoPolicy, times: usize) {
    let (limiter, _) = with_manual_clock(policy);
    let key = alice();
    (0..times).for_each(|_| assert!(limiter.admit(&key)));
}

fn admit_refusal(times: usize) {
    let (limiter, _) = with_manual_clock(stingy::<TokenBucket>());
    let key = alice();
    // The second hit publishes the refusal, and the others read it.
    assert!(limiter.admit(&key) && !limiter.admit(&key));
    (0..times).for_each(|_| assert!(!limiter.admit(&key)));
}

fn hit_after_a_previous_window(times: usize) {
    let (limiter, clock) = with_manual_clock(SlidingWindowCounter::generous());
    repeat(limiter.clone(), 10, true);
    clock.advance(Duration::from_millis(4_500));
    repeat(limiter, times, true);
}

fn hit_moving_window(times: usize) {
    let key = alice();
    let (limiter, clock, pace) = full_log(100, &key);
    let limiter = RateLimiter::from(limiter);
    for _ in 0..times {
        clock.advance(pace);
        assert!(awaited(&limiter, &key));
    }
}

fn refusal(times: usize) {
    let (limiter, _) = with_manual_clock(stingy::<TokenBucket>());
    repeat(limiter.clone(), 1, true);
    repeat(limiter, times, false);
}

fn new_key(times: usize) {
    let limiter = RateLimiter::from(with_manual_clock(TokenBucket::generous()).0);
    let keys: Vec<_> = (0..INPUTS).map(address).collect();
    keys[..times].iter().for_each(|key| assert!(awaited(&limiter, key)));
    // Exit without dropping anything, because the cost of that depends on the number of hits.
    std::process::exit(0);
}

fn new_key_at_the_cap(times: usize) {
    const CAP: usize = 4_096;
    let storage = MemoryStorage::builder()
        .max_keys(CAP)
        .clock(ManualClock::default())
        .build()
        .expect("the configuration is valid");
    let limiter = LocalLimiter::with_storage(TokenBucket::generous(), storage);
    let keys: Vec<_> = (0..INPUTS).map(address).collect();
    keys[..CAP + times].iter().for_each(|key| assert!(limiter.admit(key)));
    std::process::exit(0);
}

fn repeat(limiter: LocalLimiter, times: usize, admitted: bool) {
    let (limiter, key) = (RateLimiter::from(limiter), alice());
    (0..times).for_each(|_| assert_eq!(awaited(&limiter, &key), admitted));
}

/// Makes one decision as `.await` does, and reads its result.
#[inline]
fn awaited(limiter: &RateLimiter, key: &Key) -> bool {
    let mut deciding = limiter.hit(key);
    match Pin::new(&mut deciding).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(decision)) => decision.is_admitted(),
        _ => panic!("a memory storage never waits and never fails"),
    }
}

fn alice() -> Key {
    address(1)
}

/// Hits of a handler, after the response to its request.
fn meter_hit(times: usize) {
    let handler = service_fn(|request: Request<Body>| {
        let mut response = Response::new(Body::empty());
        let meter = request.extensions().get::<Meter>().expect("the layer offers a meter");
        response.extensions_mut().insert(meter.clone());
        ready(Ok::<_, Infallible>(response))
    });
    let mut service = layer(TokenBucket::generous()).cost(|_| 0).meter().layer(handler);
    let meter = answer(&mut service, request()).extensions_mut().remove::<Meter>().expect("the handler has it");
    for _ in 0..times {
        let mut hit = meter.hit(1);
        match Pin::new(&mut hit).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(hit)) => assert!(hit.is_admitted()),
            _ => panic!("a memory storage never waits and never fails"),
        }
    }
}

/// A layer with one key, so the row of the key is added and removed with each request.
fn in_flight() -> InFlightLayer {
    InFlightLayer::new(BURST, PeerIp::new())
}

/// The only slot of the key is in use.
fn in_flight_refusal(times: usize) {
    let layer = InFlightLayer::new(1, PeerIp::new());
    let service = layer.layer(Hello);
    mem::forget(service.clone().call(request()));
    assert_eq!(layer.in_use(), 1);
    serve(service, times);
}

fn layer(policy: impl IntoPolicy) -> RateLimitLayer {
    RateLimitLayer::from_limiter(&with_manual_clock(policy).0, PeerIp::new())
}

fn serve<S, B>(mut service: S, times: usize)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut requests = (0..INPUTS).map(|_| request()).collect::<Vec<_>>().into_iter();
    // The first request is admitted, even if all others are refused.
    answer(&mut service, request());
    requests.by_ref().take(times).for_each(|request| drop(answer(&mut service, request)));
    // Exit without dropping anything, as in `new_key`.
    std::process::exit(0);
}
