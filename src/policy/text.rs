//! The text form of policies.

mod calendar;

use std::fmt;
use std::str::FromStr;

use self::calendar::scan_calendar;
use super::limit::Quoted;
use super::{Limit, Policy, text_of};
use crate::error::ConfigError;
use crate::quota::{Quota, scan_time};
use crate::strategy::{CalendarWindow, LeakyBucket, Lockout, NAMES, Strategy, by_name};
use crate::text::{Scanner, Suggested, Unreadable, edits, parse};

/// The keyword before a shadow limit.
const SHADOW: &str = "shadow";

/// The keyword before the units that a limit keeps.
const KEEP: &str = "keep";

/// The keyword before a limit. It distinguishes the name of the first limit from that of the policy.
const LIMIT: &str = "limit";

/// Other words for a lockout.
const LOCKOUTS: [&str; 5] = ["ban", "block", "jail", "lock", "penalty"];

/// Words for a strategy, which are not the name of a policy.
const STRATEGY_WORDS: [&str; 4] = ["bucket", "window", "counter", "rolling"];

/// The examples in errors, each with the word that selects it.
const EXAMPLES: [(&str, &str); 8] = [
    ("lockout", "lockout 5/10m for 15m x2 up to 1d"),
    ("queue", "leaky-bucket 10/second queue 20"),
    ("keep", "100/minute keep 20"),
    ("burst", "token-bucket 10/second burst 20"),
    ("shadow", "10/second; shadow 5/second"),
    // A form that needs no feature.
    ("calendar", "calendar 1000/day"),
    ("\"", "\"free\": 10/second; \"daily\" 1000/day"),
    (";", "10/second; 1000/day"),
];

/// Parses `["name":] limit; limit; ..`, for example
/// `"free": fixed-window 10/second; "daily" moving-window 10000/day`.
///
/// - The name of the policy is optional. It is in double quotes, with `:` after it.
/// - The limits are separated by `;`, `,` or `|`. Each is
///   `[shadow] [limit] ["name"] [strategy] quota [queue n] [keep n]`.
/// - `shadow` marks a [shadow limit](Policy#shadow-limits). The first limit cannot have it.
/// - The name of a limit is in double quotes. In names, `\"` and `\\` are escapes.
/// - A text cannot begin with the name of a limit, which could be meant as that of the policy.
///   Write `limit` before it, as in `limit "short" 10/second; "daily" 10000/day`.
/// - The strategy is `fixed-window`, `fixed-window-aligned`, `elastic-window`, `moving-window`,
///   `sliding-window-counter`, `sliding-window-counter-aligned`, `token-bucket` or `leaky-bucket`.
///   In these names, `_` counts as `-`. The pages of the strategies list aliases, such as `gcra`.
///   Without a strategy, a quota with a burst uses [`TokenBucket`](crate::TokenBucket), and any other
///   quota uses [`SlidingWindowCounter`](crate::SlidingWindowCounter).
/// - The quota is a text such as `10/second burst 20`, see [`Quota`].
/// - `queue n` sets the length of the queue of a leaky bucket.
/// - `keep n` admits a hit only if n units remain after it, see [`Limit::keep`].
/// - A [`Lockout`](crate::Lockout) is `lockout quota for time [xn up to time] [forget time]`, as in
///   `lockout 5/10m for 15m x2 up to 1d forget 7d`. In `100 refusals/m`, the word `refusals` lets
///   it count the refusals by the other limits. It cannot be the first limit or a shadow limit
///   then.
/// - A [`CalendarWindow`](crate::CalendarWindow) is `calendar quota [from day] [in zone]`, as in
///   `calendar 1000/month from 15 in Europe/Berlin`. The period is `day`, `week`, `month` or
///   `year`. The day is a day of the week, a day of the month, or a month and a day such as
///   `04-01`.
///
/// Except in names, upper and lower case are equivalent.
impl FromStr for Policy {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        parse(text, &EXAMPLES, scan_policy)
    }
}

