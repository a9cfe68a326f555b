//! Header fields that report decisions.

mod ietf;
mod numbers;

use std::fmt;
use std::str::FromStr;

use http::header::{CACHE_CONTROL, HeaderValue, RETRY_AFTER};
use http::{HeaderMap, Response};

use self::ietf::{IetfFields, Secret};
pub(crate) use self::numbers::Numbers;
use self::numbers::{DRAFT_6, X, repeated, set, wait};
use crate::decision::{Decision, shown_of};
use crate::error::ConfigError;
use crate::rejection::extend_grpc_wait;
use crate::storage::StorageRequest;
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
/// | [`ietf`](Self::ietf) | `RateLimit-Policy: "free";q=10;w=1`, `RateLimit: "free";r=3;t=1` |
/// | [`draft6`](Self::draft6) | `RateLimit-Limit: 10`, `RateLimit-Remaining: 3`, `RateLimit-Reset: 1` |
/// | [`none`](Self::none) | none |
///
/// Defaults to [`x_rate_limit`](Self::x_rate_limit). [`and`](Self::and) combines families. Times
/// are in whole seconds, rounded up.
///
/// The response to a request that a limit refused also has `Cache-Control`, and `Retry-After`
/// unless the cost of the request exceeds the capacity.
///
/// The guide on [headers and refusals](crate::guide::headers_and_refusals) explains each field,
/// stacked layers, and which fields clients read.
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
    /// Each member is named by [`Policy::limit_name`](crate::Policy::limit_name). Clients see this name, so choose one that
    /// may be public, and a different one for each policy. The guide explains [the
    /// parameters](crate::guide::headers_and_refusals#the-ietf-draft).
    ///
    /// Source: draft-ietf-httpapi-ratelimit-headers-11, sections 3 and 4.
    pub const fn ietf() -> Self {
        Self { ietf: true, ..Self::none() }
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
        Self { x: false, from_now: false, draft_6: false, ietf: false, partition: None }
    }

    /// Combines the fields of `self` and `others`. The options of both apply to the result. If both
    /// have a partition key, the secret of `self` is used.
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

    /// Writes `X-RateLimit-Reset` in seconds from now instead of a Unix time. Has no effect on
    /// other fields.
    #[must_use]
    pub const fn reset_in_seconds(self) -> Self {
        Self { from_now: true, ..self }
    }

    /// Adds the parameter `pk`, the partition key, to the [IETF fields](Self::ietf), if they are
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

    /// Returns `true` if `X-RateLimit-*` are written.
    #[inline]
    pub(crate) fn writes_x_rate_limit(self) -> bool {
        self.x
    }

    /// Returns `true` if fields other than `X-RateLimit-*` are written.
    #[inline]
    pub(crate) fn writes_other_fields(self) -> bool {
        self.draft_6 || self.ietf
    }

    /// Returns the values of `X-RateLimit-*` after a hit of `cost` units that was decided at `at`,
    /// or `None` if these fields are not written. `shown` is the status of the limit to report.
    #[inline]
    pub(crate) fn numbers(self, at: Timestamp, shown: &Status, cost: u32) -> Option<Numbers> {
        let reset = match (self.x, self.from_now) {
            (false, _) => return None,
            (true, false) => at.plus(shown.reset_after_micros()).as_secs_ceil(),
            (true, true) => seconds_up(shown.reset_after()),
        };
        Some(Numbers::of(shown, reset, cost))
    }

    /// Returns the values of `X-RateLimit-*` for decisions that were made together.
    #[inline]
    pub(crate) fn numbers_of(self, decisions: &[Decision]) -> Option<Numbers> {
        let decision = &decisions[shown_of(decisions)];
        self.numbers(decision.wall_at(), decision.shown(), decision.cost())
    }

    /// Returns the values of `X-RateLimit-*` for a limit on requests in flight, or `None` if these fields
    /// are not written.
    #[inline]
    pub(crate) fn numbers_in_flight(self, limit: u32, remaining: u32) -> Option<Numbers> {
        self.x.then(|| Numbers::in_flight(limit, remaining))
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
            let position = shown_of(decisions);
            let (shown, cost) = (decisions[position].shown(), decisions[position].cost());
            let draft_6 = self.draft_6.then(|| Numbers::of(shown, seconds_up(shown.reset_after()), cost));
            let is_in_flight = requests[position].policy.counts_in_flight();
            let draft_6 = if is_in_flight { draft_6.map(Numbers::without_reset) } else { draft_6 };
            OtherFields {
                draft_6,
                wait: wait(shown, cost),
                lists: self.ietf.then(|| IetfFields::of(decisions, requests, self.partition)),
            }
        })
    }
}

