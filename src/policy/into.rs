use super::{Limit, Policy};
use crate::Quota;

/// Types that convert into a [`Policy`]: itself, a [`Quota`] and a [`Limit`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a policy",
    label = "expected a `Policy`, a `Quota` or a `Limit`",
    note = "parse a text: `\"10/second\".parse::<Policy>()?`"
)]
pub trait IntoPolicy {
    /// Converts into a policy.
    fn into_policy(self) -> Policy;
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
