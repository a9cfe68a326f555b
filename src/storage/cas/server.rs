//! The shell of all compare-and-swap storages on servers.

use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::several::SeveralKeys;
use super::shared::{CasShared, TimeSource, store_deadline};
use super::skew::Skew;
use super::{Cas, CasStorage};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::Policy;
#[cfg(feature = "testing")]
use crate::storage::Clock;
use crate::storage::calls::measured;
use crate::storage::contract::{OwnedRequest, forward_storage};
use crate::storage::net::overloaded;
use crate::storage::url::CasOptions;
use crate::storage::{Claim, Granted, SlotStore, Storage, StorageError, StorageFuture, StorageRequest, names};

/// The largest number of log entries of a key, unless long logs are allowed. This many entries take
/// up to 19 kB.
const LONGEST_LOG: u32 = 1_000;

/// A [`CasStorage`] on servers.
pub(in crate::storage) trait ServerStore: CasStorage<Error = StorageError> {
    /// The label `storage` of the metrics.
    const LABEL: &'static str;

    /// Encodes the option `prefix`, which a `:` follows in each key. By default, the keys that begin
    /// with the result and `:` include no keys of other prefixes, so all of them can be deleted.
    fn encoded_prefix(prefix: &str) -> Arc<str> {
        names::prefix(prefix)
    }

    /// Returns the addresses of the servers, for errors.
    fn name(&self) -> String;

    /// Returns the store if it replaces the texts of several keys in one step. The default
    /// implementation returns `None`.
    fn several(&self) -> Option<Arc<dyn SeveralKeys<Self::Version>>> {
        None
    }

    /// Returns an error if too many calls are in flight. `busy_keys` is the number of keys with
    /// calls in progress.
    fn overload(&self, busy_keys: usize) -> Option<StorageError>;

    /// Returns `true` if a decision has to wait for the first connection, which has a timeout of its
    /// own. The default implementation returns `false`.
    fn is_new(&self) -> bool {
        false
    }

    /// Waits for the first connection, or for the error of the first attempt.
    fn first_connection(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Checks that the servers can read keys that begin with `prefix`. The default implementation loads
    /// one.
    fn ping(
        &self,
        prefix: &str,
        deadline: std::time::Instant,
    ) -> impl Future<Output = Result<(), StorageError>> + Send {
        async move { self.load(prefix, deadline).await.map(drop) }
    }

    /// Deletes all keys that begin with `prefix`, and returns their number.
    fn delete_all(
        &self,
        prefix: &str,
        deadline: std::time::Instant,
    ) -> impl Future<Output = Result<u64, StorageError>> + Send;
}

/// A [`Cas`] over servers: it fails at once while they are overloaded, and can delete all keys.
#[derive(Clone)]
pub(in crate::storage) struct ServerCas<S: CasStorage>(Cas<S>);

impl<S: ServerStore> ServerCas<S> {
    /// Creates the storage with the options of a URL.
    pub(in crate::storage) fn new(store: S, options: &CasOptions) -> Self {
        let &CasOptions { ref prefix, timeout, max_skew, long_logs } = options;
        let (several, name) = (store.several(), store.name().into());
        let shared = CasShared::new(store, several, name, TimeSource::Store, Skew::new(max_skew));
        Self(Cas {
            shared: Arc::new(shared),
            timeout,
            prefix: format!("{}:", S::encoded_prefix(prefix)).into(),
            label: S::LABEL,
            // Each hit loads and stores the whole log, so a long log dominates the cost of a server.
            longest_log: (!long_logs).then_some(LONGEST_LOG),
        })
    }

    pub(in crate::storage) fn store(&self) -> &S {
        self.0.store()
    }

    /// Replaces the store, and keeps the settings.
    #[cfg(any(feature = "etcd", feature = "postgres-rustls", all(feature = "memcached", feature = "testing")))]
    pub(in crate::storage) fn with_store(&self, store: S) -> Self {
        let several = store.several();
        Self(Cas { shared: Arc::new(self.0.shared.with_store(store, several)), ..self.0.clone() })
    }

