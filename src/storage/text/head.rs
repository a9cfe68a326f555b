//! The beginning of a text: its format, and the time of the key.

use std::fmt::Write;

use super::{instant, number};
use crate::time::Timestamp;

/// The first character of a text. A decimal number follows, which is the version of the format.
const FORMAT: char = 'v';

/// The version of the format that this module writes.
const VERSION: &str = "1";

/// The largest number of clocks in a text.
const MAX_LINES: usize = 4;

/// The largest length of the beginning of a text in bytes: the version, the newest instant, a mark
/// of 5 digits, and [`MAX_LINES`] numbers of 17 digits.
pub(in crate::storage) const LONGEST: u64 = 2 + 18 + 6 + 18 * MAX_LINES as u64;

/// The number of marks. It is prime, because instants on a regular grid are evenly distributed
/// modulo a prime.
const MARKS: u64 = 32_749;

/// The time of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::storage) struct Head {
    /// The newest instant at which the key was decided.
    pub(in crate::storage) newest: Timestamp,
    /// A number that distinguishes this time of the key from that of an earlier or later text, or 0
    /// if `lines` is empty.
    pub(in crate::storage) mark: u64,
    /// The microseconds by which other clocks are behind the time of the key, in ascending order.
    lines: Vec<u64>,
}

impl Head {
    pub(in crate::storage) fn new(newest: Timestamp) -> Self {
        Self { newest, mark: 0, lines: Vec::new() }
    }

    /// Returns the line of the fastest known clock that is behind by at least `micros`.
    pub(in crate::storage) fn line(&self, micros: u64) -> Option<u64> {
        self.lines.iter().copied().find(|&line| line >= micros)
    }

    /// Adds the line of a clock that is behind by `micros`, unless there is a line that is higher
    /// by at most `tolerance`. Returns `true` if a line was added. If there are too many lines, the
    /// lowest one is dropped.
    pub(in crate::storage) fn add_line(&mut self, micros: u64, tolerance: u64) -> bool {
        if self.line(micros.saturating_sub(tolerance)).is_some_and(|line| line <= micros) {
            return false;
        }
        let place = self.lines.partition_point(|&line| line < micros);
        self.lines.insert(place, micros);
        self.lines.truncate(MAX_LINES);
        if self.mark == 0 {
            self.mark = 1 + self.newest.as_micros() % MARKS;
        }
        place < MAX_LINES
    }

    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('-');
        let (newest, mark) = numbers.next()?.split_once('.').unwrap_or((text, "0"));
        let lines = numbers.map(number).collect::<Option<Vec<_>>>()?;
        let is_valid = lines.is_sorted() && lines.len() <= MAX_LINES;
        Some(Self { newest: instant(newest)?, mark: number(mark)?, lines }).filter(|_| is_valid)
    }
}

/// The version of a text in a format that this program does not know.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::storage) struct UnknownVersion<'a>(pub(in crate::storage) &'a str);

/// Returns the time of the key, if the text contains it, and the text of the states.
///
/// A text without a version cannot have been written by any version of this crate. It counts as
/// empty.
pub(in crate::storage) fn split(text: &str) -> Result<(Option<Head>, &str), UnknownVersion<'_>> {
    let Some(rest) = text.strip_prefix(FORMAT) else { return Ok((None, "")) };
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (version, rest) = rest.split_at(digits);
    if version != VERSION {
        return if version.is_empty() { Ok((None, "")) } else { Err(UnknownVersion(version)) };
    }
    let (head, states) = rest.split_at(rest.find('[').unwrap_or(rest.len()));
    Ok((head.strip_prefix('@').and_then(Head::parse), states))
}

/// Returns the text of states, preceded by the version and the time of the key. It is empty if
/// there is neither a time nor a state.
pub(in crate::storage) fn join(head: Option<&Head>, states: &str) -> String {
    if head.is_none() && states.is_empty() {
        return String::new();
    }
    let mut text = format!("{FORMAT}{VERSION}");
    if let Some(Head { newest, mark, lines }) = head {
        let written = write!(text, "@{}", newest.as_micros());
        let written = written.and_then(|()| if lines.is_empty() { Ok(()) } else { write!(text, ".{mark}") });
        let written = written.and_then(|()| lines.iter().try_for_each(|line| write!(text, "-{line}")));
        written.expect("writing to a string does not fail");
    }
    text + states
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_is_parsed_as_written() {
        let mut head = Head::new(Timestamp::from_micros((1 << 54) - 1));
        for line in [7, 1 << 53, 90, 1 << 52, 1_000_000] {
            assert_eq!(split(&join(Some(&head), "[a 1,2,3]")), Ok((Some(head.clone()), "[a 1,2,3]")));
            head.add_line(line, 5);
            assert!(join(Some(&head), "").len() as u64 <= LONGEST);
        }
        assert_eq!(head.lines, [7, 90, 1_000_000, 1 << 52], "the lowest line is dropped");
        assert!(!head.add_line(1 << 53, 5), "there is no place for a lower line");
        assert!(!head.add_line(95, 5) && head.add_line(96, 5));
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
