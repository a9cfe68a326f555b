//! The largest texts that the states of policies can need.

use crate::error::ConfigError;
use crate::policy::{Limit, Policy};
use crate::storage::text;

/// The largest number of bytes per log entry: `,`, an instant, `*` and a number of units.
const ENTRY: u64 = 19;

/// The largest number of bytes of a limit's entry, without the name of its strategy and its log
/// entries: brackets, separators, position, period, an instant and two amounts.
const LIMIT: u64 = 80;

/// Returns the largest number of bytes that the text of a key can need.
pub(super) fn longest_text(policy: &Policy) -> u64 {
    text::LONGEST_HEAD + policy.limits().iter().map(max_bytes).sum::<u64>()
}

/// Returns an error if the states of several keys, which are stored in one step, can grow longer than
/// `longest` bytes.
pub(super) fn check_members(policies: &[Policy], longest: usize) -> Result<(), ConfigError> {
    let all: u64 = policies.iter().map(longest_text).sum();
    if all <= u64::try_from(longest).unwrap_or(u64::MAX) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "the states of several keys can need {all} bytes together, and the storage keeps at most {longest} in one step: \
         use strategies with smaller states, for example \"sliding-window-counter\" instead of \"moving-window\""
    )))
}

/// Returns an error if the state of a key can grow longer than `longest` bytes.
pub(super) fn check_length(policy: &Policy, longest: usize) -> Result<(), ConfigError> {
    let available = u64::try_from(longest).unwrap_or(u64::MAX);
    let all = longest_text(policy);
    if all <= available {
        return Ok(());
    }
    let largest = policy.limits().iter().max_by_key(|limit| max_bytes(limit));
    let advice = match largest.map(|limit| (limit, entries(limit))) {
        Some((limit, entries @ 1..)) => {
            let others = all - ENTRY * entries;
            format!(
                "an amount of at most {} in \"{limit}\", or a strategy with a smaller state, \
                 for example \"sliding-window-counter {}\"",
                available.saturating_sub(others) / ENTRY,
                limit.quota()
            )
        }
        _ => "fewer limits".to_owned(),
    };
    Err(ConfigError::new(format!(
        "\"{policy}\" can need {all} bytes per key, and the storage keeps at most {longest}: use {advice}"
    )))
}

/// Returns an error if the logs of the policy can hold more than `max_entries` entries.
pub(super) fn check_logs(policy: &Policy, max_entries: u32) -> Result<(), ConfigError> {
    let all: u64 = policy.limits().iter().map(entries).sum();
    if all <= u64::from(max_entries) {
        return Ok(());
    }
    let bytes = ENTRY * all;
    let longest = policy.limits().iter().max_by_key(|limit| entries(limit));
    let quota = longest.map(|limit| limit.quota().to_string()).unwrap_or_default();
    Err(ConfigError::new(format!(
        "\"{policy}\" can keep {all} log entries per key, and each hit would load and store all of them, up to \
         {bytes} bytes in each direction: use \"sliding-window-counter {quota}\", or allow logs of more than \
         {max_entries} entries with long-logs=allow in the storage's URL"
    )))
}

fn max_bytes(limit: &Limit) -> u64 {
    // Percent-encoding can turn one byte of the strategy's name into three.
    let name = 3 * limit.strategy().name().len() as u64;
    LIMIT + name + ENTRY * entries(limit)
}

fn entries(limit: &Limit) -> u64 {
    limit.strategy().log_entries(limit.quota()).into()
}
