//! A storage with its type erased.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{Storage, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Policy};

/// A boxed [`Storage`], for programs that choose a storage and its wrappers at run time.
///
/// Errors of the inner storage are returned as [`BoxError`]. A future that is ready at the first
/// poll costs no allocation. Any other future costs one.
///
/// Each method polls the future of the inner storage once. Call the methods of a shared storage
/// inside the tokio runtime that awaits their futures.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::{BoxStorage, RefusalCache};
/// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
///
/// /// The type is the same with and without a cache.
/// struct App {
///     limit: RateLimitLayer<BoxStorage>,
/// }
///
/// let caches_refusals = true;
/// let mut storage = BoxStorage::new(MemoryStorage::new());
/// if caches_refusals {
///     storage = BoxStorage::new(RefusalCache::new(storage));
/// }
/// let limit = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// let app = App { limit };
/// ```
#[derive(Clone)]
pub struct BoxStorage(Arc<dyn DynStorage>);

impl BoxStorage {
    /// Boxes `storage`. Clones share it.
    pub fn new(storage: impl Storage) -> Self {
        Self(Arc::new(storage))
    }
}

impl fmt::Debug for BoxStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Storage for BoxStorage {
    type Error = BoxError;
    type DecideFuture = BoxAnswer<Decision>;
    type UpdateFuture = BoxAnswer<()>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        self.0.decide(request)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        self.0.try_admit(request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.0.clear(policy, key)
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.0.refund(policy, key, decision)
    }

    fn contains_breaker(&self) -> bool {
        self.0.contains_breaker()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.validate(policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.0.clients_to_fill(policy)
    }
}

/// A [`Storage`] without associated types, so that it can be a trait object.
trait DynStorage: fmt::Debug + Send + Sync {
    fn decide(&self, request: StorageRequest<'_>) -> BoxAnswer<Decision>;
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool;
    fn clear(&self, policy: &Policy, key: &Key) -> BoxAnswer<()>;
    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> BoxAnswer<()>;
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError>;
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64>;
    fn contains_breaker(&self) -> bool;
}

impl<St: Storage> DynStorage for St {
    fn decide(&self, request: StorageRequest<'_>) -> BoxAnswer<Decision> {
        BoxAnswer::new(Storage::decide(self, request))
    }

    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        Storage::try_admit(self, request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> BoxAnswer<()> {
        BoxAnswer::new(Storage::clear(self, policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> BoxAnswer<()> {
        BoxAnswer::new(Storage::refund(self, policy, key, decision))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        Storage::validate(self, policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        Storage::clients_to_fill(self, policy)
    }

    fn contains_breaker(&self) -> bool {
        Storage::contains_breaker(self)
    }
}

/// The future of a [`BoxStorage`].
#[must_use = "futures do nothing unless polled"]
pub struct BoxAnswer<T>(State<T>);

enum State<T> {
    /// `None` after the result was returned.
    Ready(Option<Result<T, BoxError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>),
}

impl<T: Unpin + 'static> BoxAnswer<T> {
    fn new<E: Into<BoxError>>(mut future: impl Future<Output = Result<T, E>> + Send + Unpin + 'static) -> Self {
        let mut context = Context::from_waker(Waker::noop());
        Self(match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(result) => State::Ready(Some(result.map_err(Into::into))),
            Poll::Pending => State::Pending(Box::pin(async { future.await.map_err(Into::into) })),
        })
    }
}

impl<T: Unpin> Future for BoxAnswer<T> {
    type Output = Result<T, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            State::Ready(result) => Poll::Ready(result.take().expect("`BoxAnswer` polled after completion")),
            State::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for BoxAnswer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxAnswer").finish_non_exhaustive()
    }
}