fn scan_policy(scanner: &mut Scanner<'_>) -> Result<Policy, Unreadable> {
    let start = *scanner;
    check_quotes(start)?;
    let mut policy_name = None;
    let is_marked = scanner.keyword(LIMIT);
    let mut limit_name = scanner.quoted()?;
    let after_name = *scanner;
    if limit_name.is_some() && !is_marked && scanner.symbol(&[':']).is_some() {
        policy_name = limit_name.take();
        limit_name = scan_limit_name(scanner)?;
    }
    let is_ambiguous = limit_name.is_some() && !is_marked && policy_name.is_none();
    if scanner.keyword(SHADOW) {
        let why = "the first limit must be enforced: put an enforced limit first, or use RateLimitLayer::shadow";
        return Err(scanner.unreadable("", SHADOW, why));
    }
    let (mut limits, mut shadow) = (Vec::new(), Vec::new());
    let mut into = &mut limits;
    loop {
        let limit = scan_limit(scanner)?;
        let limit = scan_kept(limit, scanner)?;
        into.push(match limit_name.take() {
            Some(name) => limit.try_named(name)?,
            None => limit,
        });
        if scanner.is_at_end() {
            break;
        }
        let end = *scanner;
        if scanner.symbol(&[';', ',', '|']).is_none() {
            let _ = scanner.keyword("and") || scanner.symbol(&['&', '+']).is_some();
            let meant = format!("{}; {}", end.read_since(&start), scanner.rest());
            return Err(end.expected("\";\" between limits").meant(meant));
        }
        into = if scanner.keyword(SHADOW) { &mut shadow } else { &mut limits };
        limit_name = scan_limit_name(scanner)?;
    }
    if let Some(duplicate) = limits
        .iter()
        .enumerate()
        .find_map(|(i, limit)| limit.name().filter(|name| limits[..i].iter().any(|other| other.name() == Some(name))))
    {
        return Err(scanner.unreadable("the name", duplicate, "another limit has the same name"));
    }
    if limits[..1].iter().chain(&shadow).any(Limit::counts_refusals_of_others) {
        let why = "the first limit and shadow limits cannot count the refusals of others";
        return Err(scanner.unreadable("", "refusals", why));
    }
    if is_ambiguous {
        return Err(ambiguous(start, after_name).into());
    }
    let policy = Policy::of(None, limits, shadow);
    Ok(match policy_name {
        Some(name) => policy.try_with_name(name),
        None => policy.with_distinct_names(),
    }?)
}

/// Scans `[keep n]`.
fn scan_kept(limit: Limit, scanner: &mut Scanner<'_>) -> Result<Limit, Unreadable> {
    let option = *scanner;
    if !scanner.keyword(KEEP) {
        return Ok(limit);
    }
    let units = scanner.option(&option, "the kept units")?;
    Ok(limit.try_keep(units)?)
}

/// Checks that the text does not begin with a name of the policy without quotes.
fn check_quotes(start: Scanner<'_>) -> Result<(), Unreadable> {
    let text = start.rest();
    let name = text.split([':', '"', ';', ',', '|']).next().unwrap_or_default();
    let colon = &text[name.len()..];
    if !colon.starts_with(':') || !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return Ok(());
    }
    let name = name.trim_end();
    let error = start.unreadable("the name", name, "names are in double quotes");
    Err(error.meant(format!("{}{colon}", Quoted(name))))
}

/// Scans `[limit] ["name"]`.
fn scan_limit_name(scanner: &mut Scanner<'_>) -> Result<Option<String>, Unreadable> {
    scanner.keyword(LIMIT);
    scanner.quoted()
}

/// Returns the error for a text that begins with a name without a colon.
fn ambiguous(start: Scanner<'_>, after_name: Scanner<'_>) -> ConfigError {
    let (name, limits, text) = (after_name.read_since(&start), after_name.rest(), start.rest());
    let (of_policy, of_limit) = (format!("{name}: {limits}"), format!("{LIMIT} {text}"));
    let (text, of_policy, of_limit) = (Suggested(text), Suggested(&of_policy), Suggested(&of_limit));
    ConfigError::new(format!(
        "cannot read the name {name} in {text}: it could name the policy or its first limit; \
         write {of_policy} for the policy, or {of_limit} for the limit"
    ))
}

fn scan_limit(scanner: &mut Scanner<'_>) -> Result<Limit, Unreadable> {
    let start = *scanner;
    let strategy = match scanner.word() {
        "" => None,
        name if name.eq_ignore_ascii_case("lockout") => return scan_lockout(start, scanner),
        name if is_calendar(name) => return scan_calendar(scanner),
        name => Some(by_name(name).ok_or_else(|| not_a_strategy(start, *scanner, name))?),
    };
    let quota = Quota::scan(scanner)?;
    let option = *scanner;
    if scanner.keyword("queue") {
        let slots = scanner.option(&option, "the queue")?;
        return match strategy {
            Some(strategy) if strategy.name() == LeakyBucket::new().name() => {
                Ok(Limit::try_new(LeakyBucket::new().queue(slots), quota)?)
            }
            _ => {
                let meant = quota.burst_size().is_none().then(|| format!("leaky-bucket {quota} queue {slots}"));
                let error = scanner.unreadable("", "queue", "only a leaky bucket has a queue");
                Err(error.meant(meant.map(|meant| scanner.replaced(&start, &meant))))
            }
        };
    }
    Ok(strategy.map_or(Ok(quota.into()), |strategy| Limit::of(strategy, quota))?)
}

