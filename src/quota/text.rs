//! Parsing quotas, and writing them as text.

use std::fmt;
use std::str::FromStr;

use super::{DAY, HOUR, MILLISECOND, MINUTE, Quota, SECOND};
use crate::error::ConfigError;
use crate::text::Scanner;

/// The units of time in strings: the microseconds, the canonical name, and its aliases. Case is
/// ignored.
const UNITS: [(u64, &str, &[&str]); 8] = [
    (365 * DAY, "year", &["years"]),
    (30 * DAY, "month", &["months"]),
    (7 * DAY, "week", &["weeks", "w"]),
    (DAY, "day", &["days", "d"]),
    (HOUR, "hour", &["hours", "hr", "h"]),
    (MINUTE, "minute", &["minutes", "min", "m"]),
    (SECOND, "second", &["seconds", "sec", "s"]),
    (MILLISECOND, "ms", &[]),
];

impl Quota {
    /// Scans `amount/[multiple] unit [burst n]`.
    pub(crate) fn scan(scanner: &mut Scanner<'_>) -> Result<Self, ConfigError> {
        let amount = scanner.number("the amount")?.ok_or_else(|| scanner.expected("an amount and a period"))?;
        if scanner.symbol(&['/']).is_none() && !scanner.prefix("per") {
            return Err(scanner.expected("\"/\" or \"per\" after the amount"));
        }
        let multiple = scanner.number("the multiple of the period")?.unwrap_or(1);
        let period = scan_unit(scanner)?.saturating_mul(u64::from(multiple));
        let quota = Self::try_of(amount, period)?;
        if !scanner.keyword("burst") {
            return Ok(quota);
        }
        let burst = scanner.number("the burst")?.ok_or_else(|| scanner.expected("a number after \"burst\""))?;
        quota.try_burst(burst)
    }
}

fn scan_unit(scanner: &mut Scanner<'_>) -> Result<u64, ConfigError> {
    let word = scanner.word();
    if word.is_empty() {
        return Err(scanner.expected("a unit"));
    }
    UNITS
        .iter()
        .find(|(_, name, others)| [name].into_iter().chain(*others).any(|known| known.eq_ignore_ascii_case(word)))
        .map(|&(micros, ..)| micros)
        .ok_or_else(|| {
            let names = UNITS.map(|(_, name, _)| name);
            scanner.unknown("the unit", word, &names, "s, min, h, d, week, month, year or ms")
        })
}

impl FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut scanner = Scanner::new(text);
        let quota = Self::scan(&mut scanner)?;
        if scanner.is_at_end() { Ok(quota) } else { Err(scanner.expected("nothing more after one quota")) }
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (amount, period) = (self.amount, self.period);
        match UNITS.iter().find(|(unit, ..)| period % unit == 0) {
            Some((unit, name, _)) if period == *unit => write!(f, "{amount}/{name}")?,
            Some((unit, name @ "ms", _)) => write!(f, "{amount}/{}{name}", period / unit)?,
            Some((unit, name, _)) => write!(f, "{amount}/{} {name}s", period / unit)?,
            None => write!(f, "{amount}/{period}us")?,
        }
        self.burst.map_or(Ok(()), |burst| write!(f, " burst {burst}"))
    }
}
