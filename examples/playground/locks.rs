//! The locks of a lockout, which only its text contains.

use std::time::Duration;

use tower_ratelimit::{Limit, Quota};

pub(crate) struct Locks {
    /// The duration of the first lock, which is the shortest.
    pub(crate) first: Duration,
    /// The factor and the duration of the longest lock.
    pub(crate) escalation: Option<(u32, Duration)>,
    pub(crate) forget: Option<Duration>,
    pub(crate) by_refusals: bool,
}

/// Returns the locks of a limit, or `None` if it is not a lockout.
pub(crate) fn of(limit: &Limit) -> Option<Locks> {
    let text = limit.to_string();
    // A name can stand before the strategy.
    let (strikes, locks) = text.rsplit_once("lockout ")?.1.split_once(" for ")?;
    let (locks, forget) = locks.split_once(" forget ").map_or((locks, None), |(locks, time)| (locks, Some(time)));
    let (first, escalation) = locks.split_once(" x").map_or((locks, None), |(first, more)| (first, Some(more)));
    let escalation = escalation.and_then(|text| text.split_once(" up to "));
    Some(Locks {
        first: duration(first)?,
        escalation: escalation.and_then(|(factor, longest)| Some((factor.parse().ok()?, duration(longest)?))),
        forget: forget.and_then(duration),
        by_refusals: strikes.contains(" refusals/"),
    })
}

fn duration(text: &str) -> Option<Duration> {
    format!("1/{text}").parse::<Quota>().ok().map(|quota| quota.period())
}
