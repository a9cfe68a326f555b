//! Header fields that report decisions.

mod ietf;
mod jitter;
mod numbers;
mod structured;
mod suffix;
mod text;

use std::time::Duration;

use http::header::{CACHE_CONTROL, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Response};

use self::ietf::{IetfFields, Secret};
pub(crate) use self::numbers::Numbers;
use self::numbers::{DRAFT_6, X, repeated, set, wait, wait_of};
#[cfg(feature = "client")]
pub(crate) use self::structured::{Padding, is_list_of_strings};
use self::suffix::{NOT_A_SUFFIX, Suffix};
use crate::decision::{Decision, shown_position};
use crate::key::Key;
use crate::rejection::extend_grpc_wait;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::Status;
use crate::time::{Timestamp, seconds_up};

/// The header fields with which a layer reports limits to clients. See
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
///
/// ```
/// use tower_ratelimit::{Global, Headers, Quota, RateLimitLayer};
///
/// let layer = RateLimitLayer::new(Quota::per_second(10), Global::new())
///     .headers(Headers::x_rate_limit().reset_in_seconds());
/// ```
///
/// | family | fields of the response to an admitted request, here for a policy named `free` |
/// |---|---|
/// | [`x_rate_limit`](Self::x_rate_limit) | `X-RateLimit-Limit: 10`, `X-RateLimit-Remaining: 3`, `X-RateLimit-Reset: 1728000060` |
/// | [`draft11`](Self::draft11) | `RateLimit-Policy: "free";q=10;w=1`, `RateLimit: "free";r=3;t=1` |
/// | [`draft6`](Self::draft6) | `RateLimit-Limit: 10`, `RateLimit-Remaining: 3`, `RateLimit-Reset: 1` |
/// | [`none`](Self::none) | none |
///
/// Defaults to [`x_rate_limit`](Self::x_rate_limit). [`and`](Self::and) combines families. Times
/// are in whole seconds, rounded up.
///
/// The response to a request that a limit refused also has `Cache-Control`, and `Retry-After`
/// unless the request can never be admitted, because of its cost.
///
/// The guide on [headers and refusals](crate::guide::headers_and_refusals) explains each field,
/// stacked layers, and which fields clients read.
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // a set of families
pub struct Headers {
    x: bool,
    from_now: bool,
    draft_6: bool,
    draft_11: bool,
    partition: Option<Secret>,
    /// Applies to `X-RateLimit-*`.
    suffix: Option<Suffix>,
    /// The most by which `Retry-After` is lengthened, in percent.
    jitter: u8,
}

impl Headers {
    /// Writes these fields about the limit that [`Decision::shown`] selects:
    ///
    /// | field | value |
    /// |---|---|
    /// | `X-RateLimit-Limit` | its capacity |
    /// | `X-RateLimit-Remaining` | its remaining units |
    /// | `X-RateLimit-Reset` | the time at which more units remain, in seconds since the Unix epoch, or [from now](Self::reset_in_seconds) |
    pub const fn x_rate_limit() -> Self {
        Self { x: true, ..Self::none() }
    }

    /// Writes the fields `RateLimit-Policy` and `RateLimit` of the IETF draft, as Structured Fields
    /// (RFC 9651) with one member per limit.
    ///
    /// A later text of the draft will get a method of its own, so this one always writes the same
    /// fields.
    ///
    /// Each member is named by [`Policy::limit_name`](crate::Policy::limit_name). Clients see this
    /// name, so choose one that may be public, and a different one for each policy. The guide
    /// explains [the parameters](crate::guide::headers_and_refusals#the-ietf-draft).
    ///
    /// Source: draft-ietf-httpapi-ratelimit-headers-11, sections 3 and 4.
    pub const fn draft11() -> Self {
        Self { draft_11: true, ..Self::none() }
    }

    /// Writes `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`, with the values of
    /// [`x_rate_limit`](Self::x_rate_limit). `RateLimit-Reset` is in seconds from now.
    ///
    /// Source: draft-ietf-httpapi-ratelimit-headers-06.
    pub const fn draft6() -> Self {
        Self { draft_6: true, ..Self::none() }
    }

