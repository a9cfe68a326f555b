//! Contention: many callers on one key of a storage that uses compare-and-swap.

use common::harness::{Answer, DEADLINE, Service, limited, timely};
use common::servers::{FaultyServer, Mode, Proxy};
use common::time::Stopwatch;
use common::{ask, get};
use tokio::task::JoinSet;
use tower_ratelimit::{Global, Key, OnError, RateLimiter, Storage};

use super::backend::Backend;
use super::{LONG, ready};

on_backends! { [tokio::test(flavor = "multi_thread", worker_threads = 2)] [await] [
    contention_between_processes_is_not_a_storage_failure,
    contention_in_one_process_is_not_a_storage_failure,
    contended_callers_that_retry_are_admitted_exactly_up_to_the_limit,
] redis_swap: RedisSwap, memcached: MemcachedServer }

const LIMIT: u32 = 60;

/// Returns the numbers of admitted, refused and failed hits.
fn counts(answers: &[Answer]) -> [usize; 3] {
    let count = |wanted| answers.iter().filter(|answer| **answer == wanted).count();
    let counts = [Answer::Admitted, Answer::Refused, Answer::Failed].map(count);
    eprintln!("{counts:?} admitted, refused and failed");
    counts
}

/// Returns the answer to a request, or `None` if the timeout passed because the machine is busy.
async fn decided(service: &Service) -> Option<Answer> {
    let watch = Stopwatch::start();
    let answer = Answer::of_response(&timely(ask(service, get("/"))).await, OnError::Admit);
    (answer != Answer::Failed || !watch.excuses(DEADLINE)).then_some(answer)
}

/// Guards against this defect: exhausted compare-and-swap attempts are a storage error, which
/// fail-open admits.
async fn contention_between_processes_is_not_a_storage_failure<B: Backend>() {
    let server = B::Server::launch();
    let proxies: Vec<Proxy> = (0..8).map(|_| Proxy::start(server.port())).collect();
    let mut tasks = JoinSet::new();
    for proxy in &proxies {
        proxy.set(Mode::Delay(DEADLINE / 20));
        // A storage for each caller, as in separate processes, because one storage decides waiting
        // hits of a key together. No timeout passes before the attempts are exhausted.
        let storage = B::storage(proxy.port(), LONG);
        storage.ready(LONG).await.unwrap();
        let (service, inner) = limited(&B::policy(LIMIT), Global::new(), &storage, OnError::Admit);
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for _ in 0..30 {
                answers.push(Answer::of_response(&ask(&service, get("/")).await, OnError::Admit));
            }
            let forwarded = answers.iter().filter(|answer| **answer != Answer::Refused).count();
            assert_eq!(inner.calls(), forwarded);
            answers
        });
    }
    let [admitted, _, failed] = counts(&tasks.join_all().await.concat());
    assert_eq!(failed, 0);
    assert!((1..=LIMIT as usize).contains(&admitted));
}

/// The round trip is so long that the timeout passes before the last compare-and-swap attempt.
async fn contention_in_one_process_is_not_a_storage_failure<B: Backend>() {
    let server = B::Server::launch();
    let proxy = Proxy::start(server.port());
    let (service, inner) =
        limited(&B::policy(LIMIT), Global::new(), &B::storage(proxy.port(), DEADLINE), OnError::Admit);
    while decided(&service).await != Some(Answer::Admitted) {}
    let before = inner.calls();
    proxy.set(Mode::Delay(DEADLINE / 20));
    let mut tasks = JoinSet::new();
    for _ in 0..24 {
        let service = service.clone();
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for _ in 0..10 {
                answers.push(decided(&service).await);
            }
            answers
        });
    }
    let answers = tasks.join_all().await.concat();
    let late = answers.iter().filter(|answer| answer.is_none()).count();
    let [admitted, _, failed] = counts(&answers.into_iter().flatten().collect::<Vec<_>>());
    assert_eq!(failed, 0);
    assert!((1..LIMIT as usize).contains(&admitted));
    assert_eq!(inner.calls(), before + admitted + late);
}

async fn contended_callers_that_retry_are_admitted_exactly_up_to_the_limit<B: Backend>() {
    let server = B::Server::launch();
    for (callers, limit) in [(8, 100), (200, 1_000)] {
        let policy = B::policy(limit).with_name(format!("of {callers}"));
        let limiter = RateLimiter::with_storage(policy, B::storage(server.port(), LONG));
        ready::<B>(limiter.storage()).await;
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                loop {
                    let decision = limiter.hit(&Key::global()).await.unwrap();
                    admitted += u32::from(decision.is_admitted());
                    if decision.is_refused() && !decision.is_contended() {
                        return admitted;
                    }
                }
            });
        }
        let admitted: u32 = tasks.join_all().await.into_iter().sum();
        assert_eq!(admitted, limit);
    }
}
