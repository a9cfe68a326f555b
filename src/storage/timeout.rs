use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep};

use crate::error::or_panic;
use crate::storage::deadline::checked;
use crate::storage::{Storage, StorageRequest, Summary};
use crate::{BoxError, ConfigError, Decision, Key, Op, Policy};

/// A wrapper that adds a timeout to a storage. The shared storages of this crate already have one.
///
/// A call that takes longer fails with [`TimeoutError`], and its future is dropped. The time starts
/// at the first poll of the future. The storage may execute the call after the timeout, so the hit
/// may have been counted.
///
/// A call that is not ready at the first poll needs a tokio runtime, and fails without one.
///
/// # Panics
///
/// A call panics if it has to wait in a tokio runtime whose time driver is disabled.
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
    /// Wraps `storage`. Each call may take at most `within`.
    ///
    /// # Panics
    ///
    /// Panics if `within` is less than a millisecond or more than an hour.
    /// [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(storage: St, within: Duration) -> Self {
        or_panic(Self::try_new(storage, within))
    }

    /// Like [`new`](Self::new), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if `within` is less than a millisecond or more than an hour.
    pub fn try_new(storage: St, within: Duration) -> Result<Self, ConfigError> {
        checked(within)?;
        Ok(Self { storage, within })
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
    type Error = TimeoutError;
    type DecideFuture = InTime<St::DecideFuture>;
    type UpdateFuture = InTime<St::UpdateFuture>;

    fn decide(&self, request: StorageRequest<'_>) -> Self::DecideFuture {
        self.with_timeout(self.storage.decide(request), request.op == Op::Hit && request.cost > 0)
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        self.storage.try_admit(request, summary)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.with_timeout(self.storage.clear(policy, key), true)
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.with_timeout(self.storage.refund(policy, key, decision), true)
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

/// The future of a [`Timeout`].
#[must_use = "futures do nothing unless they are polled"]
pub struct InTime<A> {
    future: A,
    within: Duration,
    /// Created at the first poll, if the call is not ready then.
    timer: Option<Pin<Box<Sleep>>>,
    /// `true` if the call changes states.
    changes: bool,
}

impl<A, T, E> Future for InTime<A>
where
    A: Future<Output = Result<T, E>> + Unpin,
    E: Into<BoxError>,
{
    type Output = Result<T, TimeoutError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Poll::Ready(result) = Pin::new(&mut this.future).poll(cx) {
            return Poll::Ready(result.map_err(|error| TimeoutError(Kind::Storage(error.into().into()))));
        }
        if this.timer.is_none() && Handle::try_current().is_err() {
            return Poll::Ready(Err(TimeoutError(Kind::NoRuntime { changes: this.changes })));
        }
        let within = this.within;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(within)));
        timer.as_mut().poll(cx).map(|()| Err(TimeoutError(Kind::Late { within, changes: this.changes })))
    }
}

impl<A> fmt::Debug for InTime<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InTime").field("within", &self.within).finish_non_exhaustive()
    }
}

/// The error of a [`Timeout`]: a timeout, or an error of the inner storage.
///
/// [`source`](Error::source) returns the error of the inner storage.
#[derive(Clone, Debug)]
pub struct TimeoutError(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Late { within: Duration, changes: bool },
    Storage(Arc<dyn Error + Send + Sync>),
    NoRuntime { changes: bool },
}

impl TimeoutError {
    /// Returns `true` if the storage did not answer in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::Late { .. })
    }

    /// Returns `true` if the call was a hit, a refund or a clear, and the storage may have executed
    /// it.
    ///
    /// Returns `false` if the inner storage returned an error. Then request the
    /// [`source`](Error::source).
    pub fn may_have_counted(&self) -> bool {
        matches!(self.0, Kind::Late { changes: true, .. } | Kind::NoRuntime { changes: true })
    }
}

impl fmt::Display for TimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Late { within, .. } => write!(f, "the storage did not answer within {within:?}"),
            Kind::Storage(error) => error.fmt(f),
            Kind::NoRuntime { .. } => f.write_str("a storage timeout needs a tokio runtime"),
        }
    }
}

impl Error for TimeoutError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            Kind::Storage(error) => Some(&**error),
            Kind::Late { .. } | Kind::NoRuntime { .. } => None,
        }
    }
}
