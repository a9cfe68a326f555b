//! Longer waits for some clients, so that they do not all return when a window turns.

use std::hash::BuildHasher;
use std::time::Duration;

use foldhash::fast::FixedState;

use crate::decision::Decision;
use crate::key::Key;
use crate::time::micros;

/// Returns the wait of a refusal, lengthened by up to `percent` percent.
///
/// The share depends on the key and on the end of the wait, so a client that asks again before the
/// end gets the same end again.
pub(super) fn lengthened(wait: Duration, percent: u8, decision: &Decision, key: &Key) -> Duration {
    let end = decision.wall_at().plus(micros(wait));
    let share = FixedState::with_seed(0).hash_one((key.as_bytes(), end.as_micros())) >> 32;
    let most = u128::from(micros(wait)) * u128::from(percent) / 100;
    let added = (most * u128::from(share)) >> 32;
    wait.saturating_add(Duration::from_micros(u64::try_from(added).unwrap_or(u64::MAX)))
}
