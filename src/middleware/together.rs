//! Checks that a storage decides on all policies of a layer together.

use crate::error::ConfigError;
use crate::policy::{Policy, PolicyChanges, SharedPolicy};
use crate::storage::{AnyStorage, Storage};

/// The policies of a layer with several keys, and its storage.
#[derive(Debug)]
pub(super) struct Together {
    storage: AnyStorage,
    members: Vec<MemberPolicy>,
    has_outer_key: bool,
}

#[derive(Debug)]
pub(super) struct MemberPolicy {
    /// The fixed or live policy, or `None` if it depends on the request.
    policy: Option<SharedPolicy>,
    /// `true` if the key is that of all clients.
    is_global: bool,
}

impl MemberPolicy {
    /// Does not keep the registration of a live policy, which belongs to its layer.
    pub(super) fn new(policy: Option<&SharedPolicy>, is_global: bool) -> Self {
        Self { policy: policy.map(SharedPolicy::unregistered), is_global }
    }
}

impl Together {
    pub(super) fn new(storage: AnyStorage, members: Vec<MemberPolicy>, has_outer_key: bool) -> Self {
        Self { storage, members, has_outer_key }
    }

    /// Checks the policies as they are after `changes`. Those that depend on the request are not
    /// known, and are left out.
    pub(super) fn check(&self, changes: &PolicyChanges<'_>) -> Result<(), ConfigError> {
        let after = |member: &MemberPolicy| member.policy.as_ref().map(|policy| policy.after(changes));
        let policies: Vec<_> = self.members.iter().map(after).collect();
        let known: Vec<Policy> = policies.iter().flatten().cloned().collect();
        self.storage.validate_members(&known)?;
        self.check_outer_key(&policies)?;
        check_distinct(&known)
    }

    /// Returns an error if the storage decides only on keys within one key, and some of them are
    /// not.
    fn check_outer_key(&self, policies: &[Option<Policy>]) -> Result<(), ConfigError> {
        const INSTEAD: &str = "wrap the storage as `InOrder::new(storage)`, which decides on one key after the other";
        let needs =
            |policy: &Option<Policy>| self.storage.needs_outer_key(policy.as_ref().and_then(|policy| policy.name()));
        let together =
            || self.members.iter().zip(policies).filter(|(_, policy)| needs(policy)).map(|(member, _)| member);
        if together().count() > 1 && !self.has_outer_key {
            return Err(ConfigError::new(format!(
                "a Redis Cluster keeps the keys of a request on several servers: before `and` and `storage`, call \
                 `within` with the key that the others belong to, for example that of the tenant, or {INSTEAD}"
            )));
        }
        if together().count() > 1 && together().any(|member| member.is_global) {
            return Err(ConfigError::new(format!(
                "the key of all clients is not within another one, and a Redis Cluster keeps it on another server than \
                 the other keys of a request: lease its policy alone, as in \
                 `Leases::new(storage, 100).only(\"all\")`, or {INSTEAD}"
            )));
        }
        Ok(())
    }
}

/// Returns an error if two policies have the same identity. If their keys were equal for a request, they
/// would share their states.
fn check_distinct(policies: &[Policy]) -> Result<(), ConfigError> {
    let is_twice = |at: &usize| policies[..*at].iter().any(|before| before.identity() == policies[*at].identity());
    match (1..policies.len()).find(is_twice) {
        None => Ok(()),
        Some(at) => Err(ConfigError::new(format!(
            "two policies of the layer are {:?}: give each of them its own name, for example \"tenant\"",
            policies[at].identity()
        ))),
    }
}
