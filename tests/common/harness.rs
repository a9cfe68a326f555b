//! All ways to one policy on one storage that may fail, and what they answer.

use std::convert::Infallible;
use std::fmt;
use std::time::{Duration, Instant};

use http::{Request, Response};
use tokio::time::sleep;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_ratelimit::extract::KeyExtractor;
use tower_ratelimit::{Decision, Key, OnError, Policy, RateLimitLayer, RateLimiter, Storage};

use crate::{Inner, ask, get, numbers, retry_after};

pub const SECOND: Duration = Duration::from_secs(1);

/// Of the storages here.
pub const DEADLINE: Duration = Duration::from_millis(200);

/// How much later than at its deadline an answer may come on a machine with more to do: a hang would be a second and more.
pub const MARGIN: Duration = Duration::from_millis(300);

/// Between two looks.
pub const AGAIN: Duration = Duration::from_millis(5);

pub type Service = BoxCloneSyncService<Request<()>, Response<String>, Infallible>;

pub fn limited(policy: &Policy, key: impl KeyExtractor, storage: &impl Storage, on_error: OnError) -> (Service, Inner) {
    let inner = Inner::default();
    let layer = RateLimitLayer::new(policy.clone(), key).storage(storage.clone(), on_error);
    (BoxCloneSyncService::new(layer.layer(inner.clone())), inner)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Admitted,
    Refused,
    Failed,
}

impl Answer {
    /// What a service answered that obeys `on_error`.
    pub fn of(response: &Response<String>, on_error: OnError) -> Self {
        match (response.status().as_u16(), numbers(response), retry_after(response), on_error) {
            (200, Some(_), None, _) => Self::Admitted,
            (429, Some(_), Some(_), _) => Self::Refused,
            (200, None, None, OnError::Admit) | (503, None, Some(1), OnError::Refuse) => Self::Failed,
            _ => panic!("{on_error:?}: {response:?}"),
        }
    }

    pub fn told(told: &Result<Decision, impl Sized>) -> Self {
        match told {
            Ok(decision) if decision.is_admitted() => Self::Admitted,
            Ok(_) => Self::Refused,
            Err(_) => Self::Failed,
        }
    }
}

/// What `answer` is, which comes in time.
pub async fn timely<T: fmt::Debug>(answer: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let answer = answer.await;
    assert!(started.elapsed() < DEADLINE + MARGIN, "after {:?}: {answer:?}", started.elapsed());
    answer
}

/// All ways to one policy on one storage: two services and a limiter.
pub struct Ways<St> {
    pub open: Service,
    pub closed: Service,
    pub limiter: RateLimiter<St>,
}

impl<St: Storage<Error: fmt::Debug>> Ways<St> {
    pub fn of<K: KeyExtractor>(policy: &Policy, storage: St, key: impl Fn() -> K) -> Self {
        let (open, _) = limited(policy, key(), &storage, OnError::Admit);
        let (closed, _) = limited(policy, key(), &storage, OnError::Refuse);
        Self { open, closed, limiter: RateLimiter::with_storage(policy.clone(), storage) }
    }

    pub async fn each(&self, key: &Key, request: impl Fn() -> Request<()>) -> [Answer; 3] {
        let open = Answer::of(&timely(ask(&self.open, request())).await, OnError::Admit);
        let closed = Answer::of(&timely(ask(&self.closed, request())).await, OnError::Refuse);
        [open, closed, Answer::told(&timely(self.limiter.hit(key)).await)]
    }

    /// What all of them answer to everybody.
    pub async fn all(&self) -> [Answer; 3] {
        self.each(&Key::everybody(), || get("/")).await
    }

    pub async fn fail(&self) {
        for _ in 0..2 {
            assert_eq!(self.all().await, [Answer::Failed; 3]);
        }
    }

    /// They decide within a second from now on.
    pub async fn decide(&self) {
        let started = Instant::now();
        while self.all().await.contains(&Answer::Failed) {
            assert!(started.elapsed() < SECOND, "no decisions after {:?}", started.elapsed());
            sleep(AGAIN).await;
        }
        assert_eq!(self.all().await, [Answer::Admitted; 3]);
    }

    pub async fn used(&self) -> u32 {
        used(&self.limiter).await
    }
}

/// What has been counted for everybody.
pub async fn used<St: Storage<Error: fmt::Debug>>(limiter: &RateLimiter<St>) -> u32 {
    let peeked = limiter.peek(&Key::everybody()).await.unwrap();
    limiter.policy().limits()[0].capacity() - peeked.remaining()
}
