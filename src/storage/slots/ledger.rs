//! The slots of a key that several processes share: a pure function, without a clock or I/O.
//!
//! Each message contains the number of all slots that a process holds. So a repeated message changes
//! nothing, and the next message corrects one whose reply was lost. Messages have sequence numbers, so
//! one that arrives late is dropped. A process that has given back all slots stays in the ledger until
//! its time to live has passed, because a late message would otherwise count again.

use std::fmt::Write;
use std::time::Duration;

use crate::time::{Timestamp, micros};

/// The beginning of the text of a ledger: the version of the format.
const VERSION: &str = "slots1";

/// The longest time to live. Holdings that last longer were written by a clock that was ahead.
pub(crate) const LONGEST_TIME_TO_LIVE: Duration = Duration::from_secs(3_600);

/// The processes that hold slots of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ledger(Vec<Holding>);

/// The slots of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holding {
    process: u64,
    count: u32,
    sequence: u64,
    alive_until: Timestamp,
}

/// A message of a process about its slots of a key.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// A random number that identifies the process.
    pub(crate) process: u64,
    /// Greater than that of all earlier claims of the process.
    pub(crate) sequence: u64,
    /// The slots that requests of the process use already.
    pub(crate) least: u32,
    /// The slots that the next request of the process needs. Fewer than these are not granted.
    pub(crate) first: u32,
    /// The slots that all waiting requests of the process need.
    pub(crate) most: u32,
    /// The slots of the key.
    pub(crate) slots: u32,
    /// The time after which the slots are free, unless another claim renews it.
    pub(crate) time_to_live: Duration,
}

/// The result of a [`Claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The slots that count for the process now.
    pub(crate) count: u32,
    /// Those of them that the process can give to other requests: fewer than `count` while all processes
    /// together use more slots than there are.
    pub(crate) usable: u32,
    /// The slots that no process holds.
    pub(crate) free: u32,
}

impl Ledger {
    /// Replaces the holding of the process by as many slots as are free: at least `first` and at most
    /// `most`, or else `least`. A claim that is not newer than the last one of its process changes nothing.
    ///
    /// A process never keeps slots that its next request cannot use. Otherwise two processes could each
    /// keep a half of what their next requests need.
    ///
    /// The result can exceed the slots of the key if the number of slots was lowered, or if the process
    /// did not renew its slots in time and others have taken them.
    pub(crate) fn claim(&mut self, now: Timestamp, claim: &Claim) -> Granted {
        let latest = now.plus(micros(LONGEST_TIME_TO_LIVE));
        self.0.retain_mut(|holding| {
            holding.alive_until = holding.alive_until.min(latest);
            holding.alive_until > now
        });
        let others = self.0.iter().filter(|holding| holding.process != claim.process);
        let others = others.fold(0_u32, |sum, holding| sum.saturating_add(holding.count));
        let left = claim.slots.saturating_sub(others);
        let count = match self.0.iter().find(|holding| holding.process == claim.process) {
            Some(own) if own.sequence >= claim.sequence => own.count,
            _ => {
                let count = if left < claim.first { claim.least } else { claim.most.min(left) };
                let alive_until = now.plus(micros(claim.time_to_live));
                self.0.retain(|holding| holding.process != claim.process);
                self.0.push(Holding { process: claim.process, count, sequence: claim.sequence, alive_until });
                count
            }
        };
        Granted { count, usable: count.min(left), free: left.saturating_sub(count) }
    }

    /// Returns the time after which all slots are free.
    pub(crate) fn keep(&self, now: Timestamp) -> Duration {
        let latest = self.0.iter().map(|holding| holding.alive_until).max();
        Duration::from_micros(latest.map_or(0, |latest| latest.since(now)))
    }

    /// Parses the text of a ledger. An empty text is an empty ledger. Returns `None` for a text of
    /// another format.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::default());
        }
        let mut words = text.split(' ');
        let is_known = words.next() == Some(VERSION);
        is_known.then(|| words.map(Holding::parse).collect::<Option<_>>()).flatten().map(Self)
    }

    /// Returns the text, which [`parse`](Self::parse) reads.
    pub(crate) fn to_text(&self) -> String {
        let mut text = VERSION.to_owned();
        for Holding { process, count, sequence, alive_until } in &self.0 {
            write!(text, " {process:x},{count},{sequence},{}", alive_until.as_micros())
                .expect("writing to a string does not fail");
        }
        text
    }
}

