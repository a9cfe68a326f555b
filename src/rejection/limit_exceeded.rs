use std::borrow::Cow;
use std::ops::Deref;

use crate::{Decision, Policy};

/// A policy's no: the decision, and whose it is.
///
/// It is used like the [`Decision`] it leads to.
///
/// ```
/// use http::Response;
/// use tower_ratelimit::extract::Head;
/// use tower_ratelimit::{Global, Policy, RateLimitLayer, RejectReason};
///
/// let policy = "10/second; 1000/day".parse::<Policy>()?.with_name("free");
/// let layer = RateLimitLayer::new(policy, Global).rejection(|refused: RejectReason<'_>, _: &Head<'_>| {
///     let text = match refused {
///         // "free-2: 1000 at most"
///         RejectReason::Limit(refusal) => {
///             let names: Vec<_> = refusal.violated().collect();
///             format!("{}: {} at most", names.join(", "), refusal.shown().capacity())
///         }
///         _ => "not now".to_owned(),
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

    /// The decision, with each limit's numbers.
    pub fn decision(self) -> &'a Decision {
        self.decision
    }

    /// The policy that refused.
    pub fn policy(self) -> &'a Policy {
        self.policy
    }

    /// What the limits that refuse are called on the wire, in the policy's order: see [`Policy::limit_name`]. All of them,
    /// when the storage could not decide ([storage full](Decision::is_storage_full), [contended](Decision::is_contended)).
    pub fn violated(self) -> impl Iterator<Item = Cow<'a, str>> {
        self.refusing().map(move |position| self.policy.limit_name(position))
    }

    /// The positions of the limits that refuse.
    pub(super) fn refusing(self) -> impl Iterator<Item = usize> {
        // A storage that somebody else wrote may answer for more limits than there are.
        let answers = self.policy.limits().iter().zip(self.decision.limits()).enumerate();
        answers.filter(|(_, (_, status))| !status.is_admitted()).map(|(position, _)| position)
    }
}

impl Deref for LimitExceeded<'_> {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        self.decision
    }
}
