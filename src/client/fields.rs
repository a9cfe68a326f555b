//! The fields of a response in which a server reports its limits.

use std::time::{Duration, SystemTime};

use http::header::{AGE, DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, Response, StatusCode};

use super::grpc;
use super::values::{reset, retry_after, seconds};
use crate::headers::{Padding, is_list_of_strings};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// The statuses whose `Retry-After` is about the limits of the server. That of a redirection or of a
/// job in progress is about one request only.
const REFUSALS: [StatusCode; 3] =
    [StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];

/// The pause that a response asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Advice {
    /// The time for which the next requests would be refused.
    pub(super) pause: Option<Duration>,
    /// A field that cannot be read, and was ignored.
    pub(super) unreadable: Option<HeaderName>,
}

impl Advice {
    /// Reads the fields of a response that arrived at `now`. The dates in it are compared with its
    /// `Date`, if it has one, because the two clocks may differ. The numbers of a response from a cache
    /// are ignored, because they are not current (the draft's section on caching).
    pub(super) fn of<B>(response: &Response<B>, now: SystemTime) -> Self {
        let headers = response.headers();
        let date = headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        let age = headers.get(AGE).and_then(|age| seconds(age.to_str().ok()?.trim())).unwrap_or_default();
        let server_now = date.and_then(|date| date.checked_add(age)).unwrap_or(now);
        let mut fields = Fields { headers, now: server_now, unreadable: None };
        let is_refusal = REFUSALS.contains(&response.status()) || grpc::is_refusal(headers);
        let asked = if is_refusal { fields.asked_wait() } else { None };
        let is_wait = |pause: &Duration| !pause.is_zero();
        // A server that asks for a wait knows more than its numbers show.
        let exhausted = |fields: &mut Fields<'_>| if age.is_zero() { fields.exhausted() } else { None };
        let pause = asked.filter(is_wait).or_else(|| exhausted(&mut fields).filter(is_wait));
        Self { pause, unreadable: fields.unreadable }
    }
}

struct Fields<'a> {
    headers: &'a HeaderMap,
    /// The time of the server.
    now: SystemTime,
    unreadable: Option<HeaderName>,
}

impl Fields<'_> {
    /// Returns the wait that a refusal asks for. The most precise field comes first.
    fn asked_wait(&mut self) -> Option<Duration> {
        let now = self.now;
        // A negative pushback forbids a retry of this call, and says nothing about the next one.
        self.headers.get(PUSHBACK).and_then(|value| grpc::pushback(value.to_str().ok()?)).or_else(|| {
            self.headers.get(STATUS_DETAILS).and_then(|value| grpc::retry_info(value.to_str().ok()?)).or_else(|| {
                let millis = self.read(&RETRY_AFTER_MS, |text| Some(seconds(text)? / 1_000));
                millis.or_else(|| self.read(&RETRY_AFTER, |text| retry_after(text, now)))
            })
        })
    }

    /// Returns the time until the last reset of the limits of which nothing remains.
    fn exhausted(&mut self) -> Option<Duration> {
        let is_family =
            |name: &&HeaderName| name.as_str().contains("ratelimit") || name.as_str().contains("rate-limit");
        let names: Vec<HeaderName> = self.headers.keys().filter(is_family).cloned().collect();
        let waits: Vec<Duration> = names
            .into_iter()
            .filter_map(|name| {
                if name == RATE_LIMIT {
                    self.read_list(&name)
                } else if name.as_str().contains("remaining") {
                    self.reset_if_exhausted(&name)
                } else {
                    None
                }
            })
            .collect();
        waits.into_iter().max()
    }

    /// Returns the reset beside a number of remaining units, if it is zero. The two names differ in one
    /// word, as in `x-ratelimit-remaining-tokens` and `anthropic-ratelimit-tokens-reset`.
    fn reset_if_exhausted(&mut self, remaining: &HeaderName) -> Option<Duration> {
        // Older drafts have a window after the number: `0;w=60`.
        let left = self.read(remaining, |text| seconds(text.split(';').next()?.trim_end()))?;
        if left >= Duration::from_secs(1) {
            return None;
        }
        let now = self.now;
        ["reset-after", "reset"].into_iter().find_map(|word| {
            let name = HeaderName::try_from(remaining.as_str().replace("remaining", word)).ok()?;
            self.read(&name, |text| reset(text, now))
        })
    }

    /// Reads all lines of `RateLimit`, which are one list.
    fn read_list(&mut self, name: &HeaderName) -> Option<Duration> {
        let lines: Option<Vec<&str>> = self.headers.get_all(name).iter().map(|line| line.to_str().ok()).collect();
        let read = lines.and_then(|lines| listed(lines.join(", ").trim()));
        if read.is_none() {
            self.unreadable.get_or_insert_with(|| name.clone());
        }
        read
    }

    /// Returns the value of the first line of a field. Notes a value that cannot be read.
    fn read<T>(&mut self, name: &HeaderName, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let value = self.headers.get(name)?;
        let read = value.to_str().ok().and_then(|text| parse(text.trim()));
        if read.is_none() {
            self.unreadable.get_or_insert_with(|| name.clone());
        }
        read
    }
}

