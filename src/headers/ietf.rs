//! `RateLimit-Policy` and `RateLimit`: lists with a member for each limit, as
//! [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11)
//! has them.

use std::fmt::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::partition::Secret;
use super::set;
use super::structured::is_list_of_strings;
use crate::time::seconds_up;
use crate::{Decision, Key, Limit, Policy};

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LIMITS: HeaderName = HeaderName::from_static("ratelimit");

/// The two lists of one layer.
pub(super) struct Lists {
    policy: HeaderValue,
    limits: HeaderValue,
}

impl Lists {
    /// Writes a member for each limit. Members have the parameter `pk` if there is a secret for it.
    pub(super) fn of(decision: &Decision, policy: &Policy, key: &Key, partition: Option<Secret>) -> Self {
        let partition = partition.map_or_else(String::new, |secret| secret.parameter(key));
        let (mut policies, mut limits) = (String::new(), String::new());
        for (position, (limit, status)) in policy.limits().iter().zip(decision.limits()).enumerate() {
            if position > 0 {
                policies.push_str(", ");
                limits.push_str(", ");
            }
            let name = policy.quoted_name(position);
            let (capacity, remaining, reset) =
                (status.capacity(), status.remaining(), seconds_up(status.reset_after()));
            let told = match window(limit, decision.is_from_fallback()) {
                Some(window) => write!(policies, "{name};q={capacity};w={window}{partition}"),
                None => write!(policies, "{name};q={capacity}{partition}"),
            };
            told.and_then(|()| write!(limits, "{name};r={remaining};t={reset}{partition}"))
                .expect("writing to a string does not fail");
        }
        let value = |text: String| HeaderValue::try_from(text).expect("names were checked when they were given");
        Self { policy: value(policies), limits: value(limits) }
    }

    /// Adds the members to what inner layers have said of theirs.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        append(headers, POLICY, self.policy);
        append(headers, LIMITS, self.limits);
    }
}

/// In how many seconds the capacity comes back. What a fallback has decided is about a share, of which the capacity is all that is
/// known here; where that is the amount, as of all windows, the period tells.
fn window(limit: &Limit, is_share: bool) -> Option<u64> {
    let is_known = !is_share || limit.capacity() == limit.quota().amount();
    is_known.then(|| limit.window_secs())
}

/// Writes one line, because not every client reads a second one. What is there already is dropped
/// unless it is such a list, because one malformed member spoils the whole field.
fn append(headers: &mut HeaderMap, name: HeaderName, members: HeaderValue) {
    let before = headers.get_all(&name).iter().map(HeaderValue::as_bytes).filter(|line| is_list_of_strings(line));
    let lines: Vec<&[u8]> = before.chain([members.as_bytes()]).collect();
    let line = if lines.len() > 1 { HeaderValue::from_bytes(&lines.join(&b", "[..])).ok() } else { None };
    set(headers, name, line.unwrap_or(members));
}