impl Holding {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(',');
        let process = u64::from_str_radix(parts.next()?, 16).ok()?;
        let (count, sequence) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let alive_until = Timestamp::from_micros(parts.next()?.parse().ok()?);
        parts.next().is_none().then_some(Self { process, count, sequence, alive_until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME_TO_LIVE: Duration = Duration::from_secs(30);

    fn claim(process: u64, sequence: u64, least: u32, most: u32) -> Claim {
        Claim { process, sequence, least, first: least.min(most), most, slots: 10, time_to_live: TIME_TO_LIVE }
    }

    #[test]
    fn text_of_a_ledger_parses_to_the_same_ledger() {
        let mut ledger = Ledger::default();
        for process in [0, 1, u64::MAX] {
            ledger.claim(Timestamp::from_micros(7), &claim(process, u64::MAX, 1, 3));
            assert_eq!(Ledger::parse(&ledger.to_text()), Some(ledger.clone()));
        }
        assert_eq!(Ledger::parse(""), Some(Ledger::default()));
        for other in [
            "slots2 1,1,1,1",
            "slots10 1,1,1,1",
            "slots1x",
            "v1 5",
            "slots1 1,1,1",
            "slots1 1,1,1,1,1",
            "slots1 x,1,1,1",
            "slots1  ",
        ] {
            assert_eq!(Ledger::parse(other), None, "{other}");
        }
    }

    #[test]
    fn late_and_repeated_claims_change_nothing() {
        let (mut ledger, now) = (Ledger::default(), Timestamp::from_micros(1));
        assert_eq!(ledger.claim(now, &claim(1, 5, 0, 4)), Granted { count: 4, usable: 4, free: 6 });
        assert_eq!(ledger.claim(now, &claim(1, 6, 0, 0)), Granted { count: 0, usable: 0, free: 10 });
        let before = ledger.clone();
        for late in [claim(1, 5, 0, 4), claim(1, 6, 3, 3)] {
            assert_eq!(ledger.claim(now, &late), Granted { count: 0, usable: 0, free: 10 });
            assert_eq!(ledger, before);
        }
    }

    #[test]
    fn slots_of_a_process_that_is_silent_are_free_after_its_time_to_live() {
        let (mut ledger, now) = (Ledger::default(), Timestamp::from_micros(1));
        ledger.claim(now, &claim(1, 1, 0, 8));
        let almost = now.plus(micros(TIME_TO_LIVE) - 1);
        assert_eq!(ledger.claim(almost, &claim(2, 1, 0, 5)), Granted { count: 2, usable: 2, free: 0 });
        let all = Granted { count: 10, usable: 10, free: 0 };
        assert_eq!(ledger.claim(almost.plus(1), &claim(2, 2, 2, 10)), all);
        // The first process was paused. Its requests still run, so they count.
        assert_eq!(ledger.claim(almost.plus(2), &claim(1, 2, 8, 9)), Granted { count: 8, usable: 0, free: 0 });
        assert_eq!(ledger.claim(almost.plus(3), &claim(2, 3, 10, 11)), Granted { count: 10, usable: 2, free: 0 });
    }

    #[test]
    fn holding_of_a_clock_that_is_far_ahead_ends() {
        let (mut ledger, now) = (Ledger::default(), Timestamp::from_micros(1));
        ledger.claim(now.plus(u64::MAX / 2), &claim(1, 1, 0, 10));
        assert_eq!(ledger.claim(now, &claim(2, 1, 0, 1)).count, 0);
        assert!(ledger.keep(now) <= LONGEST_TIME_TO_LIVE);
        assert_eq!(ledger.claim(now.plus(micros(LONGEST_TIME_TO_LIVE)), &claim(2, 2, 0, 1)).count, 1);
    }
}
