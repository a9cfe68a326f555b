//! Limit, remaining, reset: the three fields of one limit, under their two families of names.

use http::header::{HeaderMap, HeaderName};

use super::text::{frequent, number};
use crate::Timestamp;
use crate::strategy::Status;

/// The names of limit (the most that can be spent at one instant), remaining (what can still be spent) and reset (when
/// more can be spent).
type Names = [HeaderName; 3];

const X: Names = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];
const DRAFT_6: Names = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];

/// Which of the families are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Families {
    /// `X-RateLimit-*`, and how its reset is said.
    pub(super) x: Option<Reset>,
    /// `RateLimit-*`, as an early draft of the IETF had them. Their reset is in seconds from now.
    pub(super) draft_6: bool,
}

/// How a reset is said, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reset {
    Epoch,
    FromNow,
}

/// What the fields say of a decision. An admitted request carries this to its response: moving a whole decision along
/// costs more than making one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    limit: u32,
    remaining: u32,
    /// In seconds, as the layer was told to say it.
    reset: u64,
    draft_6: Option<u64>,
    x: bool,
}

impl Families {
    pub(super) fn any(self) -> bool {
        self.x.is_some() || self.draft_6
    }

    /// What they say of a decision made at `at`, of whose limits this one is shown.
    #[inline]
    pub(super) fn numbers(self, at: Timestamp, shown: &Status) -> Option<Numbers> {
        let from_now = || shown.reset_after_micros().div_ceil(1_000_000);
        let reset = match self.x {
            Some(Reset::Epoch) => at.plus(shown.reset_after_micros()).as_secs_ceil(),
            Some(Reset::FromNow) => from_now(),
            None if self.draft_6 => 0,
            None => return None,
        };
        let draft_6 = self.draft_6.then(from_now);
        Some(Numbers { limit: shown.capacity(), remaining: shown.remaining(), reset, draft_6, x: self.x.is_some() })
    }
}

impl Numbers {
    /// Tells them, whatever the response says already.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        self.write_where(headers, |_| true);
    }

    /// Tells them where the response has no fewer units remaining by that name already.
    pub(super) fn write_if_fewer(self, headers: &mut HeaderMap) {
        self.write_where(headers, |written| written.is_none_or(|written| self.remaining < written));
    }

    #[inline]
    fn write_where(self, headers: &mut HeaderMap, tell: impl Fn(Option<u32>) -> bool) {
        let families = [(X, self.x.then_some(self.reset)), (DRAFT_6, self.draft_6)];
        for (names, reset) in families {
            let Some(reset) = reset else { continue };
            let [limit, remaining, when] = names;
            let written = headers.get(&remaining).and_then(|value| value.to_str().ok()?.parse().ok());
            if tell(written) {
                headers.insert(limit, frequent(self.limit.into()));
                headers.insert(remaining, number(self.remaining.into()));
                headers.insert(when, frequent(reset));
            }
        }
    }
}
