//! The values of times in response fields.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Numbers from here on are seconds since the Unix epoch (the year 2001), and not until the reset.
const FIRST_EPOCH_SECOND: u64 = 1_000_000_000;
/// Numbers from here on are milliseconds since the Unix epoch (the year 1973).
const FIRST_EPOCH_MILLI: u64 = 100_000_000_000;
/// Numbers from here on are no instant of this millennium.
const END_OF_EPOCH_MILLIS: u64 = 100_000_000_000_000;

/// Parses a decimal number without a sign. An integer part that is too large becomes the largest
/// duration.
pub(super) fn seconds(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let nanos = format!("{fraction:0<9.9}").parse().ok()?;
    Some(whole.parse().map_or(Duration::MAX, |whole| Duration::new(whole, nanos)))
}

/// Parses `Retry-After`: seconds, or an HTTP date. Some servers send an instant in seconds.
pub(super) fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    match seconds(text) {
        Some(number) => Some(reset(text, now).unwrap_or(number)),
        None => Some(until(httpdate::parse_http_date(text).ok()?, now)),
    }
}

/// Parses the reset of a limit: seconds from now, seconds or milliseconds since the Unix epoch, a
/// duration such as `6m0s`, or a date of RFC 3339 or HTTP.
pub(super) fn reset(text: &str, now: SystemTime) -> Option<Duration> {
    if let Some(number) = seconds(text) {
        let since_epoch = match number.as_secs() {
            0..FIRST_EPOCH_SECOND => return Some(number),
            FIRST_EPOCH_SECOND..FIRST_EPOCH_MILLI => number,
            FIRST_EPOCH_MILLI..END_OF_EPOCH_MILLIS => number / 1_000,
            _ => return None,
        };
        return Some(until(UNIX_EPOCH + since_epoch, now));
    }
    let date = || rfc_3339(text).or_else(|| httpdate::parse_http_date(text).ok());
    units(text).or_else(|| Some(until(date()?, now)))
}

fn until(end: SystemTime, now: SystemTime) -> Duration {
    end.duration_since(now).unwrap_or_default()
}

/// Parses a duration as Go writes it: `6m0s`, `1.5s` or `20ms`.
fn units(text: &str) -> Option<Duration> {
    let (mut rest, mut sum) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let unit = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(unit);
        let end = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let number = seconds(number)?;
        let part = match unit {
            "h" => number.checked_mul(3_600)?,
            "m" => number.checked_mul(60)?,
            "s" => number,
            "ms" => number / 1_000,
            "us" | "µs" => number / 1_000_000,
            "ns" => number / 1_000_000_000,
            _ => return None,
        };
        (sum, rest) = (sum.checked_add(part)?, next);
    }
    (!text.is_empty()).then_some(sum)
}

/// Parses a date of RFC 3339 between 1970 and 9999: `2025-01-01T00:00:30Z`. Rounds fractions of a
/// second up.
fn rfc_3339(text: &str) -> Option<SystemTime> {
    let bytes = text.as_bytes();
    let number = |at: usize, digits: usize| -> Option<i64> {
        let digits = text.get(at..at + digits)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let is_separated = [(4, b"--"), (7, b"--"), (10, b"Tt"), (13, b"::"), (16, b"::")]
        .into_iter()
        .all(|(at, separators)| bytes.get(at).is_some_and(|byte| separators.contains(byte)));
    let (year, month, day) = (number(0, 4)?, number(5, 2)?, number(8, 2)?);
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    let after = text.get(19..)?;
    let zone = after.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let fraction = &after[..after.len() - zone.len()];
    let has_fraction = !fraction.is_empty();
    if has_fraction && (!fraction.starts_with('.') || seconds(&["0", fraction].concat()).is_none()) {
        return None;
    }
    let offset = match zone.as_bytes() {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let at = text.len() - 5;
            let offset = number(at, 2)? * 3_600 + number(at + 3, 2)? * 60;
            if *sign == b'-' { -offset } else { offset }
        }
        _ => return None,
    };
    let is_in_range = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_separated || !is_in_range || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Years that begin in March end with the leap day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1 - 719_468;
    let seconds = days * 86_400 + hour * 3_600 + minute * 60 + second - offset + i64::from(has_fraction);
    Some(UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_rfc_3339_agree_with_http_dates() {
        for (text, http) in [
            ("1970-01-01T00:00:00Z", "Thu, 01 Jan 1970 00:00:00 GMT"),
            ("1994-11-06T08:49:37Z", "Sun, 06 Nov 1994 08:49:37 GMT"),
            ("2000-02-29t23:59:59z", "Tue, 29 Feb 2000 23:59:59 GMT"),
            ("2000-03-01T00:00:00+01:30", "Tue, 29 Feb 2000 22:30:00 GMT"),
            ("2025-12-31T20:00:00-04:00", "Thu, 01 Jan 2026 00:00:00 GMT"),
            ("2026-01-01T00:00:00.001Z", "Thu, 01 Jan 2026 00:00:01 GMT"),
        ] {
            assert_eq!(rfc_3339(text), Some(httpdate::parse_http_date(http).unwrap()), "{text}");
        }
        for text in [
            "2025-01-01",
            "2025-13-01T00:00:00Z",
            "2025-01-01T24:00:00Z",
            "2025-01-01T00:00:00",
            "2025-01-01T00:00:00.Z",
            "2025-01-01T00:00:00+1:00",
            "+025-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "2025-01-01T00:00:0\u{b5}Z",
        ] {
            assert_eq!(rfc_3339(text), None, "{text}");
        }
    }

    #[test]
    fn resets_are_read_in_every_unit() {
        let now = UNIX_EPOCH + Duration::from_secs(1_728_000_000);
        for (text, expected) in [
            ("0", Some(0)),
            ("30", Some(30_000)),
            ("0.25", Some(250)),
            ("1728000060", Some(60_000)),
            ("1728000060.5", Some(60_500)),
            ("1728000060250", Some(60_250)),
            ("1727000000", Some(0)),
            ("6m0s", Some(360_000)),
            ("1h2m3.5s", Some(3_723_500)),
            ("20ms", Some(20)),
            ("2024-10-04T00:01:00Z", Some(60_000)),
            ("Fri, 04 Oct 2024 00:01:00 GMT", Some(60_000)),
            ("31536000", Some(31_536_000_000)),
        ] {
            assert_eq!(reset(text, now), expected.map(Duration::from_millis), "{text}");
        }
        for text in ["", "-1", "soon", "1e3", "inf", ".5", "5.", "6m0", "6x", "m", "99999999999999999999", "1 s"] {
            assert_eq!(reset(text, now), None, "{text}");
        }
        assert_eq!(retry_after("99999999999999999999", now), Some(Duration::MAX));
        assert_eq!(retry_after("2.0", now), Some(Duration::from_secs(2)));
        assert_eq!(retry_after("1728000060", now), Some(Duration::from_secs(60)));
        assert_eq!(retry_after("6m0s", now), None);
    }
}
