//! The binary format of the small states. These are all states except the entries in the log of a
//! moving window. The log has a key of its own.
//!
//! The value of a key is a sequence of records, one per limit, in the order of the limits. All
//! numbers are unsigned and big-endian, and all instants are microseconds of Unix time.
//!
//! | bytes | a record of 20 bytes | a record of a moving window, of 44 bytes |
//! |---|---|---|
//! | 4 | the digest of the limit, with the highest bit 0 | the digest of the limit, with the highest bit 1 |
//! | 8 | the instant at which the state expires | the instant at which the state expires |
//! | 4 | the first amount | the units in the log |
//! | 4 | the second amount | the instant of the oldest entry, with 8 bytes |
//! | 4 | | the place of the oldest entry |
//! | 4 | | the number of places in use |
//! | 4 | | the number of places |
//! | 4 | | the chunk of the oldest entry |
//! | 4 | | the chunk of the newest entry |
//!
//! A log has places for entries. If it has more than 256 of them, they are divided into chunks.
//! `strategy/moving_window.lua` documents the layout.
//!
//! The digest is the first four bytes of the MD5 of the limit's [tag](crate::storage::names::tag),
//! except for the highest bit. So it is the same in every build. If two limits of a policy have
//! the same digest, the later one gets the next free number.
//!
//! Two releases of a program may configure the same policy differently. So records of other limits
//! can follow, and the scripts keep them until they expire. An expired record counts as fresh.
//!
//! The key's name contains the [version](super::key_names::VERSION) of this format. A value of another format
//! under the key is an error, and is not overwritten: bytes after the last whole record, or a
//! record of another limit with an instant of 2^54 or later. A record of a limit of the policy with
//! such an instant counts as fresh.

use std::fmt::Write;

use crate::policy::Policy;
use crate::storage::names;
use crate::strategy::State;
use crate::time::Timestamp;

/// The sizes of a record and of a record of a moving window, in bytes.
pub(super) const SIZE: usize = 20;
pub(super) const LOG_SIZE: usize = 44;

/// The bit of a digest whose record belongs to a moving window.
const LOG: u32 = 1 << 31;

/// The first instant that is too late for a valid record, as in the scripts.
const LATEST: u64 = 1 << 54;

/// Returns the digests of the limits. `logs` yields a value per limit: `true` for a moving window.
pub(super) fn digests(policy: &Policy, logs: impl Iterator<Item = bool>) -> Vec<u32> {
    let mut digests = Vec::with_capacity(policy.limits().len());
    for (position, is_log) in logs.enumerate() {
        let [a, b, c, d, ..] = md5::compute(names::tag(policy, position)).0;
        digests.push(distinct(u32::from_be_bytes([a, b, c, d]), is_log, &digests));
    }
    digests
}

/// Returns a digest for `hash` that is not in `used`.
fn distinct(hash: u32, is_log: bool, used: &[u32]) -> u32 {
    let flag = if is_log { LOG } else { 0 };
    let mut digest = hash & !LOG | flag;
    while used.contains(&digest) {
        digest = digest.wrapping_add(1) & !LOG | flag;
    }
    digest
}

/// Returns the state for each digest. It is [`State::Fresh`] if the record is missing or invalid,
/// or if it belongs to a log, because the value does not contain the log's entries.
pub(super) fn read(digests: &[u32], stored: &[u8]) -> Vec<State> {
    digests.iter().map(|&digest| find(digest, stored).and_then(state).unwrap_or_default()).collect()
}

/// Returns the first record with this digest.
fn find(digest: u32, stored: &[u8]) -> Option<&[u8]> {
    records(stored).find(|(other, _)| *other == digest).map(|(_, record)| record)
}

/// Returns the records with their digests.
fn records(mut stored: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        let digest = u32::from_be_bytes(*stored.first_chunk()?);
        let (record, rest) = stored.split_at_checked(if digest & LOG == 0 { SIZE } else { LOG_SIZE })?;
        stored = rest;
        Some((digest, record))
    })
}

