use std::borrow::Cow;
use std::ops::Deref;

use crate::decision::Decision;
use crate::policy::Policy;

/// The refusal of a request: the decision, and the policy that refused. Contained in
/// [`RejectReason::Limit`](crate::RejectReason::Limit).
///
/// Dereferences to the [`Decision`].
///
/// ```
/// use http::Response;
/// use tower_ratelimit::extract::Head;
/// use tower_ratelimit::{Global, Policy, RateLimitLayer, RejectReason};
///
/// let policy = "10/second; 1000/day".parse::<Policy>()?.with_name("free");
/// let layer = RateLimitLayer::new(policy, Global).rejection(|refused: RejectReason<'_>, _: &Head<'_>| {
///     let text = match refused {
///         // "limit free-2 is exceeded, at most 1000"
///         RejectReason::Limit(refusal) => {
///             let names: Vec<_> = refusal.violated().collect();
///             format!("limit {} is exceeded, at most {}", names.join(", "), refusal.shown().capacity())
///         }
///         _ => "try again later".to_owned(),
///     };
///     let mut response = Response::new(text);
///     *response.status_mut() = refused.status();
///     response
/// });
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LimitExceeded<'a> {
    decision: &'a Decision,
    policy: &'a Policy,
}

impl<'a> LimitExceeded<'a> {
    pub(crate) fn new(decision: &'a Decision, policy: &'a Policy) -> Self {
        Self { decision, policy }
    }

    /// Returns the decision, which contains the status of each limit.
    pub fn decision(self) -> &'a Decision {
        self.decision
    }

    /// Returns the policy that refused.
    pub fn policy(self) -> &'a Policy {
        self.policy
    }

    /// Returns the names of the limits that refuse, in the order of the policy. See
    /// [`Policy::limit_name`].
    ///
    /// If the storage could not decide, because it was [full](Decision::is_storage_full) or
    /// [contended](Decision::is_contended), all limits refuse.
    pub fn violated(self) -> impl Iterator<Item = Cow<'a, str>> {
        self.refusing().map(move |position| self.policy.limit_name(position))
    }

    /// Returns the positions of the limits that refuse, in the order of the policy.
    pub(super) fn refusing(self) -> impl Iterator<Item = usize> {
        // A custom storage may return more statuses than the policy has limits.
        let statuses = self.policy.limits().iter().zip(self.decision.limits()).enumerate();
        statuses.filter(|(_, (_, status))| !status.is_admitted()).map(|(position, _)| position)
    }
}

impl Deref for LimitExceeded<'_> {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        self.decision
    }
}
