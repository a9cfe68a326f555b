//! The shell of all compare-and-swap storages on servers.

use std::fmt;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

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
use crate::storage::contract::{OwnedRequest, forward_storage};
use crate::storage::keys::cannot_list;
use crate::storage::listing::NameRange;
use crate::storage::metrics::measured;
use crate::storage::net::{CONNECT_WITHIN, fail_delayed};
use crate::storage::url::CasOptions;
use crate::storage::{
    Claim, Granted, KeyPage, KeysRequest, SlotStore, Storage, StorageError, StorageFuture, StorageRequest, names,
};

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

    /// Waits for the first connection, or for the errors of the first attempts. It has a timeout of
    /// its own, because a login can take longer than a decision. The default implementation does
    /// not wait.
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

    /// Returns the next names of a range, in the order of their bytes. The default implementation
    /// cannot list names.
    fn list(
        &self,
        range: &NameRange,
        deadline: std::time::Instant,
    ) -> impl Future<Output = Result<Vec<String>, StorageError>> + Send {
        let _ = (range, deadline);
        std::future::ready(Err(cannot_list()))
    }
}

/// A [`Cas`] over servers: it waits for the first connection, and can delete all keys. While the servers
/// are overloaded, a decision fails after three quarters of its timeout, without a call.
#[derive(Clone)]
pub(in crate::storage) struct ServerCas<S: CasStorage> {
    cas: Cas<S>,
    first: Arc<FirstConnection>,
}

/// The wait for the first connection, which ends for all calls at the same time, also if their
/// callers leave early.
#[derive(Debug, Default)]
struct FirstConnection {
    begun: OnceLock<Instant>,
    has_ended: AtomicBool,
}

impl<S: ServerStore> ServerCas<S> {
    /// Creates the storage with the options of a URL.
    pub(in crate::storage) fn new(store: S, options: &CasOptions) -> Self {
        let &CasOptions { ref prefix, timeout, max_skew, long_logs } = options;
        let (several, name) = (store.several(), store.name().into());
        let shared = CasShared::new(store, several, name, TimeSource::Store, Skew::new(max_skew));
        Self::over(Cas {
            shared: Arc::new(shared),
            timeout,
            prefix: format!("{}:", S::encoded_prefix(prefix)).into(),
            label: S::LABEL,
            // Each hit loads and stores the whole log, so a long log dominates the cost of a server.
            longest_log: (!long_logs).then_some(LONGEST_LOG),
        })
    }

    fn over(cas: Cas<S>) -> Self {
        Self { cas, first: Arc::default() }
    }

    pub(in crate::storage) fn store(&self) -> &S {
        self.cas.store()
    }

    /// Returns `true` if a call has to wait for the first connection.
    fn is_new(&self) -> bool {
        let is_over = |begun: &Instant| begun.elapsed() >= CONNECT_WITHIN;
        !self.first.has_ended.load(Ordering::Relaxed)
            && Handle::try_current().is_ok()
            && !self.first.begun.get().is_some_and(is_over)
    }

    async fn first_connection(&self) {
        let begun = *self.first.begun.get_or_init(Instant::now);
        // The call that follows returns the error.
        let _ = timeout_at(begun + CONNECT_WITHIN, self.store().first_connection()).await;
        self.first.has_ended.store(true, Ordering::Relaxed);
    }

    /// Replaces the store, and keeps the settings.
    #[cfg(any(
        feature = "etcd",
        feature = "postgres-rustls",
        feature = "memcached-rustls",
        all(feature = "memcached", feature = "testing")
    ))]
    pub(in crate::storage) fn with_store(&self, store: S) -> Self {
        let several = store.several();
        Self::over(Cas { shared: Arc::new(self.cas.shared.with_store(store, several)), ..self.cas.clone() })
    }

    #[cfg(feature = "testing")]
    pub(in crate::storage) fn clock(self, clock: impl Clock) -> Self {
        Self { cas: self.cas.clock(clock), ..self }
    }

    /// Prints the storage with the name of its type.
    pub(in crate::storage) fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = self.cas.prefix.strip_suffix(':').unwrap_or_default();
        f.debug_struct(name)
            .field("store", self.store())
            .field("prefix", &prefix)
            .field("timeout", &self.cas.timeout)
            .finish_non_exhaustive()
    }
}

