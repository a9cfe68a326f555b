//! Layers with a lockout.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    Behavior, FakeStorage, ask, get, memory_with_manual_clock, numbers, outside_of_a_runtime, policy, retry_after,
    slow, status,
};
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::sleep;
use tower::{Layer, Service, service_fn};
use tower_ratelimit::storage::{ManualClock, TokioClock};
use tower_ratelimit::{
    Event, EventKind, Global, Headers, Key, MemoryStorage, OnError, RateLimitLayer, RateLimiter, Storage,
};

use crate::log::log_of;

type Locks = Arc<Mutex<Vec<(u32, Duration)>>>;

/// A service that answers a request for `/ok` with 200, and any other with 401.
fn login() -> impl Service<
    Request<()>,
    Response = Response<String>,
    Error = Infallible,
    Future: Future<Output = Result<Response<String>, Infallible>> + Send,
> + Clone {
    service_fn(|request: Request<()>| {
        let mut response = Response::new(String::new());
        if request.uri().path() != "/ok" {
            *response.status_mut() = StatusCode::UNAUTHORIZED;
        }
        ready(Ok(response))
    })
}

fn layer(text: &str, storage: impl Storage) -> (RateLimitLayer, Locks) {
    let locks = Locks::default();
    let seen = Arc::clone(&locks);
    let layer = RateLimitLayer::new(policy(text), Global::new())
        .storage(storage, OnError::Refuse)
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
        .observer(move |event| {
            if let EventKind::Locked(lock) = event.kind {
                assert_eq!(Event::outcome(event), "locked");
                seen.lock().unwrap().push((lock.level(), lock.ends_after()));
            }
        });
    (layer, locks)
}

fn take(locks: &Locks) -> Vec<(u32, u64)> {
    std::mem::take(&mut *locks.lock().unwrap()).into_iter().map(|(level, end)| (level, end.as_secs())).collect()
}

#[tokio::test(start_paused = true)]
async fn failed_logins_lock_and_a_success_clears() {
    async fn check(storage: impl Storage, clock: ManualClock) {
        let (layer, locks) = layer("lockout 3/minute for 10m x2 up to 1d", storage);
        let service = layer.clear_when(|response| response.status.is_success()).layer(login());
        for path in ["/wrong", "/wrong", "/ok", "/wrong", "/wrong"] {
            assert_ne!(status(&service, get(path)).await, 429, "{path}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(take(&locks), []);
        for (level, minutes) in [(0, 10), (1, 20)] {
            assert_eq!(status(&service, get("/wrong")).await, 401);
            assert_eq!(take(&locks), [(level, 60 * minutes)]);
            let refused = ask(&service, get("/ok")).await;
            assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(60 * minutes)));
            assert_eq!(take(&locks), [], "a lock is reported once");
            clock.advance(Duration::from_secs(60 * minutes));
            for _ in 0..2 {
                assert_eq!(status(&service, get("/wrong")).await, 401);
            }
        }
    }
    let (storage, clock) = memory_with_manual_clock();
    check(storage, clock).await;
    let (storage, clock) = memory_with_manual_clock();
    check(slow(storage), clock).await;
}

/// The layer reports the lock, although no option of it needs the decision.
#[test]
fn lock_is_logged_once_at_level_info() {
    let (storage, _) = memory_with_manual_clock();
    let layer =
        RateLimitLayer::new(policy("lockout 2/minute for 10m"), Global::new()).storage(storage, OnError::Refuse);
    let service = layer.layer(login());
    let lines = log_of(|| {
        for _ in 0..5 {
            let _ = outside_of_a_runtime(ask(&service, get("/ok")));
        }
    });
    let lines: Vec<&String> = lines.iter().filter(|line| line.contains("key locked")).collect();
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("INFO") && lines[0].contains("level=0 ends_after=600s"), "{lines:?}");
}

#[tokio::test]
async fn refusals_lock_and_their_answer_has_the_end_of_the_lock() {
    let (storage, clock) = memory_with_manual_clock();
    let (layer, locks) = layer("fixed-window 1/second; lockout 2 refusals/minute for 1h", storage);
    let service = layer.layer(login());
    let codes =
        [("/wrong", 401, None), ("/wrong", 429, Some(1)), ("/wrong", 429, Some(3_600)), ("/wrong", 429, Some(3_600))];
    for (path, code, wait) in codes {
        let response = ask(&service, get(path)).await;
        assert_eq!((response.status().as_u16(), retry_after(&response)), (code, wait));
    }
    assert_eq!(take(&locks), [(0, 3_600)]);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(status(&service, get("/ok")).await, 200);
}

