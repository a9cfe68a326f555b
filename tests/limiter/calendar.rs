//! The strategy calendar window.

use std::time::Duration;

use common::{decide, hit, memory_with_manual_clock, now, policy};
use tower_ratelimit::strategy::Weekday;
use tower_ratelimit::{CalendarWindow, Key, MemoryStorage, Op, Policy, Quota, RateLimiter, Timestamp};

const HOUR: u64 = 3_600;
const DAY: u64 = 24 * HOUR;

/// 2024-10-04T00:00:00Z, a Friday.
const FRIDAY: u64 = 1_728_000_000;

/// Midnight of UTC at the start of these months.
const NOVEMBER: u64 = FRIDAY + 28 * DAY;
const DECEMBER: u64 = NOVEMBER + 30 * DAY;

fn seconds(seconds: u64) -> Timestamp {
    Timestamp::from_micros(seconds * 1_000_000)
}

/// Returns the window that contains this second of Unix time, in seconds.
fn window(text: &str, at: u64) -> (u64, u64) {
    let policy = policy(text);
    let limit = &policy.limits()[0];
    let window = limit.strategy().window(limit.quota(), seconds(at)).unwrap();
    (window.start.as_micros() / 1_000_000, window.end.as_micros() / 1_000_000)
}

#[test]
fn text_and_builder_describe_the_same_window() {
    let new = CalendarWindow::new;
    let zone = |window: CalendarWindow, name| window.in_zone(name).unwrap();
    for (text, window, quota) in [
        ("calendar 50/day", new(), Quota::per_day(50)),
        ("calendar 50/day in America/New_York", zone(new(), "america/new_york"), Quota::per_day(50)),
        ("calendar 5/week", new().first_weekday(Weekday::Monday), Quota::per_week(5)),
        ("calendar 5/week from sunday", new().first_weekday(Weekday::Sunday), Quota::per_week(5)),
        ("calendar 1000/month", new().first_day(1).unwrap(), Quota::per_month(1_000)),
        (
            "calendar 1000/month from 15 in Europe/Berlin",
            zone(new().first_day(15).unwrap(), "Europe/Berlin"),
            Quota::per_month(1_000),
        ),
        ("calendar 9/year", zone(new(), "UTC").first_date(1, 1).unwrap(), Quota::per_year(9)),
        ("calendar 9/year from 04-01", new().first_date(4, 1).unwrap(), Quota::per_year(9)),
        (
            "calendar 9/year from 02-29 in Etc/GMT-1",
            zone(new().first_date(2, 29).unwrap(), "Etc/GMT-1"),
            Quota::per_year(9),
        ),
    ] {
        assert_eq!(Policy::new(window, quota), policy(text), "{text}");
        assert_eq!(policy(text).to_string(), text);
    }
    for (other, text) in [
        ("CALENDAR 5 per Week FROM Sunday IN utc", "calendar 5/week from sunday"),
        ("calendar_window 5/1 month from 1", "calendar 5/month"),
        ("10/second; \"monthly\" calendar 5/month from 3; shadow calendar 9/d", ""),
    ] {
        let parsed = policy(other);
        assert_eq!(policy(&parsed.to_string()), parsed);
        assert!(text.is_empty() || parsed.to_string() == text, "{parsed}");
    }
}

