//! The text form of policies.

use std::fmt;
use std::str::FromStr;

use super::limit::Quoted;
use super::{Limit, Policy, text_of};
use crate::error::ConfigError;
use crate::quota::Quota;
use crate::strategy::{LeakyBucket, NAMES, Strategy, by_name};
use crate::text::Scanner;

/// The keyword before a shadow limit.
const SHADOW: &str = "shadow";

/// Parses `["name":] limit; limit; ..`, for example
/// `"free": fixed-window 10/second; "daily" moving-window 10000/day`.
///
/// - The name of the policy is optional. It is in double quotes, with `:` after it.
/// - The limits are separated by `;`, `,` or `|`. Each is
///   `[shadow] ["name"] [strategy] quota [queue n]`.
/// - `shadow` marks a [shadow limit](Policy#shadow-limits). The first limit cannot have it.
/// - The name of a limit is in double quotes. In names, `\"` and `\\` are escapes.
/// - The strategy is a name such as `token-bucket`. Without it, a quota with a burst uses
///   [`TokenBucket`](crate::TokenBucket), and any other quota uses
///   [`SlidingWindowCounter`](crate::SlidingWindowCounter).
/// - The quota is a text such as `10/second burst 20`, see [`Quota`].
/// - `queue n` sets the length of the queue of a leaky bucket.
///
/// Except in names, upper and lower case are equivalent.
impl FromStr for Policy {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut scanner = Scanner::new(text);
        let mut policy_name = None;
        let mut limit_name = scanner.quoted()?;
        if limit_name.is_some() && scanner.symbol(&[':']).is_some() {
            policy_name = limit_name.take();
            limit_name = scanner.quoted()?;
        }
        if scanner.keyword(SHADOW) {
            let why = "the first limit must be enforced: put an enforced limit first, or use RateLimitLayer::shadow";
            return Err(scanner.unreadable("", SHADOW, why));
        }
        let (mut limits, mut shadow) = (Vec::new(), Vec::new());
        let mut into = &mut limits;
        loop {
            let limit = scan_limit(&mut scanner)?;
            into.push(match limit_name.take() {
                Some(name) => limit.try_named(name)?,
                None => limit,
            });
            if scanner.is_at_end() {
                break;
            }
            if scanner.symbol(&[';', ',', '|']).is_none() {
                return Err(scanner.expected("\";\" between limits"));
            }
            into = if scanner.keyword(SHADOW) { &mut shadow } else { &mut limits };
            limit_name = scanner.quoted()?;
        }
        if let Some(duplicate) = limits.iter().enumerate().find_map(|(i, limit)| {
            limit.name().filter(|name| limits[..i].iter().any(|other| other.name() == Some(name)))
        }) {
            return Err(scanner.unreadable("the name", duplicate, "another limit has the same name"));
        }
        let policy = Self::of(None, limits, shadow);
        match policy_name {
            Some(name) => policy.try_with_name(name),
            None => policy.with_distinct_names(),
        }
    }
}

fn scan_limit(scanner: &mut Scanner<'_>) -> Result<Limit, ConfigError> {
    let strategy_name = scanner.word();
    let strategy = match strategy_name {
        "" => None,
        name => Some(by_name(name).ok_or_else(|| {
            scanner.unknown("the strategy", name, &NAMES, &format!("{}, or an amount and a period", NAMES.join(", ")))
        })?),
    };
    let quota = Quota::scan(scanner)?;
    if scanner.keyword("queue") {
        let slots = scanner.number_or_zero("the queue")?;
        let slots = slots.ok_or_else(|| scanner.expected("a number after \"queue\""))?;
        return match strategy {
            Some(strategy) if strategy.name() == LeakyBucket::new().name() => {
                Limit::try_new(LeakyBucket::new().queue(slots), quota)
            }
            _ => Err(scanner.unreadable("", "queue", "only a leaky bucket has a queue, write \"leaky-bucket\" first")),
        };
    }
    strategy.map_or(Ok(quota.into()), |strategy| Limit::of(strategy, quota))
}

/// Writes a text that parses to an equal policy.
///
/// Exceptions are policies with custom strategies, with a period that has [no text](Quota), and
/// unnamed policies that were [divided](Policy::divide).
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.name() {
            write!(f, "{}: ", Quoted(name))?;
        }
        f.write_str(&text_of(self.limits()))?;
        let mut shadow = self.shadows().iter().flat_map(Self::limits);
        shadow.try_for_each(|limit| write!(f, "; {SHADOW} {limit}"))
    }
}
