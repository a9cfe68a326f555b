//! Admission of a request whose policy is looked up.

use std::sync::LazyLock;

use http::Request;

use super::admission::{Action, Hold, ResponsePlan};
use super::config::OnError;
use super::state::LayerState;
use crate::client_usage::UsageError;
use crate::extract::{Head, KeyError};
use crate::key::Key;
use crate::lookup::{Found, LookupResult, Outcome, Tenant};
use crate::observe::EventKind;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::rejection::Rejection;

/// The placeholder policy in events about requests whose policy is unknown.
static UNKNOWN: LazyLock<Policy> = LazyLock::new(|| Policy::from(Quota::per_second(1)).with_name("unknown"));

impl<R> LayerState<R> {
    #[inline(never)]
    pub(super) fn admit_by_lookup<B, ResBody>(&self, found: Found, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match found {
            Found::Tenant(tenant) => self.admit_tenant(&tenant, request),
            Found::Unlimited => Action::Forward(ResponsePlan::NOTHING),
            Found::Missing(missing) => self.reject_without_key(&missing, &UNKNOWN, &Head::of(request)),
            Found::Pending(finding) => Action::Wait(Hold::Lookup(finding)),
            Found::Failed(error) => self.admit_found(Err(error), request),
        }
    }

    /// Decides a request after its look-up.
    pub(crate) fn admit_found<B, ResBody>(&self, found: LookupResult, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match found {
            Ok(tenant) => self.admit_tenant(&tenant, request),
            Err(error) => {
                let admitted = self.config.on_error == OnError::Admit || self.config.shadow;
                self.report(EventKind::Failed { error: &error, admitted }, &UNKNOWN, None);
                if admitted {
                    return Action::Forward(ResponsePlan::NOTHING);
                }
                Action::Respond(self.unavailable(&Head::of(request)))
            }
        }
    }

    fn admit_tenant<B, ResBody>(&self, tenant: &Tenant, request: &mut Request<B>) -> Action<ResBody>
    where
        R: Rejection<ResBody>,
    {
        match &tenant.0 {
            Outcome::Limited(policy, key) => self.admit_by_policy(&policy.read(), key.as_ref(), request),
            Outcome::Unlimited => Action::Forward(ResponsePlan::NOTHING),
            Outcome::Rejected(error) => self.reject_without_key(error, &UNKNOWN, &Head::of(request)),
        }
    }
}

/// Returns the policy and the key of a request, or `None` if it is not limited.
pub(super) async fn limited(
    found: Found,
    key: Result<Option<Key>, KeyError>,
) -> Result<Option<(Policy, Key)>, UsageError> {
    let tenant = match found {
        Found::Tenant(tenant) => tenant,
        Found::Unlimited => return Ok(None),
        Found::Missing(missing) => return Err(UsageError::Key(missing)),
        Found::Pending(finding) => finding.await.map_err(|error| UsageError::Storage(error.into()))?,
        Found::Failed(error) => return Err(UsageError::Storage(error.into())),
    };
    match &tenant.0 {
        Outcome::Limited(policy, Some(key)) => Ok(Some((policy.read().into_owned(), key.clone()))),
        Outcome::Limited(policy, None) => {
            Ok(key.map_err(UsageError::Key)?.map(|key| (policy.read().into_owned(), key)))
        }
        Outcome::Unlimited => Ok(None),
        Outcome::Rejected(error) => Err(UsageError::Key(error.clone())),
    }
}