/// The fields other than `X-RateLimit-*`.
pub(crate) struct OtherFields {
    draft_6: Option<Numbers>,
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

const WORDS: &str = "x, reset-in-seconds, ietf, draft6 or none";

/// Parses a list of words, separated by commas, or the single word `none`. Upper and lower case are
/// equivalent, and white space around the words is ignored.
///
/// | word | effect |
/// |---|---|
/// | `x` | [`x_rate_limit`](Headers::x_rate_limit) |
/// | `reset-in-seconds` | [`reset_in_seconds`](Headers::reset_in_seconds), for `x` |
/// | `ietf` | [`ietf`](Headers::ietf) |
/// | `draft6` | [`draft6`](Headers::draft6) |
/// | `none` | [`none`](Headers::none) |
///
/// ```
/// use tower_ratelimit::Headers;
///
/// let headers: Headers = "x, reset-in-seconds, ietf".parse()?;
/// assert_eq!(headers, Headers::x_rate_limit().reset_in_seconds().and(Headers::ietf()));
/// assert_eq!(headers.to_string(), "x, reset-in-seconds, ietf");
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
impl FromStr for Headers {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim().eq_ignore_ascii_case("none") {
            return Ok(Self::none());
        }
        text.split(',').try_fold(Self::none(), |headers, word| {
            Ok(match word.trim().to_ascii_lowercase().as_str() {
                "x" => headers.and(Self::x_rate_limit()),
                "reset-in-seconds" => headers.reset_in_seconds(),
                "ietf" => headers.and(Self::ietf()),
                "draft6" => headers.and(Self::draft6()),
                "none" => return Err(unreadable(word, text, "\"none\" cannot be combined with other fields")),
                _ => return Err(unreadable(word, text, &format!("expected {WORDS}"))),
            })
        })
    }
}

fn unreadable(word: &str, text: &str, why: &str) -> ConfigError {
    ConfigError::new(format!(
        "cannot read the header fields {:?} in {text:?}: {why}, for example \"x, ietf\"",
        word.trim()
    ))
}

/// Writes a text that parses to the same fields, except for the secret of a partition key, which is
/// omitted.
impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [(self.x, "x"), (self.from_now, "reset-in-seconds"), (self.ietf, "ietf"), (self.draft_6, "draft6")];
        let words: Vec<_> = words.into_iter().filter_map(|(is_set, word)| is_set.then_some(word)).collect();
        f.write_str(&if words.is_empty() { "none".to_owned() } else { words.join(", ") })
    }
}

/// Omits the secret.
impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut families = f.debug_list();
        families.entries(self.x.then_some("x")).entries(self.from_now.then_some("reset in seconds"));
        families.entries(self.ietf.then_some("ietf")).entries(self.partition.map(|_| "partition key"));
        families.entries(self.draft_6.then_some("draft6")).finish()
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
    let Some(OtherFields { draft_6, wait, lists }) = other_fields else { return };
    if is_refusal(response) {
        extend_wait(response, wait);
    } else if let Some(numbers) = draft_6 {
        numbers.write_if_fewer(DRAFT_6, response.headers_mut());
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

/// Writes the header fields of a refused request into its response.
///
/// Adds `Cache-Control: no-store`. Caches must not store a 429 (RFC 6585, section 4), but a custom
/// rejection may use another status.
pub(crate) fn write_refused(
    headers: &mut HeaderMap,
    decision: &Decision,
    numbers: Option<Numbers>,
    other_fields: Option<OtherFields>,
) {
    if !headers.contains_key(CACHE_CONTROL) {
        set(headers, CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    if let Some(wait) = decision.retry_after() {
        set(headers, RETRY_AFTER, repeated(seconds_up(wait).max(1)));
    }
    if let Some(numbers) = numbers {
        numbers.write(X, headers);
    }
    let Some(OtherFields { draft_6, lists, .. }) = other_fields else { return };
    if let Some(numbers) = draft_6 {
        numbers.write(DRAFT_6, headers);
    }
    if let Some(lists) = lists {
        lists.write(headers);
    }
}
