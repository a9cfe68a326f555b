//! The usage of a request's client.

use std::borrow::Cow;

use super::config::LayerConfig;
use super::state::LayerState;
use crate::client_usage::{Usage, UsageError};
use crate::extract::{Head, KeyError};
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{Found, Outcome};
use crate::policy::{Op, Policy};
use crate::storage::{Storage, StorageRequest};

/// The policy and the key of a limited client.
type Limited = (Policy, Key);

/// Returns the usage of the request's client, or `None` if the client is not limited. Spends
/// nothing.
pub(crate) fn usage(
    state: &LayerState,
    head: &Head<'_>,
) -> impl Future<Output = Result<Option<Usage>, UsageError>> + Send + use<> {
    let storage = state.storage.clone();
    let limited = limited(&state.config, head);
    async move {
        let Some((policy, key)) = limited.await? else { return Ok(None) };
        let decided = storage.decide(StorageRequest::new(&policy, &key, Op::Peek, 1)).await;
        let decision = decided.map_err(|error| UsageError::Storage(error.into()))?;
        Ok(Some(Usage::new(policy, decision)))
    }
}

/// Returns the policy and the key of the request, or `None` if it is not limited.
fn limited(
    config: &LayerConfig,
    head: &Head<'_>,
) -> impl Future<Output = Result<Option<Limited>, UsageError>> + Send + use<> {
    let key = config.key.extract(head);
    let is_skipped = config.skips(head);
    #[cfg(feature = "lookup")]
    let found = config.policies.lookup().filter(|_| !is_skipped).map(|lookup| lookup.find(head));
    let policy = if is_skipped { None } else { config.policies.of(head).map(Cow::into_owned) };
    async move {
        #[cfg(feature = "lookup")]
        if let Some(found) = found {
            return looked_up(found, key).await;
        }
        with_key(policy, key)
    }
}

fn with_key(policy: Option<Policy>, key: Result<Option<Key>, KeyError>) -> Result<Option<Limited>, UsageError> {
    let Some(policy) = policy else { return Ok(None) };
    Ok(key.map_err(UsageError::Key)?.map(|key| (policy, key)))
}

/// Returns the policy and the key of a request after its lookup.
#[cfg(feature = "lookup")]
async fn looked_up(found: Found, key: Result<Option<Key>, KeyError>) -> Result<Option<Limited>, UsageError> {
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