    /// Writes only the fields `Retry-After` and `Cache-Control` of refusals.
    pub const fn none() -> Self {
        Self { x: false, from_now: false, draft_6: false, draft_11: false, partition: None, suffix: None, jitter: 0 }
    }

    /// Combines the fields of `self` and `others`. The options of both apply to the result. If both
    /// have a partition key or a suffix, that of `self` is used. The larger jitter is used.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        let partition = match self.partition {
            Some(secret) => Some(secret),
            None => others.partition,
        };
        let suffix = match self.suffix {
            Some(suffix) => Some(suffix),
            None => others.suffix,
        };
        let jitter = if self.jitter > others.jitter { self.jitter } else { others.jitter };
        Self {
            x: self.x || others.x,
            from_now: self.from_now || others.from_now,
            draft_6: self.draft_6 || others.draft_6,
            draft_11: self.draft_11 || others.draft_11,
            partition,
            suffix,
            jitter,
        }
    }

    /// Writes `X-RateLimit-Reset` in seconds from now instead of a Unix time. Has no effect on
    /// other fields.
    #[must_use]
    pub const fn reset_in_seconds(self) -> Self {
        Self { from_now: true, ..self }
    }

    /// Appends `-` and this text to the names of `X-RateLimit-*`, as in
    /// `X-RateLimit-Remaining-Tokens`. Has no effect on other fields.
    ///
    /// Layers with different suffixes each write their own numbers. The APIs of language models limit
    /// requests and tokens in this way:
    ///
    /// ```
    /// use tower_ratelimit::{Global, Headers, Quota, RateLimitLayer};
    ///
    /// let requests = RateLimitLayer::new(Quota::per_minute(60), Global::new())
    ///     .headers(Headers::x_rate_limit().suffix("requests"));
    /// let tokens = RateLimitLayer::new(Quota::per_minute(10_000), Global::new())
    ///     .cost(|_| 256)
    ///     .headers(Headers::x_rate_limit().suffix("tokens"));
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `suffix` is not 1 to 32 of the characters `a` to `z`, `0` to `9`, `-` and `_`.
    #[must_use]
    #[track_caller]
    pub const fn suffix(self, suffix: &str) -> Self {
        let suffix = Suffix::parse(suffix);
        assert!(suffix.is_some(), "{}", NOT_A_SUFFIX);
        Self { suffix, ..self }
    }

    /// Lengthens `Retry-After` of refusals, and the wait in their bodies, by up to `percent` percent.
    /// Defaults to 0.
    ///
    /// Clients that a window has refused would otherwise all return when it ends. The share depends
    /// on the key of the client and on the end of its wait, so it is the same in all processes. A
    /// wait is never shortened. The other fields do not change.
    ///
    /// # Panics
    ///
    /// Panics if `percent` is more than 100.
    #[must_use]
    #[track_caller]
    pub const fn retry_jitter(self, percent: u8) -> Self {
        assert!(percent <= 100, "the jitter is at most 100 percent");
        Self { jitter: percent, ..self }
    }

    /// Adds the parameter `pk`, the partition key, to the [IETF fields](Self::draft11), if they are
    /// written. A client that sends requests under several keys uses it to recognize the key whose
    /// quota a response reports.
    ///
    /// The value is a hash of the key (SipHash-2-4, 128 bits) under `secret`, never the key itself.
    /// Use the same secret in all processes, and keep it confidential. An attacker who knows it can
    /// test guesses of keys.
    #[cfg(feature = "partition-key")]
    #[must_use]
    pub const fn partition_key(self, secret: [u8; 16]) -> Self {
        Self { partition: Some(Secret(secret)), ..self }
    }

    /// Returns `true` if `X-RateLimit-*` without a suffix are written.
    #[inline]
    pub(crate) fn writes_x_rate_limit(self) -> bool {
        self.x && self.suffix.is_none()
    }

    /// Returns `true` if fields other than `X-RateLimit-*` without a suffix are written.
    #[inline]
    pub(crate) fn writes_other_fields(self) -> bool {
        self.draft_6 || self.draft_11 || self.written_suffix().is_some()
    }

    fn written_suffix(self) -> Option<Suffix> {
        self.suffix.filter(|_| self.x)
    }

    /// Returns the values of `X-RateLimit-*` after a hit that was admitted with this summary, or `None`
    /// if these fields are not written without a suffix. The policy must
    /// [suit summaries](crate::Policy::suits_summary).
    #[inline]
    pub(crate) fn numbers(self, summary: &Summary, request: &StorageRequest<'_>) -> Option<Numbers> {
        self.writes_x_rate_limit().then(|| {
            // All limits need the same units, or there is only one.
            let wait = wait_of(&summary.limit, &request.policy.limits()[0], request.cost);
            self.x_numbers(summary.at, &summary.limit, wait)
        })
    }

    #[inline]
    fn x_numbers(self, at: Timestamp, shown: &Status, wait: u32) -> Numbers {
        let reset = if self.from_now {
            seconds_up(shown.reset_after())
        } else {
            at.plus(shown.reset_after_micros()).as_secs_ceil()
        };
        Numbers::of(shown, reset, wait)
    }

    /// Returns the values of `X-RateLimit-*` for decisions that were made together.
    #[inline]
    pub(crate) fn numbers_of(self, decisions: &[Decision], requests: &[StorageRequest<'_>]) -> Option<Numbers> {
        self.writes_x_rate_limit().then(|| {
            let decision = &decisions[shown_position(decisions)];
            self.x_numbers(decision.wall_at(), decision.shown(), wait(decisions, requests))
        })
    }

    /// Returns the values of `X-RateLimit-*` for a refusal, which has a `Retry-After` of its own.
    #[inline]
    pub(crate) fn numbers_of_refusal(self, decisions: &[Decision]) -> Option<Numbers> {
        self.writes_x_rate_limit().then(|| {
            let decision = &decisions[shown_position(decisions)];
            self.x_numbers(decision.wall_at(), decision.shown(), 0)
        })
    }

    /// Returns the values of `X-RateLimit-*` for a limit on requests in flight, or `None` if these fields
    /// are not written without a suffix.
    #[inline]
    pub(crate) fn numbers_in_flight(self, limit: u32, remaining: u32) -> Option<Numbers> {
        self.writes_x_rate_limit().then(|| Numbers::in_flight(limit, remaining))
    }

    /// Returns the time after which a refused client should retry, or `None` if its request can
    /// never be admitted.
    pub(crate) fn retry_after(self, decision: &Decision, key: &Key) -> Option<Duration> {
        let wait = decision.retry_after()?;
        Some(if self.jitter == 0 { wait } else { jitter::lengthened(wait, self.jitter, decision, key) })
    }

    /// Returns the fields other than `X-RateLimit-*` for decisions that were made together, or `None`
    /// if there are none.
    #[inline]
    pub(crate) fn other_fields_of(
        self,
        decisions: &[Decision],
        requests: &[StorageRequest<'_>],
    ) -> Option<OtherFields> {
        self.writes_other_fields().then(|| {
            let position = shown_position(decisions);
            let decision = &decisions[position];
            let (shown, wait) = (decision.shown(), wait(decisions, requests));
            let draft_6 = self.draft_6.then(|| Numbers::of(shown, seconds_up(shown.reset_after()), wait));
            let x_numbers =
                self.written_suffix().map(|suffix| (suffix, self.x_numbers(decision.wall_at(), shown, wait)));
            let is_in_flight = requests[position].policy.counts_in_flight();
            let without_reset = |numbers: Numbers| if is_in_flight { numbers.without_reset() } else { numbers };
            OtherFields {
                draft_6: draft_6.map(without_reset),
                suffixed: x_numbers.map(|(suffix, numbers)| (suffix, without_reset(numbers))),
                wait,
                lists: self.draft_11.then(|| IetfFields::of(decisions, requests, self.partition)),
            }
        })
    }
}

/// The fields other than `X-RateLimit-*` without a suffix.
pub(crate) struct OtherFields {
    draft_6: Option<Numbers>,
    suffixed: Option<(Suffix, Numbers)>,
    /// The seconds until more units remain, rounded up, or 0 if another hit of the same cost would
    /// be admitted now.
    wait: u32,
    lists: Option<IetfFields>,
}

impl OtherFields {
    /// Removes the wait, for a hit that is refunded.
    pub(crate) fn without_wait(self) -> Self {
        Self { wait: 0, ..self }
    }
}

impl Default for Headers {
    fn default() -> Self {
        Self::x_rate_limit()
    }
}

/// Writes the header fields of an admitted request into its response.
///
/// With stacked layers, the response may already have the fields of an inner layer. The fields that
/// report fewer remaining units stay. If both report the same, those of the inner layer stay. The
/// IETF fields list the limits of all layers.
///
/// A refusal by an inner layer keeps its fields. Only its `Retry-After` is raised to the wait of
/// this layer, because this layer would refuse the client until then.
#[inline]
pub(crate) fn write_admitted<B>(
    response: &mut Response<B>,
    numbers: Option<Numbers>,
    other_fields: Option<OtherFields>,
) {
    if let Some(numbers) = numbers {
        if is_refusal(response) {
            extend_wait(response, numbers.wait());
        } else {
            numbers.write_if_fewer(X, response.headers_mut());
        }
    }
    let Some(OtherFields { draft_6, suffixed, wait, lists }) = other_fields else { return };
    if is_refusal(response) {
        extend_wait(response, wait);
    } else if let Some(numbers) = draft_6 {
        numbers.write_if_fewer(DRAFT_6, response.headers_mut());
    }
    if let Some((suffix, numbers)) = suffixed {
        let names = suffix.names();
        // A refusal keeps its own fields. Those with another suffix are not of the refusal.
        if !(is_refusal(response) && response.headers().contains_key(&names.remaining)) {
            numbers.write_if_fewer(names, response.headers_mut());
        }
    }
    if let Some(lists) = lists {
        lists.write(response.headers_mut());
    }
}

#[inline]
fn is_refusal<B>(response: &Response<B>) -> bool {
    response.extensions().get::<Decision>().is_some_and(Decision::is_refused)
}

/// Raises `Retry-After` of a refusal, and its gRPC fields, to at least this number of seconds.
///
/// A missing `Retry-After` stays missing, because the cost exceeds a capacity. A date stays
/// unchanged, because another layer wrote it.
#[cold]
fn extend_wait<B>(response: &mut Response<B>, seconds: u32) {
    let wait = u64::from(seconds);
    let written = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if written.is_some_and(|written| written < wait) {
        set(response.headers_mut(), RETRY_AFTER, repeated(wait));
    }
    extend_grpc_wait(response, seconds);
}

/// Writes the header fields of a refused request into its response. `wait` is the time after which the
/// client should retry.
///
/// Adds `Cache-Control: no-store`. Caches must not store a 429 (RFC 6585, section 4), but a custom
/// rejection may use another status.
pub(crate) fn write_refused(
    headers: &mut HeaderMap,
    wait: Option<Duration>,
    numbers: Option<Numbers>,
    other_fields: Option<OtherFields>,
) {
    if let Ok(cache_control) = headers.try_entry(CACHE_CONTROL) {
        let _ = cache_control.or_try_insert(HeaderValue::from_static("no-store"));
    }
    if let Some(wait) = wait {
        set(headers, RETRY_AFTER, repeated(seconds_up(wait).max(1)));
    }
    if let Some(numbers) = numbers {
        numbers.write(X, headers);
    }
    let Some(OtherFields { draft_6, suffixed, lists, .. }) = other_fields else { return };
    if let Some(numbers) = draft_6 {
        numbers.write(DRAFT_6, headers);
    }
    if let Some((suffix, numbers)) = suffixed {
        numbers.write(suffix.names(), headers);
    }
    if let Some(lists) = lists {
        lists.write(headers);
    }
}
