//! `RateLimit-Policy` and `RateLimit`: lists with a member for each limit, as defined by
//! [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).

use std::fmt::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::partition::Secret;
use super::set;
use super::structured::is_list_of_strings;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Limit, Policy};
use crate::time::seconds_up;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LIMITS: HeaderName = HeaderName::from_static("ratelimit");

/// The two fields of one layer.
pub(super) struct IetfFields {
    policy: HeaderValue,
    limits: HeaderValue,
}

impl IetfFields {
    /// Creates the fields, with a member for each limit. Members have the parameter `pk` if a
    /// secret is set.
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
            let written = match window(limit, decision.is_from_fallback()) {
                Some(window) => write!(policies, "{name};q={capacity};w={window}{partition}"),
                None => write!(policies, "{name};q={capacity}{partition}"),
            };
            written
                .and_then(|()| write!(limits, "{name};r={remaining};t={reset}{partition}"))
                .expect("writing to a string does not fail");
        }
        let value = |text: String| HeaderValue::try_from(text).expect("names are validated when they are set");
        Self { policy: value(policies), limits: value(limits) }
    }

    /// Appends the members to those of inner layers.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        append(headers, POLICY, self.policy);
        append(headers, LIMITS, self.limits);
    }
}

/// Returns the time in which the capacity refills, in whole seconds, rounded up.
///
/// A fallback decides by a divided limit, whose quota is not known here. The period stays the same,
/// so the time is known only if the capacity is the amount, as for all windows. Otherwise returns
/// `None`.
fn window(limit: &Limit, is_divided: bool) -> Option<u64> {
    let is_known = !is_divided || limit.capacity() == limit.quota().amount();
    is_known.then(|| limit.window_secs())
}

/// Appends to the field in one line, because not every client reads a second one. Drops existing
/// lines that are not valid lists, because one invalid member invalidates the whole field.
fn append(headers: &mut HeaderMap, name: HeaderName, members: HeaderValue) {
    let before = headers.get_all(&name).iter().map(HeaderValue::as_bytes).filter(|line| is_list_of_strings(line));
    let lines: Vec<&[u8]> = before.chain([members.as_bytes()]).collect();
    let line = if lines.len() > 1 { HeaderValue::from_bytes(&lines.join(&b", "[..])).ok() } else { None };
    set(headers, name, line.unwrap_or(members));
}
