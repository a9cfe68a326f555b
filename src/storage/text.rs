//! The text format of states.
//!
//! A text begins with `v` and the [version](head) of its format. All versions do. A sequence of
//! entries follows, one per limit:
//!
//! - `[TAG UNTIL,AMOUNT,AMOUNT]` for two amounts
//! - `[TAG UNTIL,INSTANT*UNITS,INSTANT*UNITS]` for a log
//!
//! `TAG` is the [tag](names::tag) of the limit. `UNTIL` is the instant at which the state expires.
//! All instants are in microseconds since 1970.
//!
//! Before the entries, a text can contain the time of the key:
//!
//! - `@INSTANT` is the time of the newest decision on the key.
//! - `.MARK-MICROS-MICROS` follows if clocks differ by more than `max_skew`: a number that
//!   distinguishes this time of the key from others, and by how much other clocks are behind it.
//!
//! Two processes may configure the same policy differently. So a text can contain entries of other
//! limits, which are kept. An entry that cannot be parsed is read as [`State::Fresh`].

mod head;

use std::fmt::Write;

pub(super) use self::head::{Head, LONGEST as LONGEST_HEAD, UnknownVersion, join, split};
use super::names;
use crate::policy::Policy;
use crate::strategy::{Log, State};
use crate::time::Timestamp;

/// The first invalid instant, in microseconds since 1970: it is in the year 2540. A valid instant
/// is at most two of the longest periods, 284 years, after an instant of this century.
const LATEST: u64 = 1 << 54;

/// Returns the states of the policy's limits, in the order of the limits. A limit without an entry
/// is [`State::Fresh`].
pub(super) fn read(policy: &Policy, text: &str) -> Vec<State> {
    (0..policy.limits().len())
        .map(|position| numbers(text, &names::tag(policy, position)).and_then(state).unwrap_or_default())
        .collect()
}

/// Returns the numbers of the entry with this tag.
pub(super) fn numbers<'a>(text: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("[{tag} "))?;
    rest.split_once(']').map(|(numbers, _)| numbers)
}

/// Parses a number that consists of digits only. `str::parse` would allow a sign.
pub(super) fn number(text: &str) -> Option<u64> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_digits)
}

/// Parses an instant before [`LATEST`].
fn instant(text: &str) -> Option<Timestamp> {
    number(text).filter(|&micros| micros < LATEST).map(Timestamp::from_micros)
}

fn amount(text: &str) -> Option<u32> {
    number(text).and_then(|number| number.try_into().ok())
}

/// Parses the numbers of an entry. Returns `None` if they are invalid.
fn state(numbers: &str) -> Option<State> {
    let (until, rest) = numbers.split_once(',')?;
    let until = instant(until)?;
    if rest.contains('*') {
        let entry = |text: &str| text.split_once('*').and_then(|(at, units)| Some((instant(at)?, amount(units)?)));
        let entries: Vec<(Timestamp, u32)> = rest.split(',').map(entry).collect::<Option<_>>()?;
        return Some(State::Log(Box::new(Log::from_entries(until, entries))));
    }
    let (first, second) = rest.split_once(',')?;
    Some(State::Counts { until, amounts: [amount(first)?, amount(second)?] })
}

/// Returns the text of these states, followed by the entries of other limits in `stored`. States
/// that have expired at `now` are left out. Also returns the instant at which the last state
/// expires, or `now` if the text is empty.
pub(super) fn write(policy: &Policy, states: &[State], stored: &str, now: Timestamp) -> (String, Timestamp) {
    let (mut text, mut latest) = (String::new(), now);
    let mut tags = Vec::with_capacity(states.len());
    for (position, state) in states.iter().enumerate() {
        let tag = names::tag(policy, position);
        let until = state.until();
        if until > now {
            latest = latest.max(until);
            write_one(&mut text, &tag, state).expect("writing to a string does not fail");
        }
        tags.push(tag);
    }
    for (tag, numbers) in entries(stored).filter(|(tag, _)| !tags.iter().any(|own| own == tag)) {
        let until = numbers.split_once(',').and_then(|(until, _)| instant(until));
        if let Some(until) = until.filter(|&until| until > now) {
            latest = latest.max(until);
            write!(text, "[{tag} {numbers}]").expect("writing to a string does not fail");
        }
    }
    (text, latest)
}

/// Appends the entry of a state.
fn write_one(text: &mut String, tag: &str, state: &State) -> std::fmt::Result {
    let until = state.until().as_micros();
    match state {
        State::Counts { amounts: [first, second], .. } => write!(text, "[{tag} {until},{first},{second}]"),
        State::Log(log) => {
            write!(text, "[{tag} {until}")?;
            log.entries().try_for_each(|(at, units)| write!(text, ",{}*{units}", at.as_micros()))?;
            write!(text, "]")
        }
        State::Fresh => Ok(()),
    }
}

/// Returns the tag and the numbers of each entry.
fn entries(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('[').skip(1).filter_map(|entry| entry.split_once(']')?.0.split_once(' '))
}
