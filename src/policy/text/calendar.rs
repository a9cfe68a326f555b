//! The text form of calendar windows.

use crate::policy::Limit;
use crate::quota::Quota;
use crate::strategy::{CalendarWindow, UnknownZone, Weekday};
use crate::text::{Scanner, Unreadable, edits};

/// Scans `quota [from day] [in zone]`.
pub(super) fn scan_calendar(scanner: &mut Scanner<'_>) -> Result<Limit, Unreadable> {
    let quota = scan_quota(scanner)?;
    let mut window = CalendarWindow::new();
    if scanner.keyword("from") {
        window = scan_first_day(scanner, window)?;
    }
    if scanner.keyword("in") {
        window = scan_zone(scanner, window)?;
    }
    Ok(Limit::try_new(window, quota)?)
}

/// Scans the quota. Its period must not have a multiple, because 30 days are not a month.
fn scan_quota(scanner: &mut Scanner<'_>) -> Result<Quota, Unreadable> {
    let start = *scanner;
    let quota = Quota::scan(scanner)?;
    let period = scanner.read_since(&start).trim_start_matches(|c: char| c.is_ascii_digit());
    let multiple: String = period.chars().filter(char::is_ascii_digit).collect();
    if quota.burst_size().is_some() || multiple.is_empty() || multiple == "1" {
        return Ok(quota);
    }
    let why = "a calendar window is one day, week, month or year";
    let error = scanner.unreadable("the multiple of the period", &multiple, why);
    Err(error.meant(scanner.replaced(&start, &quota.to_string())))
}

/// Scans a day of the week, a day of the month, or a month and a day.
fn scan_first_day(scanner: &mut Scanner<'_>, window: CalendarWindow) -> Result<CalendarWindow, Unreadable> {
    const EXPECTED: &str = "a day after \"from\", such as monday, 15 or 04-01";
    let start = *scanner;
    let name = scanner.word();
    if !name.is_empty() {
        let found = Weekday::ALL.into_iter().find(|(_, known)| known.eq_ignore_ascii_case(name));
        let Some((weekday, _)) = found else {
            let error = scanner.unreadable("the first day", name, &format!("expected {EXPECTED}"));
            return Err(error.meant(meant_weekday(name).map(|name| scanner.replaced(&start, name))));
        };
        return Ok(window.first_weekday(weekday));
    }
    let number = |scanner: &mut Scanner<'_>| {
        let number = scanner.number("the first day")?.ok_or_else(|| scanner.expected(EXPECTED))?;
        // No day or month has such a number, so the largest one is an error as well.
        Ok::<_, Unreadable>(u8::try_from(number).unwrap_or(u8::MAX))
    };
    let first = number(scanner)?;
    Ok(match scanner.symbol(&['-']) {
        Some(_) => window.first_date(first, number(scanner)?),
        None => window.first_day(first),
    }?)
}

/// Returns the day that a word probably means: an abbreviation, or a name with at most two mistakes.
fn meant_weekday(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    let names = Weekday::ALL.map(|(_, name)| name);
    let abbreviated = names.into_iter().find(|name| word.len() >= 2 && name.starts_with(&word));
    abbreviated
        .or_else(|| names.into_iter().filter_map(|name| Some((edits(&word, name)?, name))).min().map(|(_, name)| name))
}

/// Scans the name of a time zone.
fn scan_zone(scanner: &mut Scanner<'_>, window: CalendarWindow) -> Result<CalendarWindow, Unreadable> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "/_-+".contains(c);
    let start = *scanner;
    let name = scanner.take_while(is_part);
    if name.is_empty() {
        return Err(scanner.expected("a time zone after \"in\", such as Europe/Berlin"));
    }
    window.find_zone(name).map_err(|unknown| {
        let mut spaced = *scanner;
        spaced.take_while(|c| is_part(c) || c == ' ');
        let found = CalendarWindow::new()
            .find_zone(spaced.read_since(&start))
            .err()
            .filter(|unknown| unknown.nearest.is_some());
        let (end, UnknownZone { why, nearest }) = match found {
            // A space stands for an underscore, as in `America/New York`.
            Some(unknown) => (spaced, unknown),
            None => (*scanner, unknown),
        };
        let error = scanner.unreadable("the time zone", end.read_since(&start), why);
        error.meant(nearest.map(|nearest| end.replaced(&start, &nearest)))
    })
}
