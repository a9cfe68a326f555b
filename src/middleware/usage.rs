//! The usage of a request's client.

use std::borrow::Cow;

use http::Request;

use super::state::LayerState;
use crate::client_usage::{Usage, UsageError};
use crate::extract::{Head, KeyError};
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::{Storage, StorageRequest};

/// The policy and the key of a limited client.
type Limited = (Policy, Key);

impl<R> LayerState<R> {
    /// Returns the usage of the request's client, or `None` if the client is not limited. Spends
    /// nothing.
    pub(crate) fn usage<B>(
        &self,
        request: &Request<B>,
    ) -> impl Future<Output = Result<Option<Usage>, UsageError>> + Send + use<R, B> {
        let storage = self.storage.clone();
        let limited = self.limited(&Head::of(request));
        async move {
            let Some((policy, key)) = limited.await? else { return Ok(None) };
            let decided = storage.decide(StorageRequest::new(&policy, &key, Op::Peek, 1)).await;
            let decision = decided.map_err(|error| UsageError::Storage(error.into()))?;
            Ok(Some(Usage::new(policy, decision)))
        }
    }

    /// Returns the policy and the key of the request, or `None` if it is not limited.
    fn limited(&self, head: &Head<'_>) -> impl Future<Output = Result<Option<Limited>, UsageError>> + Send + use<R> {
        let config = &self.config;
        let key = config.key.extract(head);
        let is_skipped = config.skips(head);
        #[cfg(feature = "lookup")]
        let found = config.policies.lookup().filter(|_| !is_skipped).map(|lookup| lookup.find(head));
        let policy = if is_skipped { None } else { config.policies.of(head).map(Cow::into_owned) };
        async move {
            #[cfg(feature = "lookup")]
            if let Some(found) = found {
                return super::lookup::limited(found, key).await;
            }
            with_key(policy, key)
        }
    }
}

fn with_key(policy: Option<Policy>, key: Result<Option<Key>, KeyError>) -> Result<Option<Limited>, UsageError> {
    let Some(policy) = policy else { return Ok(None) };
    Ok(key.map_err(UsageError::Key)?.map(|key| (policy, key)))
}
