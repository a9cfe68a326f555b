//! The policies that apply to a request, each with the key of its member.

use super::config::{LayerConfig, LayerMember};
use super::exchange::RequestHead;
use crate::extract::{Head, KeyError};
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{AllLookups, LookupError, LookupResult, TenantLookup, TenantPolicy};
use crate::policy::{Op, Policy, SharedPolicy};
use crate::storage::StorageRequest;
#[cfg(feature = "lookup")]
use crate::sync::join_all;

/// A policy that applies to the request, and its key.
pub(crate) struct Applying<'a> {
    pub(crate) policy: Policy,
    key: Key,
    pub(super) member: &'a LayerMember,
}

impl Applying<'_> {
    pub(super) fn cost(&self, head: &Head<'_>) -> Result<u32, KeyError> {
        self.member.cost.as_ref().map_or(Ok(1), |cost| cost(head))
    }

    /// Returns a hit of this cost. A request that costs nothing peeks, so that its header fields report
    /// the state of the limits.
    pub(super) fn request(&self, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, if cost == 0 { Op::Peek } else { Op::Hit }, cost)
    }

    /// Returns the policy and the key of hits that the request makes later.
    pub(super) fn of_later_hits(&self) -> (SharedPolicy, Key) {
        (self.member.policy_of_later_hits(&self.policy), self.key.clone())
    }

    /// Returns a peek at one unit.
    pub(crate) fn peek(&self) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, Op::Peek, 1)
    }
}

/// The reason for which a request cannot be decided.
pub(crate) enum Undecided {
    /// The request has no key for this policy.
    Key(KeyError, Policy),
    /// The lookup has returned this error for the request.
    #[cfg(feature = "lookup")]
    Rejected(KeyError),
    #[cfg(feature = "lookup")]
    Lookup(LookupError),
}

/// The policy of a member, and its key if the lookup has returned one. `None` if the member does not
/// apply.
type Chosen = Option<(Policy, Option<Key>)>;

/// Returns the policies that apply to the request.
#[cfg(not(feature = "lookup"))]
pub(crate) fn applying<'a>(
    config: &'a LayerConfig,
    request: &mut (impl RequestHead + ?Sized),
) -> Result<Vec<Applying<'a>>, Undecided> {
    collect(config, request, |member, request| Ok(chosen(member, &request.head())))
}

/// Returns the policies that apply to the request. `found` has a result for each lookup.
#[cfg(feature = "lookup")]
pub(crate) fn applying<'a>(
    config: &'a LayerConfig,
    found: &[LookupResult],
    request: &mut (impl RequestHead + ?Sized),
) -> Result<Vec<Applying<'a>>, Undecided> {
    let mut found = found.iter();
    collect(config, request, |member, request| {
        if member.policies.lookup().is_none() {
            return Ok(chosen(member, &request.head()));
        }
        let tenant = match found.next().expect("a result for each lookup") {
            Ok(tenant) => tenant,
            Err(error) => return Err(Undecided::Lookup(error.clone())),
        };
        // The extractors may read them.
        request.extensions_mut().extend(tenant.extensions.clone());
        match &tenant.policy {
            TenantPolicy::Limited(policy, key) => Ok(Some((policy.read().into_owned(), key.clone()))),
            TenantPolicy::Unlimited => Ok(None),
            TenantPolicy::Rejected(error) => Err(Undecided::Rejected(error.clone())),
        }
    })
}

fn chosen(member: &LayerMember, head: &Head<'_>) -> Chosen {
    Some((member.policies.of(head)?.into_owned(), None))
}

fn collect<'a, Q: RequestHead + ?Sized>(
    config: &'a LayerConfig,
    request: &mut Q,
    mut choose: impl FnMut(&LayerMember, &mut Q) -> Result<Chosen, Undecided>,
) -> Result<Vec<Applying<'a>>, Undecided> {
    let mut applying = Vec::with_capacity(1 + config.others.len());
    for member in config.members() {
        let Some((policy, key)) = choose(member, request)? else { continue };
        match key.map_or_else(|| member.key.extract(&request.head()), |key| Ok(Some(key))) {
            Ok(Some(key)) => applying.push(Applying { policy, key, member }),
            Ok(None) => {}
            Err(missing) => return Err(Undecided::Key(missing, policy)),
        }
    }
    place(config, &mut applying, &request.head())?;
    Ok(applying)
}

/// Replaces the keys, except for those of extractors for all clients, by keys within the outer key
/// of the request. An extractor that returns the key of all clients for some requests only has its
/// key replaced.
fn place(config: &LayerConfig, applying: &mut [Applying<'_>], head: &Head<'_>) -> Result<(), Undecided> {
    let (Some(extractor), [first, ..]) = (&config.outer_key, &*applying) else { return Ok(()) };
    let outer = match extractor.extract(head) {
        // A Redis Cluster decides on no keys without an outer one.
        Ok(outer) => outer.unwrap_or_else(Key::global),
        Err(missing) => return Err(Undecided::Key(missing, first.policy.clone())),
    };
    // A looked-up tenant can have a key of its own.
    let is_for_all = |member: &Applying<'_>| member.member.key.is_global() && member.key.is_global();
    for member in applying.iter_mut().filter(|member| !is_for_all(member)) {
        member.key = member.key.within(&outer);
    }
    Ok(())
}

/// The lookups of all policies of a request.
#[cfg(feature = "lookup")]
pub(crate) enum AllTenants {
    Ready(Vec<LookupResult>),
    Pending(AllLookups),
}

/// Begins the lookups of all policies at once.
#[cfg(feature = "lookup")]
pub(crate) fn look_up(config: &LayerConfig, head: &Head<'_>) -> AllTenants {
    let lookups = config.members().filter_map(|member| member.policies.lookup());
    let lookups: Vec<_> = lookups.map(|tenants| tenants.find(head)).collect();
    let ready =
        |lookup: &TenantLookup| if let TenantLookup::Ready(found) = lookup { Some(found.clone()) } else { None };
    if let Some(found) = lookups.iter().map(ready).collect() {
        return AllTenants::Ready(found);
    }
    let future = |lookup| match lookup {
        TenantLookup::Ready(found) => Box::pin(std::future::ready(found)),
        TenantLookup::Pending(lookup) => lookup,
    };
    AllTenants::Pending(Box::pin(join_all(lookups.into_iter().map(future).collect())))
}
