//! What the integration tests share: services, requests, storages that wait or fail, real servers, and the golden vectors.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::missing_panics_doc,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "only the tests of this package use it"
)]

pub mod certificates;
pub mod example_process;
pub mod fake_cas_store;
pub mod flaky_storage;
pub mod gated_storage;
pub mod harness;
pub mod random;
#[cfg(feature = "servers")]
pub mod servers;
pub mod vectors;

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response};
use tower::{Service, ServiceExt};
use tower_ratelimit::storage::{Ask, ManualClock};
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{Decision, Key, MemoryStorage, Policy, Quota, Storage};

/// Where a `ManualClock` stands at first, in seconds since the epoch.
pub const T0: u64 = 1_728_000_000;

/// Every strategy, each with a period of 7 s and an amount of 3 which does not divide it.
pub const EVERY_STRATEGY: [&str; 9] = [
    "fixed-window 3 per 7 seconds",
    "fixed-window-aligned 3 per 7 seconds",
    "elastic-window 3 per 7 seconds",
    "moving-window 3 per 7 seconds",
    "sliding-window-counter 3 per 7 seconds",
    "sliding-window-counter-aligned 3 per 7 seconds",
    "token-bucket 3 per 7 seconds",
    "token-bucket 3 per 7 seconds burst 5",
    "leaky-bucket 3 per 7 seconds queue 0",
];

/// A policy from its text.
pub fn policy(text: &str) -> Policy {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A memory storage whose time stands until it is told to go on.
pub fn standing() -> (MemoryStorage, ManualClock) {
    let clock = ManualClock::default();
    (MemoryStorage::builder().clock(clock.clone()).build().unwrap(), clock)
}

/// Answers 200 and counts its calls, clones included.
#[derive(Clone, Debug, Default)]
pub struct Inner(Arc<AtomicUsize>);

impl Inner {
    pub fn calls(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Service<Request<()>> for Inner {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        self.0.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new("in".to_owned())))
    }
}

pub fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

/// A request with one header field.
pub fn with(name: &str, value: &str) -> Request<()> {
    Request::get("/").header(name, value).body(()).unwrap()
}

/// The response of a clone of the service, polled ready first.
pub async fn ask<S, Q, B>(service: &S, request: Request<Q>) -> Response<B>
where
    S: Service<Request<Q>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    service.clone().oneshot(request).await.unwrap()
}

/// The status of a response, as a number.
pub async fn status<S, Q, B>(service: &S, request: Request<Q>) -> u16
where
    S: Service<Request<Q>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    ask(service, request).await.status().as_u16()
}

/// How many are admitted at one instant.
pub async fn admitted_at_once<S, B>(service: &S) -> u32
where
    S: Service<Request<()>, Response = Response<B>, Error: fmt::Debug> + Clone,
{
    let mut admitted = 0;
    while status(service, get("/")).await == 200 {
        admitted += 1;
        assert!(admitted < 1_000, "no limit at all");
    }
    admitted
}

/// `X-RateLimit-Limit`, `-Remaining` and `-Reset`: all of them, or none.
pub fn numbers<B>(response: &Response<B>) -> Option<[u64; 3]> {
    let all = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"].map(|name| number(response, name));
    assert!(all.iter().all(Option::is_some) || all.iter().all(Option::is_none), "only some of the three: {all:?}");
    let [limit, remaining, reset] = all;
    Some([limit?, remaining?, reset?])
}

pub fn remaining<B>(response: &Response<B>) -> Option<u64> {
    numbers(response).map(|[_, remaining, _]| remaining)
}

pub fn retry_after<B>(response: &Response<B>) -> Option<u64> {
    number(response, "retry-after")
}

/// A field that is there at most once and has nothing but digits in it.
fn number<B>(response: &Response<B>, name: &str) -> Option<u64> {
    let mut values = response.headers().get_all(name).iter();
    let value = values.next()?.to_str().unwrap();
    assert!(values.next().is_none(), "{name} is there twice");
    assert!(value.bytes().all(|byte| byte.is_ascii_digit()), "{name}: {value}");
    Some(value.parse().unwrap())
}

