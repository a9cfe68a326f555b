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

/// A storage with a timeout, around any storage. The shared storages of this crate have a timeout of their
/// own.
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
///
/// The time counts from the first poll of the future. A call that takes longer fails with
/// [`TimeoutError`], and its future is dropped. The hit may have been counted all the same.
///
/// A call that is not ready at the first poll needs a tokio runtime. Outside of one it fails.
///
/// # Panics
///
/// Such a call panics inside a tokio runtime without time.
#[derive(Clone, Debug)]
pub struct Timeout<St> {
    storage: St,
    within: Duration,
}

impl<St: Storage> Timeout<St> {
    /// Wraps `storage`, and sets the timeout of a call.
    ///
    /// # Panics
    ///
    /// Panics if `within` is less than a millisecond or more than an hour. [`try_new`](Self::try_new)
    /// returns an error instead.
    #[track_caller]
    pub fn new(storage: St, within: Duration) -> Self {
        or_panic(Self::try_new(storage, within))
    }

    /// As [`new`](Self::new), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `within` is less than a millisecond or more than an hour.
    pub fn try_new(storage: St, within: Duration) -> Result<Self, ConfigError> {
        checked(within)?;
        Ok(Self { storage, within })
    }

    /// Returns the storage inside.
    pub fn storage(&self) -> &St {
        &self.storage
    }

    fn in_time<A>(&self, answer: A, changes: bool) -> InTime<A> {
        InTime { answer, within: self.within, timer: None, changes }
    }
}

impl<St: Storage> Storage for Timeout<St> {
    type Error = TimeoutError;
    type DecideFuture = InTime<St::DecideFuture>;
    type UpdateFuture = InTime<St::UpdateFuture>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        self.in_time(self.storage.decide(ask), ask.op == Op::Hit && ask.cost > 0)
    }

    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        self.storage.try_admit(ask, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        self.in_time(self.storage.clear(policy, key), true)
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        self.in_time(self.storage.refund(policy, key, decision), true)
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.storage.clients_to_fill(policy)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.storage.validate(policy)
    }
}

/// A call of a [`Timeout`].
#[must_use = "futures do nothing unless they are polled"]
pub struct InTime<A> {
    answer: A,
    within: Duration,
    /// Since the first time that one had to wait.
    timer: Option<Pin<Box<Sleep>>>,
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
        if let Poll::Ready(answer) = Pin::new(&mut this.answer).poll(cx) {
            return Poll::Ready(answer.map_err(|error| TimeoutError(Kind::Storage(error.into().into()))));
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

/// The error of a [`Timeout`]: a timeout, or an error of the storage inside, which is its
/// [`source`](Error::source).
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

    /// Returns `true` if a hit, a refund or a clear timed out. The storage may have executed it all
    /// the same. If the storage itself failed, only the [`source`](Error::source) knows.
    pub fn may_have_counted(&self) -> bool {
        matches!(self.0, Kind::Late { changes: true, .. } | Kind::NoRuntime { changes: true })
    }
}

impl fmt::Display for TimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Late { within, .. } => write!(f, "the storage did not answer within {within:?}"),
            Kind::Storage(error) => error.fmt(f),
            Kind::NoRuntime { .. } => f.write_str("a storage with a deadline needs a runtime of tokio's"),
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
