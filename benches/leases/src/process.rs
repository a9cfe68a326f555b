//! One of eight processes that hit one key, with leases or with another crate.

use std::io::{Write, stdin, stdout};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::task::{JoinSet, yield_now};
use tower_ratelimit::storage::{AnyStorage, Leases};
use tower_ratelimit::{Key, RateLimiter, Storage};
use trypema::hybrid::HybridRateLimiterProvider;
use trypema::redis::RedisKey;
use trypema::{RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize};

/// The name of the other crate's hybrid limiter.
pub(crate) const PEER: &str = "trypema, hybrid";

/// The number of processes, and of tasks of each of them.
pub(crate) const PROCESSES: usize = 8;
const TASKS: usize = 8;

/// The time of a load.
pub(crate) const TIME: Duration = Duration::from_secs(6);

/// The time between the hits of a task under the load of [`HALF`].
const PAUSE: Duration = Duration::from_millis(10);

/// The limit that admits about half of the hits: in two seconds.
pub(crate) const HALF: u32 = 5_000;

#[derive(Clone)]
enum Limiter {
    Leased(RateLimiter),
    Peer(Arc<HybridRateLimiterProvider>, RedisKey, RateLimit),
}

impl Limiter {
    async fn admits(&self) -> bool {
        match self {
            Self::Leased(limiter) => limiter.hit(&Key::global()).await.expect("the server works").is_admitted(),
            Self::Peer(provider, key, rate) => {
                let decided = provider.absolute().inc(key, rate, 1).await.expect("the server works");
                matches!(decided, RateLimitDecision::Allowed)
            }
        }
    }
}

/// Runs until the time of the load is over. Prints the number of admitted hits, or their times
/// under the load of [`HALF`].
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn run(url: &str, limiter: &str, load: &str) {
    let limit: u32 = load.parse().expect("the limit is a number");
    let (limiter, leases) = limiter_of(url, limiter, limit).await;
    println!("connected");
    stdin().read_line(&mut String::new()).expect("the other process begins");
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let (mut admitted, mut count) = (Vec::new(), 0_u64);
            while begin.elapsed() < TIME {
                let admits = limiter.admits().await;
                count += u64::from(admits);
                if limit != HALF {
                    yield_now().await;
                    continue;
                }
                if admits {
                    admitted.push(micros());
                }
                tokio::time::sleep(PAUSE).await;
            }
            (admitted, count)
        });
    }
    let results = tasks.join_all().await;
    if let Some(leases) = leases {
        leases.close().await.expect("the server works");
    }
    let mut out = stdout().lock();
    writeln!(out, "{}", results.iter().map(|(_, count)| count).sum::<u64>()).expect("the other process reads");
    for at in results.iter().flat_map(|(admitted, _)| admitted) {
        writeln!(out, "{at}").expect("the other process reads");
    }
}

async fn limiter_of(url: &str, limiter: &str, limit: u32) -> (Limiter, Option<Leases>) {
    if limiter == PEER {
        let client = redis::Client::open(url).expect("the URL is valid");
        let connection = trypema::redis::ConnectionManager::new(client).await.expect("the server works");
        let window = WindowSize::seconds_or_panic(2);
        let provider = HybridRateLimiterProvider::builder(connection).window_size(window).build();
        let key = RedisKey::try_from(format!("hot-{limit}")).expect("the key is valid");
        let rate = RateLimit::per_second_or_panic(f64::from(limit) / 2.0);
        return (Limiter::Peer(provider.expect("the configuration is valid"), key, rate), None);
    }
    let storage: AnyStorage = format!("{url}?timeout=10s&prefix=hot-{limit}").parse().expect("the URL is valid");
    storage.ready(Duration::from_secs(10)).await.expect("the server works");
    let leases = Leases::new(storage, u32::MAX);
    let limiter = RateLimiter::with_storage(policy(limiter, limit), leases.clone());
    (Limiter::Leased(limiter), Some(leases))
}

/// Returns the policy of a strategy. A calendar window is a day.
pub(crate) fn policy(strategy: &str, limit: u32) -> tower_ratelimit::Policy {
    let period = if strategy == "calendar" { "day" } else { "2s" };
    format!("{strategy} {limit}/{period}").parse().expect("the policy is valid")
}

fn micros() -> u128 {
    SystemTime::UNIX_EPOCH.elapsed().expect("the clock is set").as_micros()
}
