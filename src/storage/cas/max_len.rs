//! What a policy may need, before it does.

use crate::{ConfigError, Limit, Policy};

/// An instant, a sign before it, and a unit with its own: what an entry of a log costs, for each of its units at most.
const UNIT: u64 = 19;

/// All else of a limit, but for its name: brackets, signs, place, period, an instant and two amounts.
const REST: u64 = 80;

/// The instant of the last decision, with its sign.
const INSTANT: u64 = 18;

/// Whether all that the policy can ever remember of a key is no longer than `longest` bytes.
pub(super) fn check(policy: &Policy, longest: usize) -> Result<(), ConfigError> {
    let room = u64::try_from(longest).unwrap_or(u64::MAX);
    let all: u64 = INSTANT + policy.limits().iter().map(most).sum::<u64>();
    if all <= room {
        return Ok(());
    }
    let largest = policy.limits().iter().max_by_key(|limit| most(limit));
    let advice = match largest.map(|limit| (limit, entries(limit))) {
        Some((limit, entries @ 1..)) => {
            let others = all - UNIT * entries;
            format!(
                "an amount of at most {} in \"{limit}\", or a strategy that remembers less, \
                 for example \"sliding-window-counter {}\"",
                room.saturating_sub(others) / UNIT,
                limit.quota()
            )
        }
        _ => "fewer limits".to_owned(),
    };
    Err(ConfigError::new(format!(
        "\"{policy}\" may remember {all} bytes of a key, and the storage keeps at most {longest}: use {advice}"
    )))
}

/// Returns an error if the logs of the policy can hold more than `most` entries.
pub(super) fn check_logs(policy: &Policy, most: u32) -> Result<(), ConfigError> {
    let all: u64 = policy.limits().iter().map(entries).sum();
    if all <= u64::from(most) {
        return Ok(());
    }
    let bytes = UNIT * all;
    let longest = policy.limits().iter().max_by_key(|limit| entries(limit));
    let quota = longest.map(|limit| limit.quota().to_string()).unwrap_or_default();
    Err(ConfigError::new(format!(
        "\"{policy}\" can keep {all} log entries of a key, and each hit would load and store them all, up to \
         {bytes} bytes each way: use \"sliding-window-counter {quota}\", or allow logs of more than {most} entries \
         with .allow_long_logs() or ?long-logs=allow in the storage's URL"
    )))
}

fn most(limit: &Limit) -> u64 {
    // Escaped, a byte is three.
    let name = 3 * limit.strategy().name().len() as u64;
    REST + name + UNIT * entries(limit)
}

fn entries(limit: &Limit) -> u64 {
    limit.strategy().log_entries(limit.quota()).into()
}
