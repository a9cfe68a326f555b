use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep};

use crate::error::or_panic;
use crate::storage::deadline::checked;
use crate::storage::{Storage, StorageError, StorageErrorKind, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Op, Policy};

/// Adds a timeout to a storage of your own. All storages of this crate that use a server, a file or
/// [`Cas`](super::Cas) already have one.
///
/// The time of a call is counted from the first poll of its future.
/// [`clear_all`](Storage::clear_all) has no timeout. Neither has
/// [`try_admit`](Storage::try_admit), which cannot wait.
///
/// # Errors
///
/// A call fails with the error of the inner storage, or with one of these kinds:
///
/// | kind | cause |
/// |---|---|
/// | [`Timeout`](StorageErrorKind::Timeout) | The call took longer than the timeout. |
/// | [`Cancelled`](StorageErrorKind::Cancelled) | The call was not ready at its first poll, and there is no tokio runtime. |
///
/// In both cases, the inner storage may have executed the call, or may still execute it. So
/// [`may_have_counted`](StorageError::may_have_counted) returns `true` for a call that can change
/// states.
///
/// # Panics
///
/// A call panics if it is not ready at its first poll, and the time driver of the tokio runtime is
/// disabled.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::Timeout;
/// use tower_ratelimit::{MemoryStorage, OnError, PeerIp, Quota, RateLimitLayer};
///
/// # let mine = MemoryStorage::new();
/// let storage = Timeout::new(mine, Duration::from_millis(50));
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).storage(storage, OnError::Admit);
/// ```
#[derive(Clone, Debug)]
pub struct Timeout<St> {
    storage: St,
    within: Duration,
}

impl<St: Storage> Timeout<St> {
    /// Wraps `storage`. A call that takes longer than `within` fails.
    ///
    /// # Panics
    ///
    /// Panics if `within` is less than a millisecond or more than an hour.
    #[track_caller]
    pub fn new(storage: St, within: Duration) -> Self {
        or_panic(checked(within));
        Self { storage, within }
    }

    /// Returns the inner storage.
    pub fn storage(&self) -> &St {
        &self.storage
    }

    fn with_timeout<A>(&self, future: A, changes: bool) -> InTime<A> {
        InTime { future, within: self.within, timer: None, changes }
    }
}

impl<St: Storage> Storage for Timeout<St> {
    type Error = StorageError;
    type DecideFuture = InTime<St::DecideFuture>;
    type UpdateFuture = InTime<St::UpdateFuture>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        self.with_timeout(self.storage.decide(request), request.op != Op::Peek && request.cost > 0)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        self.storage.try_admit(request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.with_timeout(self.storage.clear(policy, key), true)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> Self::UpdateFuture {
        self.with_timeout(self.storage.settle(policy, key, decision, actual), true)
    }

    fn check(&self) -> impl Future<Output = Result<(), StorageError>> + Send + 'static {
        self.with_timeout(Box::pin(self.storage.check()), false)
    }

    /// Has no timeout, because the storage may visit every key.
    fn clear_all(&self) -> impl Future<Output = Result<u64, StorageError>> + Send + 'static {
        self.storage.clear_all()
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.storage.clients_to_fill(policy)
    }

    fn contains_breaker(&self) -> bool {
        self.storage.contains_breaker()
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.storage.validate(policy)
    }
}

/// The future of a call on a [`Timeout`].
#[must_use = "futures do nothing unless they are polled"]
pub struct InTime<A> {
    future: A,
    within: Duration,
    /// Created at the first poll, if the call is not ready then.
    timer: Option<Pin<Box<Sleep>>>,
    /// `true` if the call can change states. Then the hit may have been counted in spite of an
    /// error.
    changes: bool,
}

impl<A, T, E> Future for InTime<A>
where
    A: Future<Output = Result<T, E>> + Unpin,
    E: Into<BoxError>,
{
    type Output = Result<T, StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Poll::Ready(result) = Pin::new(&mut this.future).poll(cx) {
            return Poll::Ready(result.map_err(StorageError::from_boxed));
        }
        if this.timer.is_none() && Handle::try_current().is_err() {
            let error = StorageError::new(StorageErrorKind::Cancelled, "a storage timeout needs a tokio runtime");
            return Poll::Ready(Err(error.with_may_have_counted(this.changes)));
        }
        let within = this.within;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(within)));
        timer.as_mut().poll(cx).map(|()| {
            let message = format!("the storage did not answer within {within:?}");
            Err(StorageError::new(StorageErrorKind::Timeout, message).with_may_have_counted(this.changes))
        })
    }
}

impl<A> fmt::Debug for InTime<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InTime").field("within", &self.within).finish_non_exhaustive()
    }
}