#[test]
fn errors_say_what_to_write() {
    for (text, expected) in [
        ("calender 5/day", "did you mean \"calendar 5/day\"?"),
        ("calendar 10/hour", "not a day, a week, a month or a year: use one of them, or write \"fixed-window-aligned"),
        ("calendar 1000/30 days", "did you mean \"calendar 1000/month\"?"),
        ("calendar 10/2 weeks", "\"2\""),
        ("calendar 5/week from sun", "did you mean \"calendar 5/week from sunday\"?"),
        ("calendar 5/week from wendesday in UTC", "did you mean \"calendar 5/week from wednesday in UTC\"?"),
        ("calendar 5/week from 15", "a week cannot begin on 15: use a day of the week, for example \"from sunday\""),
        ("calendar 5/year from 1", "a year cannot begin on 1: use a month and a day"),
        ("calendar 5/day from friday", "a day cannot begin on friday: remove \"from\""),
        (
            "calendar 5/month from 04-01",
            "a month cannot begin on 04-01: use a day of the month, for example \"from 15\"",
        ),
        ("calendar 5/year from 15", "a year cannot begin on 15: use a month and a day, for example \"from 04-01\""),
        ("calendar 5/month from 32", "a month has no day 32: use a number from 1 to 31"),
        ("calendar 5/month from 4294967295", "a month has no day 255"),
        ("calendar 5/month from 0", "\"0\""),
        ("calendar 5/year from 02-30", "no year has the day 02-30"),
        ("calendar 5/year from 13-01", "no year has the day 13-01"),
        ("calendar 5/month from", "expected a day after \"from\", such as monday, 15 or 04-01"),
        ("calendar 5/day in", "expected a time zone after \"in\", such as Europe/Berlin"),
        ("calendar 5/day in Europe/Berln", "did you mean \"calendar 5/day in Europe/Berlin\"?"),
        ("calendar 5/month from 3 in berlin; 5/s", "did you mean \"calendar 5/month from 3 in Europe/Berlin; 5/s\"?"),
        ("calendar 5/day in America/New York", "did you mean \"calendar 5/day in America/New_York\"?"),
        ("calendar 5/day in new york; 5/s", "did you mean \"calendar 5/day in America/New_York; 5/s\"?"),
        ("calendar 5/day in Europe/Berln burst 9", "cannot read the time zone \"Europe/Berln\" in"),
        ("calendar 5/day in Middle/Earth", "the time zone database has no such zone"),
        ("calendar 5/day burst 9", "remove \"burst 9\""),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let error = CalendarWindow::new().in_zone("Europe/Berln").unwrap_err();
    let expected = "unknown time zone \"Europe/Berln\": the time zone database has no such zone; \
                    did you mean \"Europe/Berlin\"?";
    assert_eq!(error.to_string(), expected);
    for error in [
        CalendarWindow::new().first_day(0).unwrap_err(),
        CalendarWindow::new().first_date(4, 31).unwrap_err(),
        CalendarWindow::new().first_date(0, 1).unwrap_err(),
    ] {
        assert!(error.to_string().contains("for example"), "{error}");
    }
}

#[test]
fn short_months_begin_on_their_last_day() {
    let starts = |text: &str, first: u64, count: usize| -> Vec<u64> {
        let next = |start: &u64| Some(window(text, *start).1);
        std::iter::successors(Some(first), next).take(count).collect()
    };
    // From 31 January 2025.
    let january = DECEMBER + 61 * DAY;
    let lengths: Vec<u64> =
        starts("calendar 1/month from 31", january, 5).windows(2).map(|two| (two[1] - two[0]) / DAY).collect();
    assert_eq!(lengths, [28, 31, 30, 31], "to 28 February, 31 March, 30 April, 31 May");
    // From 29 February 2024.
    let leap_day = 1_709_164_800;
    let lengths: Vec<u64> =
        starts("calendar 1/year from 02-29", leap_day, 6).windows(2).map(|two| (two[1] - two[0]) / DAY).collect();
    assert_eq!(lengths, [365, 365, 365, 366, 365], "to 28 February three times, then 29 February");
}

#[test]
fn windows_begin_where_the_clock_shows_midnight_first_or_has_skipped_it() {
    // In Havana, the clock went from 01:00 back to 00:00 on 2012-11-04, and from 00:00 to 01:00 on
    // 2012-04-01.
    let november = 1_352_001_600;
    assert_eq!(window("calendar 1/day in America/Havana", november), (november, november + 25 * HOUR));
    let april = 1_333_256_400;
    assert_eq!(window("calendar 1/day in America/Havana", april), (april, april + 23 * HOUR));
    assert_eq!(window("calendar 1/day in America/Havana", april - 1).1, april);
    // Samoa skipped 30 December 2011.
    let skipped = 1_325_239_200;
    assert_eq!(window("calendar 1/day in Pacific/Apia", skipped - 1), (skipped - DAY, skipped));
    assert_eq!(window("calendar 1/day in Pacific/Apia", skipped), (skipped, skipped + DAY));
    // In Nuuk, the clock skipped the last hour of 2025-03-29.
    let march = 1_743_213_600;
    assert_eq!(window("calendar 1/day in America/Nuuk", march), (march, march + 23 * HOUR));
}

#[tokio::test]
async fn waits_are_exact_when_the_clock_changes() {
    let policy = policy("calendar 1/day in Europe/Berlin");
    // 2024-10-27 has 25 hours, 2025-03-30 has 23.
    for (midnight, hours) in [(FRIDAY + 22 * DAY + 22 * HOUR, 25), (FRIDAY + 176 * DAY + 23 * HOUR, 23)] {
        let (storage, clock) = memory_with_manual_clock();
        clock.set(seconds(midnight));
        assert!(hit(&storage, &policy, "k", 1).await.is_admitted());
        let wait = Duration::from_secs(hours * HOUR);
        assert_eq!(hit(&storage, &policy, "k", 1).await.retry_after(), Some(wait));
        clock.advance(wait.saturating_sub(Duration::from_micros(1)));
        assert_eq!(hit(&storage, &policy, "k", 1).await.retry_after(), Some(Duration::from_micros(1)));
        clock.advance(Duration::from_micros(1));
        assert!(hit(&storage, &policy, "k", 1).await.is_admitted());
    }
}

/// Hits of one key under policies of one name.
struct Account(MemoryStorage);

impl Account {
    fn limiter(&self, text: &str) -> RateLimiter {
        RateLimiter::with_storage(policy(text).with_name("plan"), self.0.clone())
    }

    /// Hits, and returns the remaining units and the end of the window in seconds.
    fn hit(&self, text: &str) -> (u32, u64) {
        let decision = now(self.limiter(text).hit(&Key::from("k")));
        let end = decision.at().plus(u64::try_from(decision.reset_after().as_micros()).unwrap());
        (decision.remaining(), end.as_micros() / 1_000_000)
    }
}

#[test]
fn counts_stay_when_the_amount_changes() {
    let (storage, _clock) = memory_with_manual_clock();
    let account = Account(storage);
    assert_eq!(account.hit("calendar 10/month"), (9, NOVEMBER));
    assert_eq!(account.hit("calendar 20/month"), (18, NOVEMBER));
    assert_eq!(account.hit("calendar 20/month from 15 in Asia/Tokyo"), (17, NOVEMBER));
    assert_eq!(account.hit("calendar 20/week"), (19, FRIDAY + 3 * DAY), "another period is another limit");
}

#[test]
fn window_that_has_begun_keeps_its_end_when_the_calendar_changes() {
    let (tokyo, new_york) = ("calendar 10/month in Asia/Tokyo", "calendar 10/month in America/New_York");
    for (before, after, end, next) in [
        // 09:00 and -04:00.
        (tokyo, new_york, NOVEMBER - 9 * HOUR, NOVEMBER + 4 * HOUR),
        // -04:00 and 09:00. The new window has begun already in Tokyo.
        (new_york, tokyo, NOVEMBER + 4 * HOUR, DECEMBER - 9 * HOUR),
        ("calendar 10/month", "calendar 10/month from 15", NOVEMBER, FRIDAY + 42 * DAY),
    ] {
        let (storage, clock) = memory_with_manual_clock();
        let account = Account(storage);
        assert_eq!(account.hit(before), (9, end));
        assert_eq!(account.hit(after), (8, end), "{after}");
        clock.set(seconds(end - 1));
        assert_eq!(account.hit(after), (7, end), "{after}");
        clock.set(seconds(end));
        assert_eq!(account.hit(after), (9, next), "{after}");
    }
}

/// A stored end that no window can have is from before the clock went back.
#[test]
fn clock_that_goes_back_shortens_the_wait_to_the_current_window() {
    let (storage, clock) = memory_with_manual_clock();
    let account = Account(storage);
    assert_eq!(account.hit("calendar 1/month"), (0, NOVEMBER));
    let march = FRIDAY - 217 * DAY;
    clock.set(seconds(march));
    let april = march + 31 * DAY;
    assert_eq!(window("calendar 1/month", march), (march, april));
    assert_eq!(account.hit("calendar 1/month"), (0, april));
    clock.set(seconds(april - 1));
    assert_eq!(account.hit("calendar 1/month"), (0, april));
    clock.set(seconds(april));
    assert_eq!(account.hit("calendar 1/month").1, april + 30 * DAY);
}

#[tokio::test]
async fn instants_outside_of_the_calendar_have_windows_of_the_nominal_duration() {
    for text in ["calendar 2/month", "calendar 2/year from 04-01 in Europe/Berlin"] {
        let policy = policy(text);
        let limit = &policy.limits()[0];
        for at in [u64::MAX, u64::MAX / 2, 300_000_000_000_000_000, 0] {
            let at = Timestamp::from_micros(at);
            let window = limit.strategy().window(limit.quota(), at).unwrap();
            assert!(window.start <= at && window.end > window.start, "{text}: {window:?}");
        }
    }
}

#[test]
fn policy_without_windows_of_different_lengths_returns_none() {
    let policy = policy("fixed-window-aligned 1/day");
    let limit = &policy.limits()[0];
    assert_eq!(limit.strategy().window(limit.quota(), seconds(FRIDAY)), None);
}

#[tokio::test]
async fn divided_windows_have_the_same_calendar() {
    let policy = policy("calendar 9/month from 15 in Europe/Berlin");
    let part = policy.divide(4.try_into().unwrap()).unwrap();
    assert_eq!(part.to_string(), "calendar 2/month from 15 in Europe/Berlin");
    let (storage, _clock) = memory_with_manual_clock();
    let [whole, part] =
        [decide(&storage, &policy, "a", Op::Hit, 1).await, decide(&storage, &part, "b", Op::Hit, 1).await];
    assert_eq!(whole.reset_after(), part.reset_after());
}