#[tokio::test]
async fn shadow_layer_reports_the_lock_that_refusals_begin() {
    let (storage, _) = memory_with_manual_clock();
    let (layer, locks) = layer("fixed-window 1/second; lockout 2 refusals/minute for 1h", storage);
    let service = layer.shadow().layer(login());
    for locked in [0, 0, 1, 0] {
        assert_eq!(status(&service, get("/wrong")).await, 401);
        assert_eq!(take(&locks).len(), locked);
    }
}

/// A clear or a refund that fails leaves the lock.
#[tokio::test]
async fn lock_is_reported_if_the_storage_does_not_end_it() {
    for clears in [false, true] {
        let (storage, _) = FakeStorage::in_memory(Behavior::Works);
        let (layer, locks) = layer("lockout 2/minute for 10m", storage.clone());
        let service = layer.clear_when(move |response| clears && response.status.is_success()).layer(login());
        assert_eq!(status(&service, get("/wrong")).await, 401);
        storage.set_changes(Behavior::Fails);
        assert_eq!(status(&service, get("/ok")).await, 200);
        assert_eq!(take(&locks), [(0, 600)], "clears: {clears}");
        assert_eq!(status(&service, get("/ok")).await, 429);
    }
}

/// Guards against this defect: the lock is reported for each request that waits behind the one that
/// started it.
#[tokio::test(start_paused = true)]
async fn lock_is_reported_once_although_other_requests_wait() {
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let (layer, locks) = layer("fixed-window 1/second; lockout 2 refusals/minute for 1h", storage);
    let service = layer.wait(Duration::from_secs(5), 100).layer(login());
    let requests = (0..6).map(|_| status(&service, get("/wrong")));
    let codes = join_all(requests).await;
    assert_eq!(codes, [401, 401, 429, 429, 429, 429]);
    assert_eq!(take(&locks), [(0, 3_600)]);
}

/// Guards against this defect: a lock that a hit has started is never reported if the request is
/// settled after the end of the lock.
#[tokio::test(start_paused = true)]
async fn lock_that_has_ended_before_the_refund_is_reported() {
    for (seconds, expected) in [(599, vec![]), (600, vec![(0, 600)])] {
        for is_slow in [false, true] {
            let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
            let storage = if is_slow { slow(storage) } else { FakeStorage::around(storage) };
            let (layer, locks) = layer("lockout 1/minute for 10m x2 up to 1d", storage);
            let service = layer.layer(service_fn(async |_: Request<()>| {
                sleep(Duration::from_secs(seconds)).await;
                Ok::<_, Infallible>(Response::new(String::new()))
            }));
            assert_eq!(status(&service, get("/ok")).await, 200);
            sleep(Duration::from_millis(1)).await;
            assert_eq!(take(&locks), expected, "{seconds} s, slow: {is_slow}");
        }
    }
}

/// A client would count the refusals as units.
#[tokio::test]
async fn ietf_fields_list_a_lockout_by_refusals_only_while_it_is_locked() {
    let (storage, _) = memory_with_manual_clock();
    let policy = policy("fixed-window 1/second; lockout 2 refusals/minute for 1h").with_name("api");
    let layer =
        RateLimitLayer::new(policy, Global::new()).storage(storage, OnError::Refuse).headers(Headers::draft11());
    let service = layer.layer(login());
    let (first, lock) = ("\"api-1\";r=0;t=1", "\"api-2\";r=0;t=3600");
    let both = [first, lock].join(", ");
    for (code, limits) in [(200, first), (429, first), (429, &both), (429, &both)] {
        let response = ask(&service, get("/ok")).await;
        let field = |name| response.headers()[name].to_str().unwrap();
        assert_eq!((response.status().as_u16(), field("ratelimit")), (code, limits));
        assert_eq!(field("ratelimit-policy").matches("q=").count(), limits.matches("r=").count());
    }
}

