//! Memory storages with manual clocks, and short forms of storage calls.

use tower_ratelimit::storage::{ManualClock, StorageError, StorageFuture, StorageRequest};
use tower_ratelimit::{Decision, Key, LocalLimiter, MemoryStorage, Op, Policy, RateLimiter, Storage};

/// The time that a new `ManualClock` shows, in seconds since the epoch.
pub const T0: u64 = 1_728_000_000;

pub fn memory(clock: ManualClock) -> MemoryStorage {
    MemoryStorage::builder().clock(clock).build().unwrap()
}

/// A memory storage and its manual clock.
pub fn memory_with_manual_clock() -> (MemoryStorage, ManualClock) {
    let clock = ManualClock::default();
    (memory(clock.clone()), clock)
}

/// Decides on a storage. Panics if it fails.
pub async fn decide(storage: &impl Storage, policy: &Policy, key: &str, op: Op, cost: u32) -> Decision {
    unwrap_decision(storage.decide(StorageRequest::new(policy, &Key::from(key), op, cost)).await)
}

/// Hits a storage. Panics if it fails.
pub async fn hit(storage: &impl Storage, policy: &Policy, key: &str, cost: u32) -> Decision {
    decide(storage, policy, key, Op::Hit, cost).await
}

/// A hit that the test polls by hand.
pub fn start_hit(storage: &impl Storage, policy: &Policy, key: &Key, cost: u32) -> StorageFuture<Decision> {
    storage.decide(StorageRequest::new(policy, key, Op::Hit, cost))
}

/// Hits a limiter with the shared key. Panics if the storage fails.
pub async fn spend(limiter: &RateLimiter, cost: u32) -> Decision {
    unwrap_decision(limiter.hit_with_cost(&Key::global(), cost).await)
}

/// Corrects the cost of a limiter's hit by the storage's method, which also settles a hit twice.
pub fn settle(limiter: &RateLimiter, key: &Key, hit: &Decision, actual: u32) -> StorageFuture<()> {
    limiter.storage().settle(&limiter.policy(), key, hit, actual)
}

/// Returns the spent units of the shared key, for a policy with one limit.
pub fn counted(memory: &MemoryStorage, policy: &Policy) -> u32 {
    let peek = LocalLimiter::with_storage(policy.clone(), memory.clone()).peek(&Key::global());
    peek.capacity() - peek.remaining()
}

fn unwrap_decision(answer: Result<Decision, StorageError>) -> Decision {
    answer.unwrap_or_else(|error| panic!("the storage failed: {error}"))
}
