//! A storage behind one type, whichever it is.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{Storage, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Policy};

/// Any [`Storage`] behind one type, for programs that choose a storage and its wrappers at run time.
///
/// Its errors are [`BoxError`]s that hold the errors of the storage inside. An answer that is ready at once costs no
/// allocation. One that has to be waited for costs one.
///
/// The futures of the storage inside are polled once when they are made, so on a server the methods have to be called
/// inside the runtime that will wait for the answer.
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
pub struct BoxStorage(Arc<dyn AnyKind>);

impl BoxStorage {
    /// Puts the storage behind the common type. Clones share it.
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

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        self.0.decide(ask)
    }

    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        self.0.try_admit(ask, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.0.clear(policy, key)
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.0.refund(policy, key, decision)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.validate(policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.0.clients_to_fill(policy)
    }
}

/// [`Storage`] without associated types.
trait AnyKind: fmt::Debug + Send + Sync {
    fn decide(&self, ask: StorageRequest<'_>) -> BoxAnswer<Decision>;
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool;
    fn clear(&self, policy: &Policy, key: &Key) -> BoxAnswer<()>;
    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> BoxAnswer<()>;
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError>;
    fn clients_to_fill(&self, policy: &Policy) -> Option<u64>;
}

impl<St: Storage> AnyKind for St {
    fn decide(&self, ask: StorageRequest<'_>) -> BoxAnswer<Decision> {
        BoxAnswer::of(Storage::decide(self, ask))
    }

    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        Storage::try_admit(self, ask, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> BoxAnswer<()> {
        BoxAnswer::of(Storage::clear(self, policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> BoxAnswer<()> {
        BoxAnswer::of(Storage::refund(self, policy, key, decision))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        Storage::validate(self, policy)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        Storage::clients_to_fill(self, policy)
    }
}

/// The future of a [`BoxStorage`]'s answer.
#[must_use = "futures do nothing unless polled"]
pub struct BoxAnswer<T>(Answer<T>);

enum Answer<T> {
    /// `None` after it was taken.
    Ready(Option<Result<T, BoxError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>),
}

impl<T: Unpin + 'static> BoxAnswer<T> {
    fn of<E: Into<BoxError>>(mut future: impl Future<Output = Result<T, E>> + Send + Unpin + 'static) -> Self {
        let mut context = Context::from_waker(Waker::noop());
        Self(match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(answer) => Answer::Ready(Some(answer.map_err(Into::into))),
            Poll::Pending => Answer::Pending(Box::pin(async { future.await.map_err(Into::into) })),
        })
    }
}

impl<T: Unpin> Future for BoxAnswer<T> {
    type Output = Result<T, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Answer::Ready(answer) => Poll::Ready(answer.take().expect("a future is not polled after it is ready")),
            Answer::Pending(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for BoxAnswer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxAnswer").finish_non_exhaustive()
    }
}
