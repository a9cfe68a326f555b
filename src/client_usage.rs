//! The usage of a client: its limits and the units that remain.

mod json;

use std::fmt;

use crate::decision::Decision;
use crate::error::BoxError;
use crate::extract::KeyError;
use crate::policy::Policy;

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
        json::of(&self.policy, &self.decision)
    }
}

/// The error of [`RateLimitLayer::usage`](crate::RateLimitLayer::usage).
#[derive(Debug)]
#[non_exhaustive]
pub enum UsageError {
    /// The key extractor or the look-up of the policy returned this error.
    Key(KeyError),
    /// The storage or the look-up of the policy failed.
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
