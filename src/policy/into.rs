//! Conversions into policies.

use super::shared::SharedPolicy;
use super::{Limit, Policy};
use crate::quota::Quota;

/// A value that converts into a [`Policy`]: a `Policy`, a [`Quota`], a [`Limit`], or a
/// [`LivePolicy`](crate::LivePolicy).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy",
    label = "expected a `Policy`, a `Quota`, a `Limit` or a `LivePolicy`",
    note = "parse a text: `\"10/second\".parse::<Policy>()?`"
)]
pub trait IntoPolicy {
    /// Converts into a policy. A [`LivePolicy`](crate::LivePolicy) converts into its current
    /// policy.
    fn into_policy(self) -> Policy;

    /// Converts into a policy that may change later.
    #[doc(hidden)]
    fn into_shared(self) -> SharedPolicy
    where
        Self: Sized,
    {
        SharedPolicy::fixed(self.into_policy())
    }
}

impl IntoPolicy for Policy {
    fn into_policy(self) -> Policy {
        self
    }
}

impl IntoPolicy for Quota {
    fn into_policy(self) -> Policy {
        self.into()
    }
}

impl IntoPolicy for Limit {
    fn into_policy(self) -> Policy {
        self.into()
    }
}