/// Parses a record of two amounts.
fn state(record: &[u8]) -> Option<State> {
    if record.len() != SIZE {
        return None;
    }
    let number = |at: usize| record[at..].first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    let until = u64::from_be_bytes(*record[4..].first_chunk()?);
    let amounts = [number(12)?, number(16)?];
    (until < LATEST).then(|| State::Counts { until: Timestamp::from_micros(until), amounts })
}

/// Returns the units and the instant of the oldest entry in the record of a log.
pub(super) fn log(digest: u32, stored: &[u8]) -> Option<(u64, Timestamp)> {
    let record = find(digest, stored).filter(|record| record.len() == LOG_SIZE)?;
    let units = u32::from_be_bytes(*record[12..].first_chunk()?);
    let oldest = u64::from_be_bytes(*record[16..].first_chunk()?);
    Some((units.into(), Timestamp::from_micros(oldest)))
}

/// Returns a line of text for each record: the tag of its limit, or the digest if the limit is not
/// in the policy, and the record's numbers.
pub(super) fn lines(policy: &Policy, digests: &[u32], stored: &[u8]) -> Vec<String> {
    let line = |(digest, record): (u32, &[u8])| {
        let position = digests.iter().position(|&other| other == digest);
        let mut line = position.map_or_else(|| format!("{digest:08x}"), |position| names::tag(policy, position));
        let mut rest = &record[4..];
        for bytes in if record.len() == SIZE { &[8, 4, 4][..] } else { &[8, 4, 8, 4, 4, 4, 4, 4] } {
            let (number, others) = rest.split_at(*bytes);
            let number = number.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
            write!(line, " {number}").expect("writing to a string does not fail");
            rest = others;
        }
        line
    };
    records(stored).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 1.fixed-window/60000000 | md5sum`, and so on.
    const FIXED: u32 = 0xcea7_0f6d;
    const MOVING: u32 = 0x0733_cc2d;

    fn policy() -> Policy {
        "fixed-window 5/minute; moving-window 5/hour".parse().unwrap()
    }

    #[test]
    fn digests_are_the_same_in_every_build() {
        assert_eq!(digests(&policy(), [false, true].into_iter()), [FIXED & !LOG, MOVING | LOG]);
    }

    #[test]
    fn limits_with_the_same_hash_get_different_digests() {
        assert_eq!(distinct(7, false, &[]), 7);
        assert_eq!(distinct(7, false, &[7, 8]), 9);
        assert_eq!(distinct(7 | LOG, false, &[7 | LOG]), 7);
        assert_eq!(distinct(7, true, &[7 | LOG]), 8 | LOG);
        assert_eq!(distinct(!LOG, false, &[!LOG]), 0);
    }

    #[test]
    fn incomplete_records_and_late_instants_count_as_fresh() {
        let record = |digest: u32, until: u64| {
            [&digest.to_be_bytes()[..], &until.to_be_bytes(), &[0, 0, 0, 1, 0, 0, 0, 2]].concat()
        };
        let state = State::Counts { until: Timestamp::from_micros(9), amounts: [1, 2] };
        let stored = [record(3, 9), vec![0x80; LOG_SIZE], record(4, LATEST), record(5, 9)].concat();
        assert_eq!(read(&[3, 4, 5], &stored), [state.clone(), State::Fresh, state.clone()]);
        assert_eq!(read(&[3, 4, 5], &stored[..stored.len() - 1]), [state, State::Fresh, State::Fresh]);
    }

    #[test]
    fn lines_name_the_limits_of_the_policy() {
        let digests = digests(&policy(), [false, true].into_iter());
        let mut stored = [&digests[0].to_be_bytes()[..], &9_u64.to_be_bytes(), &[0, 0, 0, 1, 0, 0, 1, 2]].concat();
        stored.extend([digests[1].to_be_bytes(), [0; 4], [0, 0, 0, 8], [0, 0, 0, 5]].concat());
        stored.extend([0; LOG_SIZE - 16]);
        stored.extend([[0, 0, 0, 7], [0; 4], [0, 0, 0, 6], [0; 4], [0; 4]].concat());
        let lines = lines(&policy(), &digests, &stored);
        let expected =
            ["1.fixed-window/60000000 9 1 258", "2.moving-window/3600000000 8 5 0 0 0 0 0 0", "00000007 6 0 0"];
        assert_eq!(lines, expected);
    }
}
