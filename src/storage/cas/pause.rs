use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// How long to wait before the next attempt: a little longer each time, and not as long as others do.
pub(super) fn before(attempt: u32) -> Duration {
    let most = 200_u64 << attempt.min(6);
    Duration::from_micros(RandomState::new().hash_one(attempt) % most)
}
