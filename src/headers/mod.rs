//! From a decision to header fields.

mod lists;
mod partition;
mod text;
mod triple;

use std::fmt;

use http::header::{CACHE_CONTROL, HeaderMap, HeaderValue, IntoHeaderName, RETRY_AFTER};
use http::{Extensions, Response};

use self::lists::Lists;
use self::partition::Secret;
use self::text::{Frequent, frequent};
pub(crate) use self::triple::Numbers;
use self::triple::{DRAFT_6, Names, X};
use crate::strategy::Status;
use crate::time::seconds_up;
use crate::{Decision, Key, Policy, Timestamp};

/// Which header fields tell a client about its limits.
///
/// All times are in whole seconds, rounded up. Families of fields can be [combined](Self::and). Of stacked layers give all
/// the same: the one whose numbers are shown writes them in its own way.
///
/// | family | an admitted request's response |
/// |---|---|
/// | [`x_rate_limit`](Self::x_rate_limit) | `X-RateLimit-Limit: 10`, `X-RateLimit-Remaining: 3`, `X-RateLimit-Reset: 1728000060` |
/// | [`ietf`](Self::ietf) | `RateLimit-Policy: "free";q=10;w=1`, `RateLimit: "free";r=3;t=1`: a member for each limit |
/// | [`draft6`](Self::draft6) | `RateLimit-Limit: 10`, `RateLimit-Remaining: 3`, `RateLimit-Reset: 1` |
/// | [`none`](Self::none) | nothing |
///
/// A refusal always has `Retry-After`, unless no waiting would help, and `Cache-Control: no-store`.
///
/// ```
/// use tower_ratelimit::{Global, Headers, Quota, RateLimitLayer};
///
/// let layer = RateLimitLayer::new(Quota::per_second(10), Global)
///     .headers(Headers::x_rate_limit().reset_in_seconds().and(Headers::ietf()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // a set of families
pub struct Headers {
    x: bool,
    from_now: bool,
    draft_6: bool,
    ietf: bool,
    partition: Option<Secret>,
}

impl Headers {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, the last one in seconds since the unix epoch, of
    /// the one limit that a decision [shows](Decision::shown). What a layer writes unless told otherwise.
    pub const fn x_rate_limit() -> Self {
        Self { x: true, ..Self::none() }
    }

