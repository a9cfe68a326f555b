//! The usage of a request's client.

use std::borrow::Cow;
#[cfg(feature = "lookup")]
use std::sync::Arc;

#[cfg(feature = "lookup")]
use http::Request;

use super::config::LayerConfig;
use super::state::LayerState;
use crate::client_usage::{Usage, UsageError};
#[cfg(feature = "lookup")]
use crate::extract::KeyExtractor;
use crate::extract::{Head, KeyError};
use crate::key::Key;
#[cfg(feature = "lookup")]
use crate::lookup::{TenantLookup, TenantPolicy};
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
    let is_skipped = config.skips(head);
    #[cfg(feature = "lookup")]
    let looking_up = config.policies.lookup().filter(|_| !is_skipped).map(|lookup| {
        // The tenant's extensions are inserted into a copy, because the extractor may read them.
        looked_up(lookup.find(head), Arc::clone(&config.key), head.to_request())
    });
    let policy = if is_skipped { None } else { config.policies.of(head).map(Cow::into_owned) };
    let limited = policy.map(|policy| with_key(policy, config.key.extract(head)));
    async move {
        #[cfg(feature = "lookup")]
        if let Some(looking_up) = looking_up {
            return looking_up.await;
        }
        limited.unwrap_or(Ok(None))
    }
}

fn with_key(policy: Policy, key: Result<Option<Key>, KeyError>) -> Result<Option<Limited>, UsageError> {
    Ok(key.map_err(UsageError::Key)?.map(|key| (policy, key)))
}

/// Returns the policy and the key of a request after its lookup.
#[cfg(feature = "lookup")]
async fn looked_up(
    found: TenantLookup,
    extractor: Arc<dyn KeyExtractor>,
    mut request: Request<()>,
) -> Result<Option<Limited>, UsageError> {
    let found = match found {
        TenantLookup::Ready(found) => found,
        TenantLookup::Pending(lookup) => lookup.await,
    };
    let tenant = found.map_err(|error| UsageError::Storage(error.into()))?;
    request.extensions_mut().extend(tenant.extensions.clone());
    match &tenant.policy {
        TenantPolicy::Limited(policy, Some(key)) => Ok(Some((policy.read().into_owned(), key.clone()))),
        TenantPolicy::Limited(policy, None) => {
            with_key(policy.read().into_owned(), extractor.extract(&Head::of(&request)))
        }
        TenantPolicy::Unlimited => Ok(None),
        TenantPolicy::Rejected(error) => Err(UsageError::Key(error.clone())),
    }
}