impl<S: ServerStore> fmt::Debug for ServerCas<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cas.fmt(f)
    }
}

/// A claim is not refused in advance while the servers are overloaded, unlike a decision. Each of its calls
/// is bounded like all others, a process makes one claim of a key at a time, and a claim that is late
/// would let other processes take slots that are in use.
impl<S: ServerStore> SlotStore for ServerCas<S> {
    fn claim(&self, policy: &Policy, key: &Key, claim: Claim) -> StorageFuture<Granted> {
        if !self.is_new() {
            return self.cas.claim(policy, key, claim);
        }
        let (storage, policy, key) = (self.clone(), policy.clone(), key.clone());
        StorageFuture::new(async move {
            storage.first_connection().await;
            storage.cas.claim(&policy, &key, claim).await
        })
    }
}

impl<S: ServerStore> Storage for ServerCas<S> {
    forward_storage!(self => self.cas; clear, settle, validate, validate_members);

    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if Handle::try_current().is_err() {
            return self.cas.decide(request);
        }
        if let Some(error) = self.store().overload(self.cas.shared.queues.len()) {
            return StorageFuture::new(measured(S::LABEL, fail_delayed(error, self.cas.timeout)));
        }
        if !self.is_new() {
            return self.cas.decide(request);
        }
        let (storage, request) = (self.clone(), request.owned());
        StorageFuture::new(async move {
            storage.first_connection().await;
            storage.cas.decide(request.borrow()).await
        })
    }

    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if Handle::try_current().is_err() {
            return self.cas.decide_all(members);
        }
        if let Some(error) = self.store().overload(self.cas.shared.queues.len()) {
            return StorageFuture::new(measured(S::LABEL, fail_delayed(error, self.cas.timeout)));
        }
        if !self.is_new() {
            return self.cas.decide_all(members);
        }
        let (storage, members) = (self.clone(), members.iter().map(StorageRequest::owned).collect::<Vec<_>>());
        StorageFuture::new(async move {
            storage.first_connection().await;
            storage.cas.decide_all(&members.iter().map(OwnedRequest::borrow).collect::<Vec<_>>()).await
        })
    }

    fn check(&self) -> StorageFuture<()> {
        let storage = self.clone();
        StorageFuture::new(async move {
            if storage.is_new() {
                storage.first_connection().await;
            }
            let Cas { shared, prefix, timeout, .. } = &storage.cas;
            shared.check(*timeout, |deadline| shared.store.ping(prefix, deadline)).await
        })
    }

    fn clear_all(&self) -> StorageFuture<u64> {
        let (store, prefix, timeout) = (self.store().clone(), Arc::clone(&self.cas.prefix), self.cas.timeout);
        StorageFuture::new(async move {
            Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            store.delete_all(&prefix, store_deadline(timeout)).await
        })
    }

    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        let range = match NameRange::new(&self.cas.prefix, &request) {
            Ok(range) => range,
            Err(error) => return StorageFuture::ready(Err(error)),
        };
        let (storage, policy) = (self.clone(), request.policy.clone());
        StorageFuture::new(async move {
            Handle::try_current().map_err(|_| StorageError::no_runtime())?;
            if storage.is_new() {
                storage.first_connection().await;
            }
            let found = storage.store().list(&range, store_deadline(storage.cas.timeout)).await;
            range.page(&storage, &policy, &found.map_err(StorageError::uncounted)?).await
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
                forward_storage!(self => self.0; decide, try_admit, decide_all, clear, settle, check, clear_all, keys,
                                                                            validate, validate_members, slots, wrapped);
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