    #[cfg(feature = "testing")]
    pub(in crate::storage) fn clock(self, clock: impl Clock) -> Self {
        Self(self.0.clock(clock))
    }

    /// Prints the storage with the name of its type.
    pub(in crate::storage) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = self.0.prefix.strip_suffix(':').unwrap_or_default();
        f.debug_struct(name)
            .field("store", self.store())
            .field("prefix", &prefix)
            .field("timeout", &self.0.timeout)
            .finish_non_exhaustive()
    }
}

impl<S: ServerStore> fmt::Debug for ServerCas<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A claim is not refused in advance while the servers are overloaded, unlike a decision. Each of its calls
/// is bounded like all others, a process makes one claim of a key at a time, and a claim that is late
/// would let other processes take slots that are in use.
impl<S: ServerStore> SlotStore for ServerCas<S> {
    fn claim(&self, policy: &Policy, key: &Key, claim: Claim) -> StorageFuture<Granted> {
        if !self.store().is_new() || Handle::try_current().is_err() {
            return self.0.claim(policy, key, claim);
        }
        let (storage, policy, key) = (self.clone(), policy.clone(), key.clone());
        StorageFuture::new(async move {
            storage.store().first_connection().await;
            storage.0.claim(&policy, &key, claim).await
        })
    }
}

impl<S: ServerStore> Storage for ServerCas<S> {
    forward_storage!(self => self.0; clear, settle, validate, validate_members);

    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if Handle::try_current().is_err() {
            return self.0.decide(request);
        }
        if let Some(error) = self.store().overload(self.0.shared.queues.len()) {
            return StorageFuture::new(measured(S::LABEL, overloaded(error, self.0.timeout)));
        }
        if !self.store().is_new() {
            return self.0.decide(request);
        }
        let (storage, request) = (self.clone(), request.owned());
        StorageFuture::new(async move {
            storage.store().first_connection().await;
            storage.0.decide(request.borrow()).await
        })
    }

    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if Handle::try_current().is_err() {
            return self.0.decide_all(members);
        }
        if let Some(error) = self.store().overload(self.0.shared.queues.len()) {
            return StorageFuture::new(measured(S::LABEL, overloaded(error, self.0.timeout)));
        }
        if !self.store().is_new() {
            return self.0.decide_all(members);
        }
        let (storage, members) = (self.clone(), members.iter().map(StorageRequest::owned).collect::<Vec<_>>());
        StorageFuture::new(async move {
            storage.store().first_connection().await;
            storage.0.decide_all(&members.iter().map(OwnedRequest::borrow).collect::<Vec<_>>()).await
        })
    }

    fn check(&self) -> StorageFuture<()> {
        let (shared, prefix, within) = (Arc::clone(&self.0.shared), Arc::clone(&self.0.prefix), self.0.timeout);
        StorageFuture::new(async move { shared.check(within, |deadline| shared.store.ping(&prefix, deadline)).await })
    }

    fn clear_all(&self) -> StorageFuture<u64> {
        let (store, prefix, timeout) = (self.store().clone(), Arc::clone(&self.0.prefix), self.0.timeout);
        StorageFuture::new(async move {
            Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            store.delete_all(&prefix, store_deadline(timeout)).await
        })
    }

    fn slots(&self) -> Option<Arc<dyn SlotStore>> {
        Some(Arc::new(self.clone()))
    }
}

/// Implements [`Storage`] and `Debug` for a storage that contains only a [`ServerCas`].
macro_rules! forward_to_server_cas {
    ($name:ident) => {
        const _: () = {
            use std::sync::Arc;

            use crate::decision::Decision;
            use crate::error::ConfigError;
            use crate::key::Key;
            use crate::policy::Policy;
            use crate::storage::contract::forward_storage;
            use crate::storage::{SlotStore, Storage, StorageFuture, StorageRequest, Summary};

            impl Storage for $name {
                forward_storage!(self => self.0; decide, try_admit, decide_all, clear, settle, check, clear_all, validate,
                    validate_members, slots, wrapped);
            }
        };

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.debug(stringify!($name), f)
            }
        }
    };
}

pub(in crate::storage) use forward_to_server_cas;
