//! `RateLimit-Policy` and `RateLimit`: lists with a member for each limit, as defined by
//! [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).

use std::fmt::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::numbers::set;
use super::structured::{Padding, is_list_of_strings};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Limit;
use crate::storage::StorageRequest;
use crate::strategy::Status;
use crate::time::seconds_up;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const LIMITS: HeaderName = HeaderName::from_static("ratelimit");

/// The two fields of one layer.
pub(super) struct IetfFields {
    policy: HeaderValue,
    limits: HeaderValue,
}

impl IetfFields {
    /// Creates the fields, with a member for each limit of each request whose units count. Members
    /// have the parameter `pk` if a secret is set.
    pub(super) fn of(decisions: &[Decision], requests: &[StorageRequest<'_>], partition: Option<Secret>) -> Self {
        let (mut policies, mut limits) = (String::new(), String::new());
        for (decision, StorageRequest { policy, key, .. }) in decisions.iter().zip(requests) {
            let partition = partition.map_or_else(String::new, |secret| secret.parameter(key));
            let statuses = policy.limits().iter().zip(decision.statuses()).enumerate();
            for (position, (limit, status)) in statuses.filter(|(_, (_, status))| status.is_counted()) {
                if !policies.is_empty() {
                    policies.push_str(", ");
                    limits.push_str(", ");
                }
                let name = policy.quoted_name(position);
                let (capacity, remaining, reset) =
                    (status.capacity(), status.remaining(), seconds_up(status.reset_after()));
                // A slot becomes free when a request ends, so neither a window nor a reset is known.
                let is_in_flight = limit.counts_in_flight();
                let written =
                    write!(policies, "{name};q={capacity}").and_then(|()| match window(limit, status, decision) {
                        _ if is_in_flight => policies.write_str(";qu=\"concurrent-requests\""),
                        Some(window) => write!(policies, ";w={window}"),
                        None => Ok(()),
                    });
                let written = written.and_then(|()| write!(limits, "{name};r={remaining}"));
                let written = written.and_then(|()| if is_in_flight { Ok(()) } else { write!(limits, ";t={reset}") });
                policies.push_str(&partition);
                limits.push_str(&partition);
                written.expect("writing to a string does not fail");
            }
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

/// Returns the time in which the capacity refills, in whole seconds, rounded up. For a calendar
/// window, it is the duration of this very window.
///
/// A fallback decides by a divided limit, whose quota is not known here. The period stays the same,
/// so the time is known only if the capacity is the amount, as for all windows. Otherwise returns
/// `None`.
fn window(limit: &Limit, status: &Status, decision: &Decision) -> Option<u64> {
    let is_known = !decision.is_from_fallback() || limit.capacity() == limit.quota().amount();
    is_known.then(|| limit.window_secs(status, decision.at()))
}

/// Appends to the field in one line, because common clients read one line only: `Header.Get` of Go
/// and `HeaderMap::get` of `http` the first, `HttpURLConnection.getHeaderField` of Java the last.
/// Drops existing lines that are not valid lists, because one invalid member invalidates the whole
/// field.
fn append(headers: &mut HeaderMap, name: HeaderName, members: HeaderValue) {
    let before = headers
        .get_all(&name)
        .iter()
        .map(HeaderValue::as_bytes)
        .filter(|line| is_list_of_strings(line, Padding::Required, |_, _, _| ()));
    let lines: Vec<&[u8]> = before.chain([members.as_bytes()]).collect();
    let line = if lines.len() > 1 { HeaderValue::from_bytes(&lines.join(&b", "[..])).ok() } else { None };
    set(headers, name, line.unwrap_or(members));
}

/// The secret of `Headers::partition_key`.
#[cfg(feature = "partition-key")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Secret(pub(super) [u8; 16]);

/// An uninhabited type, because no secret can be set without the feature.
#[cfg(not(feature = "partition-key"))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Secret {}

impl Secret {
    /// Returns the parameter for `key`, starting with a semicolon. Its value is a pseudo-random
    /// function of the key. It is the same on every machine and cannot be computed without the
    /// secret.
    #[cfg(feature = "partition-key")]
    pub(super) fn parameter(self, key: &Key) -> String {
        use std::hash::Hasher;

        use base64::Engine;
        use base64::engine::general_purpose::STANDARD;
        use siphasher::sip128::{Hasher128, SipHasher24};

        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(key.as_bytes());
        format!(";pk=:{}:", STANDARD.encode(hasher.finish128().as_bytes()))
    }

    #[cfg(not(feature = "partition-key"))]
    pub(super) fn parameter(self, _key: &Key) -> String {
        match self {}
    }
}
