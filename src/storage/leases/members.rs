//! Several keys, of which one policy is leased: its units are taken first, and then the storage
//! decides on the other keys together.

use std::any::Any;

use tokio::runtime::Handle;

use super::Leases;
use super::lease::with_unspent;
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::policy::Op;
use crate::storage::contract::OwnedRequest;
use crate::storage::in_order::log_kept_units;
use crate::storage::runtime::runtime_with_time;
use crate::storage::{AnyStorage, RefusalCache, Storage, StorageError, StorageFuture, StorageRequest, layers};

/// Decides on the members of a request.
pub(super) fn decide_all(leases: &Leases, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
    let is_leased = |member: &StorageRequest<'_>| leases.0.settings.selects(member.policy);
    let position = members.iter().position(is_leased);
    let count = members.iter().filter(|member| is_leased(member)).count();
    match (position, members) {
        (None, _) => leases.0.inner.decide_all(members),
        (Some(_), &[only]) => leases.decide(only).map(|decided| Ok(vec![decided?])),
        (Some(position), _) if count == 1 => {
            let mut others: Vec<_> = members.iter().map(StorageRequest::owned).collect();
            let leased = others.remove(position);
            StorageFuture::new(decide_leased_first(leases.clone(), leased, others, position))
        }
        _ => StorageFuture::ready(Err(StorageError::unsupported_policy(leases_one_key()))),
    }
}

/// Returns the error of several keys whose policies would all be leased.
pub(super) fn leases_one_key() -> ConfigError {
    ConfigError::new(
        "leases decide on several keys only if they lease one of the policies: name the policy of the key that all \
         requests share, as in `Leases::new(storage, 100).only(\"all\")`",
    )
}

/// Takes the units of the leased member, and returns them if another member refuses.
async fn decide_leased_first(
    leases: Leases,
    leased: OwnedRequest,
    others: Vec<OwnedRequest>,
    position: usize,
) -> Result<Vec<Decision>, StorageError> {
    let taken = leases.decide(leased.borrow()).await?;
    let (is_hit, is_refused) = (leased.op == Op::Hit, leased.op == Op::Hit && taken.is_refused());
    let mut taken =
        Taken { leases: &leases, leased: &leased, hit: taken, is_decided: false, runtime: runtime_with_time() };
    // If the leased member refuses, the others spend nothing and report what remains.
    let mut requests: Vec<_> = others.iter().map(OwnedRequest::borrow).collect();
    for request in requests.iter_mut().filter(|_| is_refused) {
        request.op = Op::Peek;
    }
    // A cache refuses without a call of the server, so its refusals cause no call for the others.
    let decided = if is_refused && caches_refusals(&leases.0.inner) {
        Ok(undecided(&taken.hit, &others))
    } else {
        leases.0.inner.decide_all(&requests).await
    };
    taken.is_decided = true;
    let mut decisions = match decided {
        Ok(decisions) => decisions,
        // No failure turns the refusal into an error, because an error can admit the request.
        Err(_) if is_refused => undecided(&taken.hit, &others),
        Err(error) => {
            let returned = taken.give_back().await;
            return Err(if returned.is_ok() { error } else { error.with_may_have_counted(true) });
        }
    };
    let is_hit_refused = |(other, decision): (&OwnedRequest, &Decision)| other.op == Op::Hit && decision.is_refused();
    let is_kept = is_refused || !is_hit || !others.iter().zip(&decisions).any(is_hit_refused);
    if !is_kept && let Err(error) = taken.give_back().await {
        log_kept_units(&error);
    }
    decisions.insert(position, if is_kept { taken.hit.clone() } else { unspent(taken.hit.clone()) });
    Ok(decisions)
}

/// Returns `true` if a cache of refusals is around the server.
fn caches_refusals(storage: &AnyStorage) -> bool {
    layers(storage).any(|layer| {
        let layer: &dyn Any = layer;
        layer.is::<RefusalCache>()
    })
}

/// Returns decisions without limits, because the states of the members are not known.
fn undecided(refusal: &Decision, others: &[OwnedRequest]) -> Vec<Decision> {
    others.iter().map(|other| Decision::from_statuses(refusal.at(), other.cost, [].into_iter())).collect()
}

/// The decision on the leased member. If it is dropped before the others are decided, because the
/// caller has left, its units return. So a caller whom another member would refuse cannot use up
/// the lease.
struct Taken<'a> {
    leases: &'a Leases,
    leased: &'a OwnedRequest,
    hit: Decision,
    is_decided: bool,
    runtime: Option<Handle>,
}

impl Taken<'_> {
    /// Returns the units to the lease, or to the storage if they did not come from the lease.
    fn give_back(&self) -> StorageFuture<()> {
        self.leases.settle(&self.leased.policy, &self.leased.key, &self.hit, 0)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.is_decided || self.leased.op != Op::Hit {
            return;
        }
        let given_back = self.give_back();
        if given_back.as_ready().is_none()
            && let Some(runtime) = &self.runtime
        {
            runtime.spawn(given_back);
        }
    }
}

/// Returns the decision on a hit whose units were given back.
fn unspent(mut hit: Decision) -> Decision {
    let cost = if hit.has_spent() { hit.cost() } else { 0 };
    hit.statuses_mut().iter_mut().for_each(|status| *status = with_unspent(status, cost));
    hit
}