/// Polls once, by hand.
pub fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// A storage that answers when its future is polled for the third time: neither `call` nor the first poll of the
/// response gets an answer.
#[derive(Clone, Debug)]
pub struct Slow<St>(pub St);

/// Pending twice.
pub struct Later<F> {
    answer: F,
    pending: u32,
}

impl<F: Future + Unpin> Future for Later<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        if self.pending == 0 {
            return Pin::new(&mut self.answer).poll(cx);
        }
        self.pending -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

fn later<F>(answer: F) -> Later<F> {
    Later { answer, pending: 2 }
}

impl<St: Storage> Storage for Slow<St> {
    type Error = St::Error;
    type Decided = Later<St::Decided>;
    type Done = Pin<Box<dyn Future<Output = Result<(), St::Error>> + Send>>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        later(self.0.decide(ask))
    }

    // Unlike a decision, a change is made when it is awaited to its end, not when it is asked for.
    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let (storage, policy, key) = (self.0.clone(), policy.clone(), key.clone());
        Box::pin(async move {
            later(ready(())).await;
            storage.clear(&policy, &key).await
        })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        let (storage, policy, key, decision) = (self.0.clone(), policy.clone(), key.clone(), decision.clone());
        Box::pin(async move {
            later(ready(())).await;
            storage.refund(&policy, &key, &decision).await
        })
    }
}

/// A storage that fails, whatever it is asked.
#[derive(Clone, Copy, Debug)]
pub struct Failing;

impl Storage for Failing {
    type Error = &'static str;
    type Decided = Ready<Result<Decision, &'static str>>;
    type Done = Ready<Result<(), &'static str>>;

    fn decide(&self, _: Ask<'_>) -> Self::Decided {
        ready(Err("secret-host:6379 is down"))
    }

    fn clear(&self, _: &Policy, _: &Key) -> Self::Done {
        ready(Err("secret-host:6379 is down"))
    }

    fn refund(&self, _: &Policy, _: &Key, _: &Decision) -> Self::Done {
        ready(Err("secret-host:6379 is down"))
    }
}

/// What a strategy of a test decides that is a fixed window but for what it adds.
#[macro_export]
macro_rules! decides_like_a_fixed_window {
    () => {
        fn check(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            cost: u32,
        ) -> tower_ratelimit::strategy::Status {
            tower_ratelimit::strategy::Strategy::check(&tower_ratelimit::FixedWindow::new(), quota, state, now, cost)
        }

        fn spend(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            cost: u32,
        ) -> u64 {
            tower_ratelimit::strategy::Strategy::spend(&tower_ratelimit::FixedWindow::new(), quota, state, now, cost)
        }

        fn refund(
            &self,
            quota: &tower_ratelimit::Quota,
            state: &mut tower_ratelimit::strategy::State,
            now: tower_ratelimit::Timestamp,
            hit: &tower_ratelimit::strategy::Hit,
        ) {
            tower_ratelimit::strategy::Strategy::refund(&tower_ratelimit::FixedWindow::new(), quota, state, now, hit);
        }
    };
}
/// A strategy of a user's, which no server knows: the fixed window under another name.
#[derive(Clone, Copy, Debug)]
pub struct Foreign;

impl Strategy for Foreign {
    fn name(&self) -> &'static str {
        "foreign:{1}"
    }

    decides_like_a_fixed_window!();
}

/// The policy of a user's strategy, for a day.
pub fn foreign(limit: u32) -> Policy {
    Policy::new(Foreign, Quota::per(limit, Duration::from_secs(86_400)))
}

/// What `check` says when it panics, as it is to do, begins with this law.
pub fn breaks(law: &str, what: &str, check: impl FnOnce()) {
    let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) else {
        panic!("{what} keeps all laws, and should break {law:?}")
    };
    let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(said.starts_with(law), "{what} should break {law:?}, and the suite says: {said}");
}
