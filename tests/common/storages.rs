//! Memory storages on manual clocks, and short ways to ask a storage.

use std::pin::Pin;

use tower_ratelimit::storage::{ManualClock, StorageRequest};
use tower_ratelimit::{BoxError, Decision, Key, MemoryStorage, Op, Policy, RateLimiter, Storage};

use crate::now;

/// The time that a new `ManualClock` shows, in seconds since the epoch.
pub const T0: u64 = 1_728_000_000;

pub fn memory(clock: ManualClock) -> MemoryStorage {
    MemoryStorage::builder().clock(clock).build().unwrap()
}

/// A memory storage and its clock, which moves only when the test advances it.
pub fn memory_with_manual_clock() -> (MemoryStorage, ManualClock) {
    let clock = ManualClock::default();
    (memory(clock.clone()), clock)
}

/// Asks a storage that must not fail.
pub async fn decide<St: Storage>(storage: &St, policy: &Policy, key: &str, op: Op, cost: u32) -> Decision {
    unfailing(storage.decide(StorageRequest::new(policy, &Key::from(key), op, cost)).await)
}

/// Hits a storage that must not fail.
pub async fn hit<St: Storage>(storage: &St, policy: &Policy, key: &str, cost: u32) -> Decision {
    decide(storage, policy, key, Op::Hit, cost).await
}

/// A hit that the test polls by hand.
pub fn start_hit<St: Storage>(storage: &St, policy: &Policy, key: &Key, cost: u32) -> Pin<Box<St::DecideFuture>> {
    Box::pin(storage.decide(StorageRequest::new(policy, key, Op::Hit, cost)))
}

/// Hits a limiter with the key of everybody; its storage must not fail.
pub async fn spend<St: Storage>(limiter: &RateLimiter<St>, cost: u32) -> Decision {
    unfailing(limiter.hit_with_cost(&Key::everybody(), cost).await)
}

/// The units that the policy's first limit has counted in this memory for the key of everybody.
pub fn counted(memory: &MemoryStorage, policy: &Policy) -> u32 {
    let peek = now(RateLimiter::with_storage(policy.clone(), memory.clone()).peek(&Key::everybody()));
    peek.capacity() - peek.remaining()
}

fn unfailing(answer: Result<Decision, impl Into<BoxError>>) -> Decision {
    answer.unwrap_or_else(|error| panic!("the storage failed: {}", error.into()))
}
