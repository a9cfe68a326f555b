//! Measures decisions per second and latencies on stores, and on PostgreSQL those of a statement
//! that is written by hand.
//!
//! `scripts/stores` starts the servers and runs it. The arguments are the URLs of storages. Each
//! `postgres://` URL also measures the statement.

mod by_hand;
mod measure;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use tower_ratelimit::storage::AnyStorage;
use tower_ratelimit::{Key, Policy, RateLimiter};

use self::by_hand::ByHand;
use self::measure::{Row, measure};

/// The number of distinct keys. All of them fit into the memory of recent keys of
/// `PostgresStorage`.
const KEYS: u64 = 10_000;

const IN_FLIGHT: [usize; 3] = [1, 16, 64];

/// Returns the duration of a measurement: `STORES_SECONDS`, or 3 seconds.
fn time() -> Duration {
    let seconds = std::env::var("STORES_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(3.0))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    println!("{}", Row::HEAD);
    for url in std::env::args().skip(1) {
        let name = url.split(':').next().unwrap_or_default().to_owned();
        if name.starts_with("postgres") {
            by_hand(&url).await?;
        }
        let separator = if url.contains('?') { '&' } else { '?' };
        let storage: AnyStorage = format!("{url}{separator}timeout=5s").parse()?;
        // The limit is so large that no hit is refused.
        let policy: Policy = "fixed-window 4000000000/day".parse()?;
        let limiter = RateLimiter::with_storage(policy, storage);
        for (keys, count) in [("distinct", KEYS), ("one", 1)] {
            for in_flight in IN_FLIGHT {
                let limiter = limiter.clone();
                let hit = move |number: u64| {
                    let limiter = limiter.clone();
                    async move { limiter.hit(&Key::from(number % count)).await.is_ok_and(|decision| decision.is_admitted()) }
                };
                println!("{}", measure(&name, keys, in_flight, time(), Arc::new(hit)).await);
            }
        }
    }
    Ok(())
}

async fn by_hand(url: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let statement = ByHand::new(url).await?;
    for (keys, count) in [("distinct", KEYS), ("one", 1)] {
        for in_flight in IN_FLIGHT {
            let statement = statement.clone();
            let hit = move |number: u64| {
                let statement = statement.clone();
                async move { statement.hit(number % count).await.is_ok() }
            };
            println!("{}", measure("by hand", keys, in_flight, time(), Arc::new(hit)).await);
        }
    }
    Ok(())
}
