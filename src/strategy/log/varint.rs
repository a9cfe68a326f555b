//! The encoding of entries.
//!
//! An entry is the time since the entry before it, in microseconds, and its units. The first byte
//! holds the low four bits of the time, the number of bytes that hold its other bits, and a flag
//! for units other than 1. Such units follow, with seven bits in each byte.
//!
//! An entry of one unit takes at most four bytes if the time is at most 268 seconds, and five bytes
//! if it is at most 19 hours.

/// The maximum length of an entry in bytes.
pub(super) const LONGEST: usize = 1 + 8 + 10;

/// The flag of the first byte for units other than 1.
const UNITS: u8 = 0x80;

/// The number of bits of the time in the first byte.
const LOW_BITS: u32 = 4;

/// The number of bytes for the other bits of the time, indexed by their three-bit code.
const LENGTHS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 8];

/// Returns the length of an entry of one unit that is `micros` microseconds after the previous one.
pub(super) fn len(micros: u64) -> usize {
    let mut data = Vec::new();
    push(&mut data, micros, 1);
    data.len()
}

/// Appends an entry that is `micros` microseconds after the previous one.
#[inline]
pub(super) fn push(data: &mut Vec<u8>, micros: u64, units: u64) {
    let high = micros >> LOW_BITS;
    let bytes = (u64::BITS - high.leading_zeros()).div_ceil(8);
    let code = if bytes > 6 { 7 } else { bytes };
    #[allow(clippy::cast_possible_truncation)] // 7 bits and a flag
    let first = (micros & 0xf) as u8 | (code as u8) << LOW_BITS | if units == 1 { 0 } else { UNITS };
    data.push(first);
    data.extend_from_slice(&high.to_le_bytes()[..LENGTHS[code as usize]]);
    if units != 1 {
        push_units(data, units);
    }
}

#[allow(clippy::cast_possible_truncation)] // low bits
fn push_units(data: &mut Vec<u8>, mut units: u64) {
    while units > 0x7f {
        data.push(units as u8 | 0x80);
        units >>= 7;
    }
    data.push(units as u8);
}

/// Decodes the entries of a chunk in order.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    fn units(&mut self) -> u64 {
        let (mut units, mut shift) = (0, 0);
        while let Some((&byte, rest)) = self.0.split_first() {
            self.0 = rest;
            units |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        units
    }
}

impl Iterator for Reader<'_> {
    /// The microseconds since the previous entry, and the units.
    type Item = (u64, u64);

    #[inline]
    fn next(&mut self) -> Option<(u64, u64)> {
        let (&first, rest) = self.0.split_first()?;
        let (high, rest) = rest.split_at_checked(LENGTHS[usize::from(first >> LOW_BITS & 7)])?;
        let high = high.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        self.0 = rest;
        let units = if first & UNITS == 0 { 1 } else { self.units() };
        Some((high << LOW_BITS | u64::from(first & 0xf), units))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_decoded_as_they_were_encoded() {
        let around = |bits: u32| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1];
        let numbers: Vec<u64> = (1..63).flat_map(around).chain([0, u64::MAX]).collect();
        let entries: Vec<_> =
            numbers.iter().flat_map(|&micros| numbers.iter().map(move |&units| (micros, units))).collect();
        let mut data = Vec::new();
        for &(micros, units) in &entries {
            let before = data.len();
            push(&mut data, micros, units);
            assert!(data.len() - before <= LONGEST, "{micros} {units}");
        }
        assert!(Reader(&data).eq(entries));
    }

    #[test]
    fn entries_of_one_unit_take_at_most_four_bytes_up_to_268_seconds_and_five_up_to_19_hours() {
        for (micros, bytes) in [(15, 1), (1_000_000, 3), (268_000_000, 4), (269_000_000, 5), (19 * 3_600_000_000, 5)] {
            let mut data = Vec::new();
            push(&mut data, micros, 1);
            assert_eq!(data.len(), bytes);
        }
    }
}
