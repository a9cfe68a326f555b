use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Returns the delay before the next attempt: exponential backoff with full jitter. The upper bound
/// is 200 microseconds at first, and doubles with each attempt up to 12.8 milliseconds.
pub(super) fn before(attempt: u32) -> Duration {
    let max_micros = 200_u64 << attempt.min(6);
    Duration::from_micros(RandomState::new().hash_one(attempt) % max_micros)
}