/// Returns `true` for the name of the calendar window, and for the one in the test vectors.
fn is_calendar(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    name.strip_suffix("-window").unwrap_or(&name) == CalendarWindow::NAME
}

/// Scans the quota and the options of a lockout. `start` is the position before its name.
fn scan_lockout(start: Scanner<'_>, scanner: &mut Scanner<'_>) -> Result<Limit, Unreadable> {
    let (quota, by_refusals) = Quota::scan_counting(scanner, Some("refusals"))?;
    if !scanner.keyword("for") {
        let meant = scanner.replaced(&start, &format!("{} for 15 minutes", scanner.read_since(&start)));
        return Err(scanner.expected("\"for\" and the duration of the lock").meant(meant));
    }
    let first = scan_time(scanner, "the duration of the lock")?;
    let (mut factor, mut longest, mut forget) = (1, None, None);
    if scanner.keyword("x") {
        let found = scanner.number("the factor of the lockout")?;
        factor = found.ok_or_else(|| scanner.expected("a number after \"x\", as in \"x2 up to 1 day\""))?;
        if !scanner.keyword("up") {
            return Err(scanner.expected("\"up to\" and the duration of the longest lock, as in \"x2 up to 1 day\""));
        }
        scanner.keyword("to");
        longest = Some(scan_time(scanner, "the duration of the longest lock")?);
    }
    if scanner.keyword("forget") {
        forget = Some(scan_time(scanner, "the time after which the level is forgotten")?);
    }
    let mut ahead = *scanner;
    if ahead.keyword("up") {
        return Err(scanner.expected("a factor before \"up to\", as in \"x2 up to 1 day\""));
    }
    let lockout = Lockout::from_micros(first, factor, longest, forget, by_refusals)?;
    Ok(Limit::try_new(lockout, quota)?)
}

/// Returns the error for a limit that begins with a `word` that is not a strategy. `start` is the
/// position before the word, and `after` the one after it.
fn not_a_strategy(start: Scanner<'_>, after: Scanner<'_>, word: &str) -> Unreadable {
    let expected = format!("expected {}, an amount and a period, or a name in double quotes", NAMES.join(", "));
    let error = after.unreadable("the strategy", word, &expected);
    error.meant(match meant_strategy(word) {
        Some(name) => Some(after.replaced(&start, name)),
        None => meant_name(start, after),
    })
}

/// Returns the whole text with quotes around a name without quotes. `after` is the position after its
/// first word. A word with a hyphen, or of a strategy, is not a name: quotes would choose the default
/// strategy.
fn meant_name(start: Scanner<'_>, after: Scanner<'_>) -> Option<String> {
    let (mut end, mut ahead) = (start, after);
    loop {
        let word = ahead.read_since(&end).to_ascii_lowercase();
        if word.is_empty() || by_name(&word).is_some() || meant_strategy(&word).is_some() {
            break;
        }
        if word.contains(['-', '_']) || STRATEGY_WORDS.iter().any(|known| word.contains(known)) {
            return None;
        }
        end = ahead;
        ahead.word();
    }
    let name = Quoted(end.read_since(&start)).to_string();
    Some(end.replaced(&start, &if start.is_at_start() { format!("{name}:") } else { name }))
}

/// Returns the strategy that `word` probably means. `word` is a prefix of it with at least three
/// letters, or differs from it by at most two edits. Hyphens and case are ignored.
fn meant_strategy(word: &str) -> Option<&'static str> {
    let letters = |word: &str| word.replace(['-', '_'], "").to_ascii_lowercase();
    let word = letters(word);
    if LOCKOUTS.contains(&&*word) {
        return Some("lockout");
    }
    let distance = |name: &str| {
        let name = letters(name);
        if word.len() >= 3 && name.starts_with(&word) { Some(1) } else { edits(&word, &name) }
    };
    NAMES
        .into_iter()
        .filter_map(|name| Some((distance(name)?, name)))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, name)| name)
}

/// Writes a text that parses to an equal policy.
///
/// There are these exceptions:
///
/// - a policy with a custom strategy,
/// - a policy with a period that has [no text](Quota#text-form): one that is not a whole number of
///   milliseconds, or more than 2^32 - 1 of the largest unit of time that divides it,
/// - a policy with a [lockout](Lockout), one of whose times has no text for these reasons,
/// - an unnamed policy that was [divided](Policy::divide).
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.name() {
            write!(f, "{}: ", Quoted(name))?;
        }
        if self.name().is_none() && self.limits()[0].name().is_some() {
            write!(f, "{LIMIT} ")?;
        }
        f.write_str(&text_of(self.limits()))?;
        let mut shadow = self.shadows().iter().flat_map(Self::limits);
        shadow.try_for_each(|limit| write!(f, "; {SHADOW} {limit}"))
    }
}
