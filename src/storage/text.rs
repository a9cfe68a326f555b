//! The text format of states.
//!
//! A text begins with `v` and the version of its format. All versions do. A sequence of
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
//!
//! A text that begins with another version is never overwritten: if it counted as fresh, each side
//! of a rolling upgrade would reset the limits of the other with each hit. A text that does not
//! begin with a version was written by no release, and no upgrade would make it readable. It counts
//! as fresh, because an error would last until it expires.

use std::fmt::Write;

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

/// The first character of a text. A decimal number follows, which is the version of the format.
const FORMAT: char = 'v';

/// The version of the format that this module writes.
const VERSION: &str = "1";

/// The largest number of clocks in a text.
const MAX_OFFSETS: usize = 4;

/// The largest length of the beginning of a text in bytes: the version, the newest instant, a mark
/// of 5 digits, and [`MAX_OFFSETS`] numbers of 17 digits.
pub(super) const LONGEST_HEAD: u64 = 2 + 18 + 6 + 18 * MAX_OFFSETS as u64;

/// The number of marks. It is prime, because instants on a regular grid are evenly distributed
/// modulo a prime.
const MARKS: u64 = 32_749;

/// The time of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TextHead {
    /// The newest instant at which the key was decided.
    pub(super) newest: Timestamp,
    /// A number that distinguishes this time of the key from that of an earlier or later text, or 0
    /// if `offsets` is empty.
    pub(super) mark: u64,
    /// The microseconds by which other clocks are behind the time of the key, in ascending order.
    offsets: Vec<u64>,
}

impl TextHead {
    pub(super) fn new(newest: Timestamp) -> Self {
        Self { newest, mark: 0, offsets: Vec::new() }
    }

    /// Returns the offset of the fastest known clock that is behind by at least `micros`.
    pub(super) fn offset(&self, micros: u64) -> Option<u64> {
        self.offsets.iter().copied().find(|&offset| offset >= micros)
    }

    /// Adds the offset of a clock that is behind by `micros`, unless there is an offset that is equal, or
    /// smaller by at most `tolerance`. Returns `true` if an offset was added. If there are too many
    /// offsets, the largest one is dropped.
    pub(super) fn add_offset(&mut self, micros: u64, tolerance: u64) -> bool {
        if self.offset(micros.saturating_sub(tolerance)).is_some_and(|offset| offset <= micros) {
            return false;
        }
        let place = self.offsets.partition_point(|&offset| offset < micros);
        self.offsets.insert(place, micros);
        self.offsets.truncate(MAX_OFFSETS);
        if self.mark == 0 {
            self.mark = 1 + self.newest.as_micros() % MARKS;
        }
        place < MAX_OFFSETS
    }

    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('-');
        let (newest, mark) = numbers.next()?.split_once('.').unwrap_or((text, "0"));
        let offsets = numbers.map(number).collect::<Option<Vec<_>>>()?;
        let is_valid = offsets.is_sorted() && offsets.len() <= MAX_OFFSETS;
        Some(Self { newest: instant(newest)?, mark: number(mark)?, offsets }).filter(|_| is_valid)
    }
}

/// The version of a text in a format that this program does not know.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownVersion<'a>(pub(super) &'a str);

/// Returns the time of the key, if the text contains it, and the text of the states.
///
/// A text without a version cannot have been written by any version of this crate. It counts as
/// empty.
pub(super) fn split(text: &str) -> Result<(Option<TextHead>, &str), UnknownVersion<'_>> {
    let Some(rest) = text.strip_prefix(FORMAT) else { return Ok((None, "")) };
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (version, rest) = rest.split_at(digits);
    if version != VERSION {
        return if version.is_empty() { Ok((None, "")) } else { Err(UnknownVersion(version)) };
    }
    let (head, states) = rest.split_at(rest.find('[').unwrap_or(rest.len()));
    Ok((head.strip_prefix('@').and_then(TextHead::parse), states))
}

/// Returns the text of states, preceded by the version and the time of the key. It is empty if
/// there is neither a time nor a state.
pub(super) fn join(head: Option<&TextHead>, states: &str) -> String {
    if head.is_none() && states.is_empty() {
        return String::new();
    }
    let mut text = format!("{FORMAT}{VERSION}");
    if let Some(TextHead { newest, mark, offsets }) = head {
        let written = write!(text, "@{}", newest.as_micros());
        let written = written.and_then(|()| if offsets.is_empty() { Ok(()) } else { write!(text, ".{mark}") });
        let written = written.and_then(|()| offsets.iter().try_for_each(|offset| write!(text, "-{offset}")));
        written.expect("writing to a string does not fail");
    }
    text + states
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_is_parsed_as_written() {
        let mut head = TextHead::new(Timestamp::from_micros((1 << 54) - 1));
        for offset in [7, 1 << 53, 90, 1 << 52, 1_000_000] {
            assert_eq!(split(&join(Some(&head), "[a 1,2,3]")), Ok((Some(head.clone()), "[a 1,2,3]")));
            head.add_offset(offset, 5);
            assert!(join(Some(&head), "").len() as u64 <= LONGEST_HEAD);
        }
        assert_eq!(head.offsets, [7, 90, 1_000_000, 1 << 52], "the largest offset is dropped");
        assert!(!head.add_offset(1 << 53, 5), "a larger offset is not added");
        assert!(!head.add_offset(95, 5) && head.add_offset(96, 5));
    }

    #[test]
    fn text_without_a_version_counts_as_empty() {
        for text in ["", "v", "@17[a 1,2,3]", "[a 1,2,3]", "vv1@17", "V1@17", "1@17"] {
            assert_eq!(split(text), Ok((None, "")), "{text}");
        }
        for text in
            ["v1@[a 1]", "v1@x[a 1]", "v1@1.x-4[a 1]", "v1@1.2-9-4[a 1]", "v1@18014398509481984[a 1]", "v1?[a 1]"]
        {
            assert_eq!(split(text), Ok((None, "[a 1]")), "{text}");
        }
        for (text, version) in [("v2", "2"), ("v12@17[a 1]", "12"), ("v01@17", "01"), ("v0", "0"), ("v2\u{fffd}", "2")]
        {
            assert_eq!(split(text), Err(UnknownVersion(version)), "{text}");
        }
    }
}
