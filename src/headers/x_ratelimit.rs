//! The fields for the capacity, the remaining units and the reset: `X-RateLimit-*`, and
//! `RateLimit-*` of draft 6.
//!
//! The fields of draft 6 stay, because they are the only IETF fields that the npm package
//! `ratelimit-header-parser` reads correctly.

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::value::{number, repeated, set};
use crate::strategy::Status;
use crate::time::seconds_up;

/// The names of the three fields of a family.
pub(super) struct Names {
    /// Reports the capacity.
    limit: HeaderName,
    /// Reports the remaining units.
    remaining: HeaderName,
    /// Reports the time at which more units remain.
    reset: HeaderName,
}

pub(super) const X: Names = Names {
    limit: HeaderName::from_static("x-ratelimit-limit"),
    remaining: HeaderName::from_static("x-ratelimit-remaining"),
    reset: HeaderName::from_static("x-ratelimit-reset"),
};

pub(super) const DRAFT_6: Names = Names {
    limit: HeaderName::from_static("ratelimit-limit"),
    remaining: HeaderName::from_static("ratelimit-remaining"),
    reset: HeaderName::from_static("ratelimit-reset"),
};

/// The values of the three fields for a decision. An admitted request carries them to its response
/// instead of the whole decision, which is larger.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    limit: u32,
    remaining: u32,
    /// In seconds, from now or since the Unix epoch.
    reset: u64,
    /// The seconds until more units remain, rounded up, or 0 if another hit of the same cost would
    /// be admitted now.
    wait: u32,
}

impl Numbers {
    #[inline]
    pub(super) fn of(shown: &Status, reset: u64, cost: u32) -> Self {
        Self { limit: shown.capacity(), remaining: shown.remaining(), reset, wait: wait(shown, cost) }
    }

    /// Removes the wait, for a hit that is refunded.
    pub(crate) fn without_wait(self) -> Self {
        Self { wait: 0, ..self }
    }

    pub(super) fn wait(self) -> u32 {
        self.wait
    }

    /// Writes the fields and replaces existing ones.
    #[inline]
    pub(super) fn write(self, names: Names, headers: &mut HeaderMap) {
        set(headers, names.limit, repeated(self.limit.into()));
        set(headers, names.remaining, number(self.remaining.into()));
        set(headers, names.reset, repeated(self.reset));
    }

    /// Writes the fields, unless the response already has all three and reports at most as many
    /// remaining units. On a tie, the fields of the inner layer stay.
    pub(super) fn write_if_fewer(self, names: Names, headers: &mut HeaderMap) {
        let written = |name| headers.get(name).and_then(digits);
        let stays = written(&names.remaining).is_some_and(|remaining| remaining <= self.remaining.into())
            && written(&names.limit).is_some()
            && written(&names.reset).is_some();
        if !stays {
            self.write(names, headers);
        }
    }
}

fn digits(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Returns 0 if another hit of this cost would be admitted now. Otherwise returns the seconds until
/// more units remain, rounded up. A hit of several units may have to wait longer.
#[inline]
pub(super) fn wait(shown: &Status, cost: u32) -> u32 {
    if shown.remaining() >= cost { 0 } else { u32::try_from(seconds_up(shown.reset_after())).unwrap_or(u32::MAX) }
}
