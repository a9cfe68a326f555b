//! Parsing quotas, and writing them as text.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

use super::{DAY, HOUR, MILLISECOND, MINUTE, MONTH, Quota, SECOND, WEEK, YEAR};
use crate::error::ConfigError;
use crate::text::{Scanner, Unreadable, edits, parse};

/// The units of time in strings: the microseconds, the canonical name, and its aliases. Case is
/// ignored.
const UNITS: [(u64, &str, &[&str]); 8] = [
    (YEAR, "year", &["years"]),
    (MONTH, "month", &["months"]),
    (WEEK, "week", &["weeks", "w"]),
    (DAY, "day", &["days", "d"]),
    (HOUR, "hour", &["hours", "hr", "h"]),
    (MINUTE, "minute", &["minutes", "min", "m"]),
    (SECOND, "second", &["seconds", "sec", "s"]),
    (MILLISECOND, "ms", &[]),
];

/// Abbreviations that are not units, but are nearer to a shorter unit than to the one that they
/// mean.
const ABBREVIATIONS: [(&str, &str); 5] =
    [("mo", "month"), ("mos", "month"), ("y", "year"), ("yr", "year"), ("yrs", "year")];

/// Words for the unit of an amount, as in nginx's `10r/s`.
const REQUESTS: [&str; 5] = ["r", "req", "reqs", "request", "requests"];

/// Separators of thousands.
const SEPARATORS: [char; 4] = [',', '_', '\'', ' '];

impl Quota {
    /// Scans `amount/[multiple] unit [burst n]`.
    pub(crate) fn scan(scanner: &mut Scanner<'_>) -> Result<Self, Unreadable> {
        Ok(Self::scan_counting(scanner, None)?.0)
    }

    /// Like [`scan`](Self::scan), but `counted` may follow the amount, as in `100 refusals/minute`.
    /// Returns `true` if it does.
    pub(crate) fn scan_counting(scanner: &mut Scanner<'_>, counted: Option<&str>) -> Result<(Self, bool), Unreadable> {
        let start = *scanner;
        let amount = scanner.number_or_zero("the amount")?.ok_or_else(|| scanner.expected("an amount and a period"))?;
        let is_counting = counted.is_some_and(|word| scanner.keyword(word));
        let Some(period) = scan_period(scanner)? else { return Err(not_an_amount(start, *scanner)) };
        if amount == 0 {
            return Err(scanner.unreadable("the amount", "0", "it must be at least 1"));
        }
        let quota = Self::try_of(amount, period)?;
        let option = *scanner;
        if !scanner.keyword("burst") {
            return Ok((quota, is_counting));
        }
        let burst = scanner.option(&option, "the burst")?;
        if burst == 0 {
            return Err(scanner.unreadable("the burst", "0", "it must be at least 1"));
        }
        Ok((quota.try_burst(burst)?, is_counting))
    }
}

/// Scans `/[multiple] unit`, and returns the microseconds. Returns `None` without a `/` or a `per`.
fn scan_period(scanner: &mut Scanner<'_>) -> Result<Option<u64>, Unreadable> {
    if scanner.symbol(&['/']).is_none() && !scanner.prefix("per") {
        return Ok(None);
    }
    Ok(Some(scan_time(scanner, "the multiple of the period")?))
}

/// Scans `[multiple] unit`, and returns the microseconds. `what` names the multiple.
pub(crate) fn scan_time(scanner: &mut Scanner<'_>, what: &str) -> Result<u64, Unreadable> {
    let start = *scanner;
    let time = scan_one_unit(scanner, what)?;
    // 1h30m
    let (mut ahead, mut sum) = (*scanner, time);
    while ahead.rest().starts_with(|c: char| c.is_ascii_digit()) {
        let Ok(more) = scan_one_unit(&mut ahead, what) else { return Ok(time) };
        sum = more.saturating_add(sum);
    }
    let written = ahead.read_since(&start);
    if written == scanner.read_since(&start) {
        return Ok(time);
    }
    let error = scanner.unreadable("the time", written, "a time has one unit");
    Err(error.meant(ahead.replaced(&start, &Time(sum).to_string())))
}

fn scan_one_unit(scanner: &mut Scanner<'_>, what: &str) -> Result<u64, Unreadable> {
    let multiple = scanner.number(what)?.unwrap_or(1);
    Ok(scan_unit(scanner)?.saturating_mul(u64::from(multiple)))
}

fn scan_unit(scanner: &mut Scanner<'_>) -> Result<u64, Unreadable> {
    let start = *scanner;
    let word = scanner.word();
    if word.is_empty() {
        return Err(scanner.expected("a unit"));
    }
    if let Some((micros, _)) = spellings().find(|(_, known)| known.eq_ignore_ascii_case(word)) {
        return Ok(micros);
    }
    let error = scanner.unreadable("the unit", word, "expected s, min, h, d, week, month, year or ms");
    Err(error.meant(meant_unit(word).map(|unit| scanner.replaced(&start, unit))))
}

