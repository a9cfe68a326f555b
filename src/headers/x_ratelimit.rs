//! Limit, remaining, reset: the three fields of one limit, under either family of names.

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::set;
use super::value_cache::Frequent::{Amount, Time};
use super::value_cache::{frequent, number};
use crate::strategy::Status;
use crate::time::seconds_up;

/// A family of names.
pub(super) struct Names {
    /// The most that can be spent at one instant.
    limit: HeaderName,
    /// What can still be spent.
    remaining: HeaderName,
    /// When more can be spent.
    reset: HeaderName,
}

pub(super) static X: Names = Names {
    limit: HeaderName::from_static("x-ratelimit-limit"),
    remaining: HeaderName::from_static("x-ratelimit-remaining"),
    reset: HeaderName::from_static("x-ratelimit-reset"),
};

pub(super) static DRAFT_6: Names = Names {
    limit: HeaderName::from_static("ratelimit-limit"),
    remaining: HeaderName::from_static("ratelimit-remaining"),
    reset: HeaderName::from_static("ratelimit-reset"),
};

/// What the fields say of a decision. An admitted request carries this to its response: moving a whole decision along
/// costs more than making one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    limit: u32,
    remaining: u32,
    /// In seconds, as the layer was told to say it.
    reset: u64,
    /// In seconds: how long another hit of the same cost is refused for, 0 if it is not.
    wait: u32,
}

impl Numbers {
    #[inline]
    pub(super) fn of(shown: &Status, reset: u64, cost: u32) -> Self {
        Self { limit: shown.capacity(), remaining: shown.remaining(), reset, wait: wait(shown, cost) }
    }

    /// The same for a hit that is given back.
    pub(crate) fn without_wait(self) -> Self {
        Self { wait: 0, ..self }
    }

    pub(super) fn wait(self) -> u32 {
        self.wait
    }

    /// Tells them, whatever the response says already.
    pub(super) fn write(self, names: &'static Names, headers: &mut HeaderMap) {
        set(headers, &names.limit, frequent(Amount, self.limit.into()));
        set(headers, &names.remaining, number(self.remaining.into()));
        set(headers, &names.reset, frequent(Time, self.reset));
    }

    /// Writes them unless the response has all three fields already, and no more units remain by
    /// those. So of equal numbers the inner service's stay.
    pub(super) fn write_if_fewer(self, names: &'static Names, headers: &mut HeaderMap) {
        let number = |name| headers.get(name).and_then(digits);
        let stays = number(&names.remaining).is_some_and(|written| written <= self.remaining.into())
            && number(&names.limit).is_some()
            && number(&names.reset).is_some();
        if !stays {
            self.write(names, headers);
        }
    }
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Returns for how many seconds another hit of this cost is refused at least, 0 if it is not.
#[inline]
pub(super) fn wait(shown: &Status, cost: u32) -> u32 {
    if shown.remaining() >= cost { 0 } else { u32::try_from(seconds_up(shown.reset_after())).unwrap_or(u32::MAX) }
}