    /// The fields of the IETF's draft, as Structured Fields (RFC 9651) with a member for each limit: `RateLimit-Policy` has
    /// its capacity `q` and the seconds `w` in which all of that comes back, `RateLimit` what remains, `r`, and the
    /// seconds `t` until more does. Members are called as [`Policy::limit_name`] says, so give the policy a name that
    /// clients may see: without one it is called by its text. Names had better differ, also since stacked layers whose policies are called the same make members that are called the same.
    ///
    /// Of a bucket's share, by which a [fallback](Decision::is_from_fallback) decides, `w` is left out.
    ///
    /// Times are whole seconds, so a period below one reads as one. A sliding window counter gives its next unit back a
    /// microsecond after the period, so its `t` can be one above its `w`.
    ///
    /// What an inner service has written into these fields by itself goes before, if it is such a list; else it is left out.
    ///
    /// Source: draft-ietf-httpapi-ratelimit-headers-11, sections 3 and 4.
    pub const fn ietf() -> Self {
        Self { ietf: true, ..Self::none() }
    }

    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`, the last one in seconds from now: what clients read
    /// that were written for an early draft of the IETF's (draft-ietf-httpapi-ratelimit-headers-06).
    pub const fn draft6() -> Self {
        Self { draft_6: true, ..Self::none() }
    }

    /// Only `Retry-After` and `Cache-Control`, on a refusal.
    pub const fn none() -> Self {
        Self { x: false, from_now: false, draft_6: false, ietf: false, partition: None }
    }

    /// These fields, and `others` too.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        let partition = match self.partition {
            Some(secret) => Some(secret),
            None => others.partition,
        };
        Self {
            x: self.x || others.x,
            from_now: self.from_now || others.from_now,
            draft_6: self.draft_6 || others.draft_6,
            ietf: self.ietf || others.ietf,
            partition,
        }
    }

    /// The same with `X-RateLimit-Reset`, if it is written, in seconds from now.
    #[must_use]
    pub const fn reset_in_seconds(self) -> Self {
        Self { from_now: true, ..self }
    }

    /// Adds the parameter `pk` to the [IETF's fields](Self::ietf), if they are written. A client
    /// that has several quotas recognizes by it which of them a response reports.
    ///
    /// The value is a hash of the key (SipHash-2-4, 128 bits) under `secret`, never the key itself.
    /// Use the same secret in all processes, and keep it confidential: with it, an attacker can test
    /// guesses of keys.
    #[cfg(feature = "partition-key")]
    #[must_use]
    pub const fn partition_key(self, secret: [u8; 16]) -> Self {
        Self { partition: Some(Secret(secret)), ..self }
    }

    /// Whether the numbers of the limit that is shown are told.
    #[inline]
    pub(crate) fn tell_numbers(self) -> bool {
        self.x
    }

    /// Whether more is told.
    #[inline]
    pub(crate) fn tell_more(self) -> bool {
        self.draft_6 || self.ietf
    }

    /// What `X-RateLimit-*` say of a decision made at `at`, of whose limits this one is shown.
    #[inline]
    pub(crate) fn numbers(self, at: Timestamp, shown: &Status) -> Option<Numbers> {
        let reset = match (self.x, self.from_now) {
            (false, _) => return None,
            (true, false) => at.plus(shown.reset_after_micros()).as_secs_ceil(),
            (true, true) => seconds_up(shown.reset_after()),
        };
        Some(Numbers::of(shown, reset))
    }

    #[inline]
    pub(crate) fn numbers_of(self, decision: &Decision) -> Option<Numbers> {
        self.numbers(decision.wall_at(), decision.shown())
    }

    /// What the other fields say.
    #[inline]
    pub(crate) fn more_of(self, decision: &Decision, policy: &Policy, key: &Key) -> Option<More> {
        self.tell_more().then(|| {
            let shown = decision.shown();
            let draft_6 = self.draft_6.then(|| Numbers::of(shown, seconds_up(shown.reset_after())));
            More { draft_6, lists: self.ietf.then(|| Lists::of(decision, policy, key, self.partition)) }
        })
    }
}

/// What few layers are asked to tell, and so travels in a box.
pub(crate) struct More {
    draft_6: Option<Numbers>,
    lists: Option<Lists>,
}

impl Default for Headers {
    fn default() -> Self {
        Self::x_rate_limit()
    }
}

/// Without the secret.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut families = f.debug_list();
        families.entries(self.x.then_some("x")).entries(self.from_now.then_some("reset in seconds"));
        families.entries(self.ietf.then_some("ietf")).entries(self.partition.map(|_| "partition key"));
        families.entries(self.draft_6.then_some("draft6")).finish()
    }
}

/// Tells an admitted request's response how things stand.
///
/// Where layers are stacked it may have an inner layer's numbers already: the smaller remaining is the truth for the client,
/// of equals the inner one's stays, and a refusal, which carries its decision, keeps its own. Lists name every limit.
#[inline]
pub(crate) fn write_admitted<B>(response: &mut Response<B>, numbers: Option<Numbers>, more: Option<More>) {
    if let Some(numbers) = numbers {
        write_if_fewer(numbers, &X, response);
    }
    let Some(More { draft_6, lists }) = more else { return };
    if let Some(numbers) = draft_6 {
        write_if_fewer(numbers, &DRAFT_6, response);
    }
    if let Some(lists) = lists {
        lists.write(response.headers_mut());
    }
}

fn write_if_fewer<B>(numbers: Numbers, names: &'static Names, response: &mut Response<B>) {
    if !response.extensions().get::<Decision>().is_some_and(Decision::is_refused) {
        numbers.write_if_fewer(names, response.headers_mut());
    }
}

/// Tells a refused request's response how things stand, and caches not to keep it: a 429 must not be stored (RFC 6585,
/// section 4), and not every refusal by a limit says 429.
pub(crate) fn write_refused<B>(
    response: &mut Response<B>,
    decision: &Decision,
    numbers: Option<Numbers>,
    more: Option<More>,
) {
    let headers = response.headers_mut();
    if let Ok(entry) = headers.try_entry(CACHE_CONTROL) {
        entry.or_insert(HeaderValue::from_static("no-store"));
    }
    if let Some(wait) = decision.retry_after() {
        set(headers, RETRY_AFTER, frequent(Frequent::Time, seconds_up(wait).max(1)));
    }
    if let Some(numbers) = numbers {
        numbers.write(&X, headers);
    }
    let Some(More { draft_6, lists }) = more else { return };
    if let Some(numbers) = draft_6 {
        numbers.write(&DRAFT_6, headers);
    }
    if let Some(lists) = lists {
        lists.write(headers);
    }
}

/// A map that is full of other fields stays as it is.
#[inline]
fn set(headers: &mut HeaderMap, name: impl IntoHeaderName, value: HeaderValue) {
    let _ = headers.try_insert(name, value);
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