/// Returns all names and aliases of the units, each with its microseconds.
fn spellings() -> impl Iterator<Item = (u64, &'static str)> {
    UNITS.iter().flat_map(|(micros, name, aliases)| [name].into_iter().chain(*aliases).map(|name| (*micros, *name)))
}

/// Returns the unit that `word` probably means: the nearest one within two edits, if it has the same
/// first letter.
///
/// A suggestion must not loosen a limit. So returns `None` if the word is also within two edits of a
/// longer unit.
fn meant_unit(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    if let Some((_, unit)) = ABBREVIATIONS.iter().find(|(abbreviation, _)| *abbreviation == word) {
        return Some(unit);
    }
    let near = || spellings().filter_map(|(micros, name)| Some((edits(&word, name)?, Reverse(micros), name)));
    let (distance, Reverse(micros), nearest) = near().min()?;
    let is_longest = near().all(|(_, Reverse(other), _)| other <= micros);
    (is_longest && distance < word.len() && nearest[..1] == word[..1]).then_some(nearest)
}

/// Returns the error for an amount that is not followed by a period. `start` is the position before
/// the amount, and `scanner` the one after it.
fn not_an_amount(start: Scanner<'_>, mut scanner: Scanner<'_>) -> Unreadable {
    let expected = scanner.expected("\"/\" or \"per\" after the amount");
    let amount = scanner.read_since(&start);
    // 10r/s
    let mut after = scanner;
    let word = after.word();
    if REQUESTS.iter().any(|known| known.eq_ignore_ascii_case(word)) {
        let error = scanner.unreadable("", word, "an amount has no unit");
        return error.meant(after.replaced(&start, amount));
    }
    // 1,000/day and 1.5/second
    scanner.take_while(|c| c.is_ascii_digit() || c == '.' || SEPARATORS.contains(&c));
    let written = scanner.read_since(&start);
    if written == amount {
        return expected;
    }
    let error = scanner.unreadable("the amount", written, "an amount is a whole number without separators");
    let meant = whole(written, &mut scanner);
    error.meant(meant.map(|quota| scanner.replaced(&start, &quota.to_string())))
}

/// The largest amount that replaces a smaller one with decimals. As many units can be spent at once.
const MAX_WHOLE: u64 = 10;

/// Returns the quota of a whole amount for an amount with decimals or separators, such as
/// `3/2 seconds` for `1.5/second`. If that amount is large, rounds down: `99/second` for
/// `99.9/second`. Scans the period.
fn whole(written: &str, scanner: &mut Scanner<'_>) -> Option<Quota> {
    let (units, decimals) = written.split_once('.').unwrap_or((written, ""));
    if !units.split(SEPARATORS).skip(1).all(|group| group.len() == 3) {
        return None;
    }
    let numerator: u64 = [&units.replace(SEPARATORS, ""), decimals].concat().parse().ok()?;
    let denominator = 10_u64.checked_pow(u32::try_from(decimals.len()).ok()?)?;
    // The greatest common divisor.
    let (mut divisor, mut rest) = (denominator, numerator);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    let period = scan_period(scanner).ok()??;
    let (amount, periods) = match (numerator / divisor, denominator / divisor) {
        (large, 2..) if large > MAX_WHOLE => (numerator / denominator, 1),
        whole => whole,
    };
    Quota::try_of(u32::try_from(amount).ok()?, period.saturating_mul(periods)).ok()
}

impl FromStr for Quota {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        parse(text, &[("burst", "10/second burst 20")], |scanner| {
            let text = scanner.rest();
            let amount = text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len());
            if amount > 0 && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '"') {
                let why = "a quota begins with its amount, a `Policy` also reads a name and a strategy";
                let error = scanner.unreadable("", text[..amount].trim_end(), why);
                return Err(error.meant(text[amount..].to_owned()));
            }
            let quota = Self::scan(scanner)?;
            if scanner.is_at_end() {
                return Ok(quota);
            }
            Err(scanner
                .expected("the end of the quota, because only a `Policy` has several limits, a queue or kept units"))
        })
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.amount, Period(self.period))?;
        self.burst.map_or(Ok(()), |burst| write!(f, " burst {burst}"))
    }
}

/// Writes a period in microseconds as in the text of a quota: `minute`, `2 hours`.
pub(crate) struct Period(pub(crate) u64);

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = Time(self.0).to_string();
        f.write_str(text.strip_prefix("1 ").unwrap_or(&text))
    }
}

/// Writes a time in microseconds: `1 minute`, `2 hours`.
pub(crate) struct Time(pub(crate) u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0;
        match UNITS.iter().find(|(unit, ..)| micros.is_multiple_of(*unit)) {
            Some((unit, name, _)) if micros == *unit => write!(f, "1 {name}"),
            Some((unit, name @ "ms", _)) => write!(f, "{}{name}", micros / unit),
            Some((unit, name, _)) => write!(f, "{} {name}s", micros / unit),
            None => write!(f, "{micros}us"),
        }
    }
}
