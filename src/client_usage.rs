//! The usage of a client: its limits and the units that remain.

use std::fmt::{self, Write};
use std::time::Duration;

use crate::decision::Decision;
use crate::error::BoxError;
use crate::extract::KeyError;
use crate::policy::Policy;
use crate::text::write_json_string;

/// The limits of a client, and the remaining units of each limit. Returned by
/// [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Clone, Debug)]
pub struct Usage {
    policy: Policy,
    decision: Decision,
}

impl Usage {
    pub(crate) fn new(policy: Policy, decision: Decision) -> Self {
        Self { policy, decision }
    }

    /// Returns the policy that applies to the client.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the decision on a peek with a cost of 1, which contains the [status of each
    /// limit](Decision::limits).
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Returns the usage as JSON. The [guide](crate::guide::deploying#usage) explains the members.
    pub fn to_json(&self) -> String {
        to_json(&self.policy, &self.decision)
    }
}

/// The error of [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Debug)]
#[non_exhaustive]
pub enum UsageError {
    /// The key extractor or the lookup of the policy returned this error.
    Key(KeyError),
    /// The storage or the lookup of the policy failed.
    Storage(BoxError),
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key(_) => "the request has no rate limit key",
            Self::Storage(_) => "cannot read the usage",
        })
    }
}

impl std::error::Error for UsageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match self {
            Self::Key(error) => error,
            Self::Storage(error) => &**error,
        })
    }
}

fn to_json(policy: &Policy, decision: &Decision) -> String {
    let mut json = String::with_capacity(64 + 128 * policy.limits().len());
    write_json(policy, decision, &mut json).expect("writing to a string does not fail");
    json
}

fn write_json(policy: &Policy, decision: &Decision, json: &mut String) -> fmt::Result {
    write!(json, r#"{{"limited":true,"admitted":{}"#, decision.is_admitted())?;
    if let Some(wait) = decision.retry_after() {
        write!(json, r#","retry_after":{}"#, Seconds(wait))?;
    }
    json.push_str(r#","limits":["#);
    for (position, (limit, status)) in policy.limits().iter().zip(decision.limits()).enumerate() {
        let comma = if position == 0 { "" } else { "," };
        // `quoted_name` returns a Structured Field string: printable ASCII, in which only `"` and
        // `\` are escaped. So it is also a valid JSON string.
        write!(json, r#"{comma}{{"name":{},"strategy":"#, policy.quoted_name(position))?;
        write_json_string(limit.strategy().name(), json)?;
        write!(
            json,
            r#","quota":"{}","limit":{},"remaining":{},"reset":{}}}"#,
            limit.quota(),
            status.capacity(),
            status.remaining(),
            Seconds(status.reset_after())
        )?;
    }
    json.push_str("]}");
    Ok(())
}

/// Seconds with up to six decimals.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_micros() {
            0 => write!(f, "{}", self.0.as_secs()),
            micros => f.write_str(format!("{}.{micros:06}", self.0.as_secs()).trim_end_matches('0')),
        }
    }
}
