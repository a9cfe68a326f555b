//! Makes a page of keys from the names that a storage has.
#![cfg_attr(
    not(any(feature = "etcd", feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "Redis does not order its names, and memcached cannot list them")
)]

use super::keys::{KeyPage, KeysRequest, is_in_use};
use super::names;
use super::{Storage, StorageError, StorageErrorKind, StorageRequest};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::sync::join_all;

/// The number of peeks that are in flight at once.
const AT_ONCE: usize = 16;

/// Peeks at the keys, and returns those that are in use. Leaves out those whose states have the format of
/// another version.
pub(super) async fn in_use(
    storage: &dyn Storage,
    policy: &Policy,
    keys: Vec<Key>,
) -> Result<Vec<(Key, Decision)>, StorageError> {
    let mut seen = Vec::with_capacity(keys.len());
    let mut keys = keys.into_iter();
    loop {
        let some: Vec<Key> = keys.by_ref().take(AT_ONCE).collect();
        if some.is_empty() {
            return Ok(seen);
        }
        let peek = |key| storage.decide(StorageRequest::new(policy, key, Op::Peek, 1));
        let peeks = join_all(some.iter().map(peek).collect()).await;
        for (key, peek) in some.into_iter().zip(peeks) {
            match peek {
                Err(error) if error.kind() == StorageErrorKind::Unsupported => {}
                peek => seen.extend(Some((key, peek?)).filter(|(_, peek)| is_in_use(peek))),
            }
        }
    }
}

/// The names of a page on a store that orders them.
#[derive(Clone, Debug)]
pub(super) struct NameRange {
    /// The first possible name.
    pub(super) first: String,
    /// The last name of the page before, or an empty text.
    pub(super) after: String,
    /// A text after all names.
    pub(super) end: String,
    /// The largest number of names.
    pub(super) limit: usize,
    /// The length of the part before the key.
    before_key: usize,
}

impl NameRange {
    /// Returns the range of a page. `prefix` is the one of the storage, with its `:`.
    pub(super) fn new(prefix: &str, request: &KeysRequest<'_>) -> Result<Self, StorageError> {
        request.check()?;
        let before = format!("{prefix}{}", names::of_policy(request.policy));
        let first = format!("{before}{}", request.prefix);
        let after = request.after.map_or_else(String::new, |after| format!("{before}{after}"));
        // Names are printable ASCII.
        let end = format!("{first}\u{7f}");
        Ok(Self { first, after, end, limit: request.limit(), before_key: before.len() })
    }

    /// Returns the page with the names that the store has found.
    pub(super) async fn page(
        &self,
        storage: &dyn Storage,
        policy: &Policy,
        found: &[String],
    ) -> Result<KeyPage, StorageError> {
        let text = |name: &String| name.get(self.before_key..).map(str::to_owned);
        let next = found.last().filter(|_| found.len() >= self.limit).and_then(text);
        let keys = found.iter().filter_map(|name| names::key(name.get(self.before_key..)?)).collect();
        Ok(KeyPage::new(in_use(storage, policy, keys).await?, next))
    }
}