/// Parses `RateLimit`: a list of draft 8 or later (`"free";r=0;t=30`), or the pairs of draft 7
/// (`limit=10, remaining=0, reset=30`). Returns the latest reset of the limits of which nothing
/// remains, or zero.
fn listed(text: &str) -> Option<Duration> {
    let mut members: Vec<[Option<Duration>; 2]> = Vec::new();
    let is_list = is_list_of_strings(text.as_bytes(), Padding::Optional, |member, name, value| {
        members.resize(members.len().max(member + 1), [None; 2]);
        let value = str::from_utf8(value).ok().and_then(seconds);
        match name {
            b"r" => members[member][0] = value,
            b"t" => members[member][1] = value,
            _ => {}
        }
    });
    if !is_list {
        let pairs: Vec<_> = text.split(',').map(|pair| pair.trim().split_once('=')).collect::<Option<_>>()?;
        let value = |name| pairs.iter().find(|(key, _)| *key == name).and_then(|(_, value)| seconds(value));
        members = vec![[Some(value("remaining")?), value("reset")]];
    }
    let exhausted = members.into_iter().filter(|[remaining, _]| *remaining == Some(Duration::ZERO));
    Some(exhausted.filter_map(|[_, reset]| reset).max().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause(status: u16, fields: &[(&'static str, &str)]) -> Advice {
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in fields {
            response.headers_mut().append(*name, value.parse().unwrap());
        }
        Advice::of(&response, SystemTime::UNIX_EPOCH + Duration::from_secs(1_728_000_000))
    }

    #[test]
    fn lists_of_every_draft_are_read() {
        for (value, expected) in [
            ("\"free\";r=9;t=30", Some(0)),
            ("\"free\";r=0;t=30", Some(30)),
            ("\"a\";r=0;t=5, \"b\";r=3;t=60, \"c, d\";r=0;t=9;pk=:AAAA:", Some(9)),
            ("\"slots\";r=0", Some(0)),
            ("limit=10, remaining=0, reset=30", Some(30)),
            ("limit=10,remaining=1,reset=30", Some(0)),
            ("\"a\";r=0;t=5, b", None),
            ("limit=10, reset=30", None),
            ("remaining", None),
        ] {
            let expected_pause = expected.filter(|seconds| *seconds > 0).map(Duration::from_secs);
            let unreadable = expected.is_none().then_some(RATE_LIMIT);
            assert_eq!(pause(200, &[("ratelimit", value)]), Advice { pause: expected_pause, unreadable }, "{value}");
        }
    }

    #[test]
    fn retry_after_counts_only_in_refusals_and_before_the_numbers() {
        let fields = [("retry-after", "7"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")];
        for (status, expected) in [(429, 7), (503, 7), (403, 7), (202, 60), (301, 60)] {
            assert_eq!(pause(status, &fields).pause, Some(Duration::from_secs(expected)), "{status}");
        }
        let fields = [("retry-after", "soon"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")];
        let unreadable = Some(RETRY_AFTER);
        assert_eq!(pause(429, &fields), Advice { pause: Some(Duration::from_secs(60)), unreadable });
    }

    /// Guards against this defect: a refusal that asks for no wait hides that nothing remains.
    #[test]
    fn numbers_count_beside_a_wait_of_zero() {
        for value in ["0", "Sun, 06 Nov 1994 08:50:07 GMT"] {
            let fields = [("retry-after", value), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")];
            assert_eq!(pause(429, &fields).pause, Some(Duration::from_secs(60)), "{value}");
            assert_eq!(pause(429, &fields[..1]).pause, None, "{value}");
        }
    }

    #[test]
    fn lines_of_one_list_are_read_together() {
        let fields = [("ratelimit", "\"app\";r=5;t=60"), ("ratelimit", "\"gateway\";r=0;t=30")];
        assert_eq!(pause(200, &fields).pause, Some(Duration::from_secs(30)));
    }

    #[test]
    fn numbers_of_cached_responses_are_ignored() {
        let numbers = [("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "60")];
        let aged = |age| pause(200, &[numbers[0], numbers[1], ("age", age)]).pause;
        assert_eq!([aged("0"), aged("3000")], [Some(Duration::from_secs(60)), None]);
        // A date is compared with the time at which the response arrived.
        let date = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
        let fields = [date, ("age", "10"), ("retry-after", "Sun, 06 Nov 1994 08:50:07 GMT")];
        assert_eq!(pause(429, &fields).pause, Some(Duration::from_secs(20)));
    }

    #[test]
    fn dates_are_compared_with_the_clock_of_the_server() {
        let fields = [("date", "Sun, 06 Nov 1994 08:49:37 GMT"), ("retry-after", "Sun, 06 Nov 1994 08:50:07 GMT")];
        assert_eq!(pause(429, &fields).pause, Some(Duration::from_secs(30)));
    }

    #[test]
    fn pushback_comes_before_retry_info() {
        // The status 8 with a RetryInfo of 1.5 s, in base64 without padding.
        let details = "CAgaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIARCAyrXuAQ";
        let details = ("grpc-status-details-bin", details);
        let status = ("grpc-status", "8");
        let pushback = |value| pause(200, &[status, details, ("grpc-retry-pushback-ms", value)]).pause;
        assert_eq!(pushback("250"), Some(Duration::from_millis(250)));
        assert_eq!(pushback("-1"), Some(Duration::from_millis(1_500)));
        assert_eq!(pause(200, &[("grpc-status", "0"), ("grpc-retry-pushback-ms", "250")]).pause, None);
        assert_eq!(pause(200, &[status, ("grpc-retry-pushback-ms", "-1")]).pause, None);
        assert_eq!(pause(200, &[status, ("grpc-status-details-bin", "CAgaPAo")]).pause, None);
    }

    /// Random bytes and random mixtures of the tokens of all dialects.
    #[test]
    fn nonsense_never_panics() {
        const TOKENS: [&str; 24] = [
            "0",
            "1",
            "9",
            ".",
            "-",
            "+",
            ":",
            "T",
            "Z",
            "s",
            "ms",
            "h",
            "\"a\"",
            ";r=0",
            ";t=",
            ", ",
            "remaining=",
            "reset=",
            "2025-01-01T00:00:00",
            "Sun, 06 Nov 1994",
            " GMT",
            "99999999999999999999",
            "%",
            "CAgaPAo",
        ];
        const NAMES: [&str; 8] = [
            "retry-after",
            "retry-after-ms",
            "ratelimit",
            "x-ratelimit-remaining",
            "x-ratelimit-reset",
            "date",
            "grpc-status-details-bin",
            "grpc-retry-pushback-ms",
        ];
        let mut state = 88_172_645_463_325_252_u64;
        let mut below = |limit: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % limit as u64).unwrap()
        };
        let mut pauses = 0;
        for _ in 0..50_000 {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            response.headers_mut().insert("grpc-status", http::HeaderValue::from_static("8"));
            for name in NAMES {
                let text: Vec<u8> = if below(4) == 0 {
                    (0..below(20)).map(|_| u8::try_from(below(256)).unwrap()).collect()
                } else {
                    (0..below(6)).flat_map(|_| TOKENS[below(TOKENS.len())].bytes()).collect()
                };
                if let Ok(value) = http::HeaderValue::from_bytes(&text) {
                    response.headers_mut().insert(name, value);
                }
            }
            pauses += usize::from(Advice::of(&response, SystemTime::now()).pause.is_some());
        }
        assert!(pauses > 1_000, "some of them are readable: {pauses}");
    }
}