/// Guesses whose answers come in any order.
#[tokio::test(start_paused = true)]
async fn concurrent_guesses_get_at_most_n_answers() {
    async fn check(storage: impl Storage, clock: ManualClock) {
        let (layer, _) = layer("lockout 5/minute for 10m x2 up to 1d", storage);
        let waiting = Arc::new(Mutex::new(VecDeque::new()));
        let guesses = Arc::clone(&waiting);
        let inner = service_fn(move |_: Request<()>| {
            let (answer, answered) = oneshot::channel();
            guesses.lock().unwrap().push_back(answer);
            async { Ok::<Response<String>, Infallible>(answered.await.unwrap()) }
        });
        let service = layer.clear_when(|response| response.status.is_success()).layer(inner);
        // Sends 40 guesses at once, and returns the number of those that wait for their answers.
        let guess = async || {
            clock.advance(Duration::from_micros(1));
            for _ in 0..40 {
                let service = service.clone();
                tokio::spawn(async move { status(&service, get("/")).await });
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            waiting.lock().unwrap().len()
        };
        let answer = async |guess: Option<oneshot::Sender<_>>, status: u16| {
            guess.unwrap().send(Response::builder().status(status).body(String::new()).unwrap()).unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        let (first, last) = (|| waiting.lock().unwrap().pop_front(), || waiting.lock().unwrap().pop_back());

        assert_eq!(guess().await, 5);
        answer(first(), 500).await;
        assert_eq!(guess().await, 5, "the refund of one guess lets another one in");
        for _ in 0..5 {
            answer(last(), 401).await;
            assert_eq!(guess().await, waiting.lock().unwrap().len());
        }
        assert_eq!(guess().await, 0);
        clock.advance(Duration::from_secs(600));
        assert_eq!(guess().await, 5);
        answer(last(), 200).await;
        assert_eq!(guess().await, 4 + 5, "the success has cleared the key");
        answer(first(), 500).await;
        answer(first(), 401).await;
        assert_eq!(guess().await, 2 + 5, "guesses from before the success change nothing");
    }
    let (storage, clock) = memory_with_manual_clock();
    check(storage, clock).await;
    let (storage, clock) = memory_with_manual_clock();
    check(slow(storage), clock).await;
}

#[tokio::test]
async fn success_clears_the_shadow_limits_that_have_admitted_it() {
    let (storage, _) = memory_with_manual_clock();
    let (layer, _) = layer("fixed-window 9/minute; shadow fixed-window 1/minute; shadow 5/minute", storage.clone());
    let service = layer.clear_when(|response| response.status.is_success()).layer(login());
    for path in ["/wrong", "/ok"] {
        assert_ne!(status(&service, get(path)).await, 429);
    }
    let policy = policy("fixed-window 9/minute; shadow fixed-window 1/minute; shadow 5/minute");
    for (policy, remaining) in [&policy].into_iter().chain(policy.shadows()).zip([9, 0, 5]) {
        let limiter = RateLimiter::with_storage(policy.clone(), storage.clone());
        assert_eq!(limiter.peek(&Key::global()).await.unwrap().remaining(), remaining, "{policy}");
    }
}

/// Guards against this defect: after a refusal, admitted responses report the lockout instead of the
/// limit with the fewest units.
#[tokio::test]
async fn admitted_response_reports_no_lockout_by_refusals() {
    for refusals in [1, 2, 100] {
        for is_slow in [false, true] {
            let (memory, clock) = memory_with_manual_clock();
            let policy = policy(&format!("fixed-window 1/second; lockout {refusals} refusals/minute for 1h"));
            let storage = if is_slow { slow(memory) } else { FakeStorage::around(memory) };
            let layer = RateLimitLayer::new(policy, Global::new()).storage(storage, OnError::Refuse);
            let service = layer.headers(Headers::x_rate_limit().reset_in_seconds()).layer(login());
            for round in 0..refusals.min(3) {
                let response = ask(&service, get("/ok")).await;
                assert_eq!(response.status(), 200, "{refusals}, {round}");
                assert_eq!(numbers(&response), Some([1, 0, 1]), "{refusals}, {round}");
                if refusals > 1 && round < refusals - 1 {
                    assert_eq!(status(&service, get("/ok")).await, 429);
                }
                clock.advance(Duration::from_secs(1));
            }
        }
    }
}
