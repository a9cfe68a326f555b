//! Two services and a limiter with one policy on one storage that may fail.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use http::{Request, Response};
use tokio::time::sleep;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_ratelimit::extract::KeyExtractor;
use tower_ratelimit::{Decision, Key, OnError, Policy, RateLimitLayer, RateLimiter, Storage};

pub use crate::time::within;
use crate::time::{EVENTUALLY, Stopwatch};
use crate::{Inner, ask, get, numbers, retry_after};

pub const SECOND: Duration = Duration::from_secs(1);

/// The timeout of storages whose servers fail.
pub const DEADLINE: Duration = Duration::from_millis(200);

/// The tolerance for late results.
pub const MARGIN: Duration = Duration::from_secs(1);

/// The pause between two attempts.
pub const AGAIN: Duration = Duration::from_millis(5);

pub type Service = BoxCloneSyncService<Request<()>, Response<String>, Infallible>;

pub fn limited(
    policy: &Policy,
    key: impl KeyExtractor,
    storage: &(impl Storage + Clone),
    on_error: OnError,
) -> (Service, Inner) {
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
    /// Converts the response of a service that uses `on_error`.
    pub fn of_response(response: &Response<String>, on_error: OnError) -> Self {
        match (response.status().as_u16(), numbers(response), retry_after(response), on_error) {
            (200, Some(_), None, _) => Self::Admitted,
            (429, Some(_), Some(_), _) => Self::Refused,
            (200, None, None, OnError::Admit) | (503, None, Some(1), OnError::Refuse) => Self::Failed,
            _ => panic!("{on_error:?}: {response:?}"),
        }
    }

    /// Converts the result of a limiter.
    pub fn of_result(result: &Result<Decision, impl Sized>) -> Self {
        match result {
            Ok(decision) if decision.is_admitted() => Self::Admitted,
            Ok(_) => Self::Refused,
            Err(_) => Self::Failed,
        }
    }
}

/// Awaits a result, and asserts that it arrives within the timeout and a margin.
pub async fn timely<T: fmt::Debug>(answer: impl Future<Output = T>) -> T {
    within(DEADLINE + MARGIN, answer).await
}

/// Two services and a limiter with one policy on one storage.
pub struct EntryPoints {
    /// Admits requests when the storage fails.
    pub fails_open: Service,
    /// Rejects requests when the storage fails.
    pub fails_closed: Service,
    pub limiter: RateLimiter,
    watch: Stopwatch,
}

/// The outcomes of the hits until the storage decided again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recovery {
    pub admitted: u32,
    pub failed: u32,
}

impl Recovery {
    /// Adds the outcomes of a round. Returns the number of failures in it.
    fn add(&mut self, answers: [Answer; 3]) -> u32 {
        let count = |wanted| answers.iter().map(|answer| u32::from(*answer == wanted)).sum::<u32>();
        self.admitted += count(Answer::Admitted);
        self.failed += count(Answer::Failed);
        count(Answer::Failed)
    }
}

impl EntryPoints {
    pub fn new<K: KeyExtractor>(policy: &Policy, storage: impl Storage + Clone, key: impl Fn() -> K) -> Self {
        let (fails_open, _) = limited(policy, key(), &storage, OnError::Admit);
        let (fails_closed, _) = limited(policy, key(), &storage, OnError::Refuse);
        Self {
            fails_open,
            fails_closed,
            limiter: RateLimiter::with_storage(policy.clone(), storage),
            watch: Stopwatch::start(),
        }
    }

    /// Makes one hit at each entry point.
    pub async fn hit_as(&self, key: &Key, request: impl Fn() -> Request<()>) -> [Answer; 3] {
        let open = Answer::of_response(&timely(ask(&self.fails_open, request())).await, OnError::Admit);
        let closed = Answer::of_response(&timely(ask(&self.fails_closed, request())).await, OnError::Refuse);
        let last = timely(self.limiter.hit(key)).await;
        if let Err(error) = &last {
            eprintln!("{error:?}");
        }
        [open, closed, Answer::of_result(&last)]
    }

    /// Makes one hit at each entry point, all for the shared key.
    pub async fn hit(&self) -> [Answer; 3] {
        self.hit_as(&Key::global(), || get("/")).await
    }

    /// Asserts that all entry points report a failure of the storage, twice. On a busy machine, a hit after
    /// one that timed out may be refused as contended.
    pub async fn fail(&self) {
        let watch = Stopwatch::start();
        for _ in 0..2 {
            let mut answers = self.hit().await;
            while answers.contains(&Answer::Refused) && !watch.excess().is_zero() {
                assert!(!answers.contains(&Answer::Admitted) && watch.wall() < EVENTUALLY, "{answers:?}");
                answers = self.hit().await;
            }
            assert_eq!(answers, [Answer::Failed; 3]);
        }
    }

    /// Asserts that all entry points decide within a second, and continue to do so.
    pub async fn recover(&self) -> Recovery {
        let (watch, mut recovery) = (Stopwatch::start(), Recovery::default());
        while recovery.add(self.hit().await) > 0 {
            watch.assert_below(SECOND + MARGIN, "the storage recovers");
            sleep(AGAIN).await;
        }
        let more = self.admit().await;
        Recovery { admitted: recovery.admitted + more.admitted, failed: recovery.failed + more.failed }
    }

    /// Asserts that all entry points admit a hit. Returns the outcomes of their hits, which include
    /// timeouts if the machine is too busy for [`DEADLINE`].
    pub async fn admit(&self) -> Recovery {
        let (watch, mut recovery) = (Stopwatch::start(), Recovery::default());
        loop {
            let (before, round, answers) = (recovery, Stopwatch::start(), self.hit().await);
            let failed = recovery.add(answers);
            if answers == [Answer::Admitted; 3] {
                return recovery;
            }
            // An earlier hit that timed out on a busy machine may win its swap late. The limit is out of
            // reach, so a refusal is contended, and counts nothing. And what the earlier hit had begun, for
            // example a lease, may fail a later hit that shares it long before its own timeout.
            let is_late =
                if failed > 0 && before.failed == 0 { round.excuses(DEADLINE) } else { !self.watch.excess().is_zero() };
            let (wall, excess) = (round.wall(), round.excess());
            assert!(is_late, "{answers:?} after {wall:?}, {excess:?} of the machine, and {before:?}");
            assert!(watch.wall() < EVENTUALLY, "{recovery:?}");
        }
    }

    /// Returns the spent units of the shared key.
    pub async fn used(&self) -> u32 {
        used(&self.limiter).await
    }
}

/// Returns the spent units of the shared key. Repeats a peek that fails on a busy machine.
pub async fn used(limiter: &RateLimiter) -> u32 {
    let watch = Stopwatch::start();
    let peeked = loop {
        match limiter.peek(&Key::global()).await {
            Ok(peeked) => break peeked,
            Err(error) => assert!(watch.wall() < EVENTUALLY, "{error}"),
        }
        sleep(AGAIN).await;
    };
    let capacity = limiter.policy().limits().iter().map(tower_ratelimit::Limit::capacity).min().unwrap();
    capacity - peeked.remaining()
}
