use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Returns the delay before the next attempt: exponential backoff with full jitter.
pub(super) fn before(attempt: u32) -> Duration {
    let max_micros = 200_u64 << attempt.min(6);
    Duration::from_micros(RandomState::new().hash_one(attempt) % max_micros)
}
