//! From a decision to header fields.

use std::cell::RefCell;
use std::sync::LazyLock;

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Extensions, Response};

use crate::strategy::Status;
use crate::time::seconds_up;
use crate::{Decision, Timestamp};

/// The most that can be spent at one instant.
const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
/// What can still be spent.
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
/// When more can be spent.
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// Which header fields tell a client about its limits.
///
/// All times are in whole seconds, rounded up. Of stacked layers give all the same: the one whose numbers are shown writes
/// them in its own way.
///
/// ```
/// use tower_ratelimit::{Global, Headers, Quota, RateLimitLayer};
///
/// let layer = RateLimitLayer::new(Quota::per_second(10), Global).headers(Headers::none());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headers(Fields);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fields {
    #[default]
    ResetAtEpoch,
    ResetAfter,
    None,
}

impl Headers {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, the last one in seconds since the unix epoch;
    /// on a refusal `Retry-After` too. What a layer writes unless told otherwise.
    pub const fn x_rate_limit() -> Self {
        Self(Fields::ResetAtEpoch)
    }

    /// The same with `X-RateLimit-Reset` in seconds from now.
    #[must_use]
    pub const fn reset_in_seconds(self) -> Self {
        match self.0 {
            Fields::ResetAtEpoch | Fields::ResetAfter => Self(Fields::ResetAfter),
            Fields::None => self,
        }
    }

    /// Whether an admitted request's response is told anything.
    pub(crate) fn tell_admitted(self) -> bool {
        self.0 != Fields::None
    }

    /// Only `Retry-After`, on a refusal.
    pub const fn none() -> Self {
        Self(Fields::None)
    }
}

/// What the fields say of a decision. An admitted request carries this to its response: moving a whole decision along
/// costs more than making one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    limit: u32,
    remaining: u32,
    /// In seconds, as the layer was told to say it.
    reset: u64,
}

impl Headers {
    /// What the fields say of a decision made at `at`, of whose limits this one is shown.
    #[inline]
    pub(crate) fn numbers(self, at: Timestamp, shown: &Status) -> Option<Numbers> {
        let reset = match self.0 {
            Fields::ResetAtEpoch => at.plus(shown.reset_after_micros()).as_secs_ceil(),
            Fields::ResetAfter => shown.reset_after_micros().div_ceil(1_000_000),
            Fields::None => return None,
        };
        Some(Numbers { limit: shown.capacity(), remaining: shown.remaining(), reset })
    }

    pub(crate) fn numbers_of(self, decision: &Decision) -> Option<Numbers> {
        self.numbers(decision.at(), decision.shown())
    }
}

impl Numbers {
    fn write(self, headers: &mut HeaderMap) {
        headers.insert(LIMIT, frequent(self.limit.into()));
        headers.insert(REMAINING, number(self.remaining.into()));
        headers.insert(RESET, frequent(self.reset));
    }
}

/// Tells an admitted request's response how things stand.
///
/// Where layers are stacked it may have an inner layer's numbers already: the smaller remaining is the truth for the client,
/// of equals the inner one's stays, and a refusal, which carries its decision, keeps its own.
pub(crate) fn write_admitted<B>(response: &mut Response<B>, numbers: Numbers) {
    if response.extensions().get::<Decision>().is_some() {
        return;
    }
    let written = response.headers().get(REMAINING).and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    if written.is_none_or(|written| numbers.remaining < written) {
        numbers.write(response.headers_mut());
    }
}

/// Tells a refused request's response how things stand.
pub(crate) fn write_refused<B>(response: &mut Response<B>, decision: &Decision, fields: Headers) {
    if let Some(wait) = decision.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, frequent(seconds_up(wait).max(1)));
    }
    if let Some(numbers) = fields.numbers_of(decision) {
        numbers.write(response.headers_mut());
    }
}

/// Attaches its decision to a refused request's response: what layers outside know it by. `spare` is what the request had
/// attached to it, whose memory will do.
pub(crate) fn attach<B>(response: &mut Response<B>, decision: &Decision, mut spare: Extensions) {
    if response.extensions().is_empty() {
        spare.clear();
        *response.extensions_mut() = spare;
    }
    response.extensions_mut().insert(decision.clone());
}

/// Most limits, and what remains of them, are small: their texts are kept ready, and cloning one allocates nothing.
const SMALL: usize = 1_025;

fn ready_made(number: u64) -> Option<HeaderValue> {
    static READY: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
        (0..SMALL).map(|number| HeaderValue::from_static(Box::leak(number.to_string().into_boxed_str()))).collect()
    });
    usize::try_from(number).ok().and_then(|number| READY.get(number)).cloned()
}

fn number(number: u64) -> HeaderValue {
    ready_made(number).unwrap_or_else(|| written(number))
}

/// Large limits and instants come again and again for a while: each thread keeps the texts of those it met last.
fn frequent(number: u64) -> HeaderValue {
    const KEPT: usize = 64;
    type Recent = [(u64, Option<HeaderValue>); KEPT];
    thread_local! { static RECENT: RefCell<Recent> = const { RefCell::new([const { (0, None) }; KEPT]) } }
    let find = |recent: &RefCell<Recent>| {
        #[allow(clippy::cast_possible_truncation)] // less than KEPT
        let (of, text) = &mut recent.borrow_mut()[(number % KEPT as u64) as usize];
        if *of != number {
            *text = None;
        }
        *of = number;
        text.get_or_insert_with(|| written(number)).clone()
    };
    // A thread that is ending has none any more.
    ready_made(number).unwrap_or_else(|| RECENT.try_with(find).unwrap_or_else(|_| written(number)))
}

/// Not `HeaderValue::from`, which reserves room for the longest number and gives it back: two allocations for one.
fn written(number: u64) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(number)).expect("digits can stand in a header")
}
