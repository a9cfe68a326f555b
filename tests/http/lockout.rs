//! Layers with a lockout.

use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{ask, get, memory_with_manual_clock, outside_of_a_runtime, policy, retry_after, slow, status};
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::{Event, EventKind, Global, OnError, RateLimitLayer, Storage};

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
    async fn check(storage: impl Storage, clock: tower_ratelimit::storage::ManualClock) {
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
