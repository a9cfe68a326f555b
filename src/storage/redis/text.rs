//! States as text, for strategies that the server cannot run.

use std::fmt::Write;

use super::keys;
use crate::strategy::{Log, State};
use crate::{Policy, Timestamp};

/// The states of a policy's limits, one after the other. What cannot be read, or was written by another strategy, is fresh.
pub(super) fn read(policy: &Policy, text: &str) -> Vec<State> {
    let mut texts = text.split(';');
    let mut read = |position| {
        let (tag, numbers) = texts.next()?.split_once(':')?;
        if tag == keys::tag(policy, position) { read_one(numbers) } else { None }
    };
    (0..policy.limits().len()).map(|position| read(position).unwrap_or_default()).collect()
}

/// `until,amount,amount`, or `until,instant*units,instant*units` and so on.
fn read_one(numbers: &str) -> Option<State> {
    let (until, rest) = numbers.split_once(',')?;
    let until = Timestamp::from_micros(until.parse().ok()?);
    if rest.contains('*') {
        let entry = |text: &str| {
            let (at, units) = text.split_once('*')?;
            Some((Timestamp::from_micros(at.parse().ok()?), units.parse().ok()?))
        };
        let entries: Vec<(Timestamp, u32)> = rest.split(',').map(entry).collect::<Option<_>>()?;
        return Some(State::Log(Box::new(Log::from_entries(until, entries))));
    }
    let (first, second) = rest.split_once(',')?;
    Some(State::Counts { until, amounts: [first.parse().ok()?, second.parse().ok()?] })
}

/// The text of the states, empty when nothing is remembered, and until when it matters.
pub(super) fn write(policy: &Policy, states: &[State], now: Timestamp) -> (String, Timestamp) {
    let latest = states.iter().map(State::until).max().unwrap_or_default();
    let mut text = String::new();
    if latest <= now {
        return (text, latest);
    }
    for (position, state) in states.iter().enumerate() {
        let (tag, separator) = (keys::tag(policy, position), if position > 0 { ";" } else { "" });
        let until = state.until().as_micros();
        let written = match state {
            State::Counts { amounts: [first, second], .. } => write!(text, "{separator}{tag}:{until},{first},{second}"),
            State::Log(log) => write!(text, "{separator}{tag}:{until}")
                .and_then(|()| log.entries().try_for_each(|(at, units)| write!(text, ",{}*{units}", at.as_micros()))),
            State::Fresh => write!(text, "{separator}-"),
        };
        written.expect("writing to a string does not fail");
    }
    (text, latest)
}
