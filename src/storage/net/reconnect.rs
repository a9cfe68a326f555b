//! A connection that is opened on demand, in a background task that all callers share.
//!
//! Every error is retried, even a wrong password, because an operator can correct it while the
//! program runs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::{CONNECT_WITHIN, Gauge, MOST, fail_delayed};
#[cfg(any(test, feature = "redis", feature = "memcached", feature = "etcd"))]
use super::{race, tries};
use crate::storage::StorageError;
use crate::sync::unpoisoned;

/// The backoff after the first failed attempt. Each further failure doubles it, up to
/// [`MAX_BACKOFF`].
const MIN_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_millis(200);

/// `Reconnecting::renew` does not replace a value that is younger than this, so that many callers
/// do not each replace it.
const FRESH: Duration = Duration::from_millis(100);

/// An attempt that takes longer is abandoned. Its runtime may not be running, so its own timeout
/// would not fire.
const STALLED_AFTER: Duration = CONNECT_WITHIN.saturating_mul(2);

/// A value, such as a connection, that is made on demand and made again after failures.
///
/// There is one attempt at a time, and it continues if its callers are dropped. If its runtime ends
/// or [stalls](STALLED_AFTER), the next caller starts another attempt. The attempt that succeeds
/// first sets the value. No lock is held across an `await`.
pub(in crate::storage) struct Reconnecting<T> {
    /// The server's address, for error messages.
    name: Box<str>,
    pub(super) waiting: Gauge,
    state: Mutex<ConnectionState<T>>,
}

/// A value that can become unusable, such as a closed connection.
pub(in crate::storage) trait Usable: Send + Sync + 'static {
    fn is_usable(&self) -> bool {
        true
    }

    /// Closes the value. Called when the value is discarded, while callers may still hold it.
    fn close(&self) {}
}

struct ConnectionState<T> {
    value: Option<Arc<T>>,
    /// The last attempt, if it is still running.
    attempt: Option<RunningAttempt>,
    /// The number of attempts so far.
    attempts: u64,
    /// The error of the last attempt. Callers get it until `not_before`, and then as the source of
    /// their timeout.
    failure: Option<StorageError>,
    /// The earliest time of the next attempt.
    not_before: Instant,
    backoff: Duration,
}

#[derive(Clone)]
pub(super) struct RunningAttempt {
    /// The attempt's number.
    number: u64,
    /// The channel that is closed when the attempt ends.
    pub(super) ended: watch::Receiver<()>,
    /// The time after which the attempt is considered stalled.
    pub(super) until: Instant,
}

pub(super) enum FoundConnection<T> {
    Value(Arc<T>),
    Running(RunningAttempt),
    Failure(StorageError),
}

impl<T: Usable> Reconnecting<T> {
    pub(in crate::storage) fn new(name: &str) -> Arc<Self> {
        let (not_before, backoff) = (Instant::now(), MIN_BACKOFF);
        let state = ConnectionState { value: None, attempt: None, attempts: 0, failure: None, not_before, backoff };
        Arc::new(Self { name: name.into(), waiting: Gauge::default(), state: Mutex::new(state) })
    }

    pub(in crate::storage) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the current value, if it is usable.
    pub(in crate::storage) fn value(&self) -> Option<Arc<T>> {
        self.lock().value.as_ref().filter(|value| value.is_usable()).cloned()
    }

    pub(super) fn find<F>(self: &Arc<Self>, make: impl Fn() -> F) -> FoundConnection<T>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        let state = self.lock();
        if let Some(value) = state.value.as_ref().filter(|value| value.is_usable()) {
            return FoundConnection::Value(Arc::clone(value));
        }
        if let Some(attempt) = state.attempt.as_ref().filter(|attempt| Instant::now() < attempt.until) {
            return FoundConnection::Running(attempt.clone());
        }
        match &state.failure {
            Some(error) if Instant::now() < state.not_before => FoundConnection::Failure(error.clone()),
            _ => FoundConnection::Running(self.attempt(state, make())),
        }
    }

    /// Makes another value in the background. The current one is used until then. Does nothing
    /// while an attempt is running that has not stalled, or shortly after one has ended.
    #[cfg(feature = "redis-cluster")]
    pub(in crate::storage) fn renew<F>(self: &Arc<Self>, make: impl Fn() -> F)
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        let (state, now) = (self.lock(), Instant::now());
        if state.attempt.as_ref().is_none_or(|attempt| now >= attempt.until) && now >= state.not_before {
            self.attempt(state, super::race(super::tries(make)));
        }
    }

    /// Returns the error of a call that timed out without a connection. Its source is the error of
    /// the last attempt, even if no caller was waiting when that failed.
    pub(in crate::storage) fn not_connected(&self) -> StorageError {
        StorageError::not_connected(&self.name, self.lock().failure.clone())
    }

    /// Discards the value, if it is still the current one. With an `error`, callers get that error
    /// for [`MAX_BACKOFF`]. Without one, the next caller makes another value immediately.
    pub(in crate::storage) fn give_up(&self, value: &Arc<T>, error: Option<&StorageError>) {
        let mut state = self.lock();
        if state.value.as_ref().is_some_and(|current| Arc::ptr_eq(current, value)) {
            let discarded = state.value.take();
            (state.failure, state.not_before) = (error.cloned(), Instant::now() + MAX_BACKOFF);
            drop(state);
            if let Some(discarded) = discarded {
                discarded.close();
            }
        }
    }

    /// Starts an attempt in a background task.
    fn attempt<F>(self: &Arc<Self>, mut state: MutexGuard<'_, ConnectionState<T>>, make: F) -> RunningAttempt
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        let (running, ended) = watch::channel(());
        state.attempts += 1;
        let begun = RunningAttempt { number: state.attempts, ended, until: Instant::now() + STALLED_AFTER };
        state.attempt = Some(begun.clone());
        // Releases the lock first: a runtime that shuts down drops a spawned task immediately, and
        // dropping the task takes the lock.
        drop(state);
        let mut attempt = ConnectAttempt { of: Arc::clone(self), number: begun.number, made: None, _running: running };
        tokio::spawn(async move {
            let made = make.await;
            attempt.made = Some(made);
            drop(attempt);
        });
        begun
    }

    /// Ends the attempt with this number. `made` is `None` if its runtime dropped it.
    fn end(&self, number: u64, made: Option<Result<T, StorageError>>) {
        let mut state = self.lock();
        let is_last = state.attempt.take_if(|attempt| attempt.number == number).is_some();
        let has_value = state.value.as_ref().is_some_and(|value| value.is_usable());
        // An abandoned attempt only counts if it succeeded and there is no value yet.
        let made = made.filter(|made| is_last || (made.is_ok() && !has_value));
        let before = match made {
            Some(Ok(value)) => {
                (state.failure, state.backoff) = (None, MIN_BACKOFF);
                state.not_before = Instant::now() + FRESH;
                state.value.replace(Arc::new(value))
            }
            Some(Err(error)) => {
                (state.failure, state.not_before) = (Some(error), Instant::now() + state.backoff);
                state.backoff = (state.backoff * 2).min(MAX_BACKOFF);
                None
            }
            None => None,
        };
        drop(state);
        if let Some(before) = before {
            before.close();
        }
    }
}

impl<T> Reconnecting<T> {
    fn lock(&self) -> MutexGuard<'_, ConnectionState<T>> {
        unpoisoned(self.state.lock())
    }
}

/// Ends the attempt when its task ends, even if the runtime drops the task. Updates the state
/// first, and then wakes the waiting callers.
struct ConnectAttempt<T: Usable> {
    of: Arc<Reconnecting<T>>,
    number: u64,
    made: Option<Result<T, StorageError>>,
    _running: watch::Sender<()>,
}

impl<T: Usable> Drop for ConnectAttempt<T> {
    fn drop(&mut self) {
        self.of.end(self.number, self.made.take());
    }
}

impl<T> fmt::Debug for Reconnecting<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let (has_value, failure) = (state.value.is_some(), &state.failure);
        f.debug_struct("Reconnecting")
            .field("name", &self.name)
            .field("has_value", &has_value)
            .field("failure", failure)
            .finish_non_exhaustive()
    }
}

impl<T: Usable> Reconnecting<T> {
    /// Returns the value. Calls `make` for the tries of a race if there is no value, no attempt is
    /// running, and the backoff is over.
    ///
    /// # Errors
    ///
    /// Returns the error of the last attempt during the backoff, a timeout at `deadline`, an overload
    /// error if too many callers wait, and an error outside of a tokio runtime.
    #[cfg(any(test, feature = "redis", feature = "memcached", feature = "etcd"))]
    pub(in crate::storage) async fn get<F>(
        self: &Arc<Self>,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<Arc<T>, StorageError>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        self.get_for(self, deadline, || race(tries(&make))).await
    }

    /// Returns the value, like `get`, but calls `make` once per attempt. The caller
    /// counts as one that waits for `other`, so that callers who wait for the same value can have
    /// separate limits.
    ///
    /// # Errors
    ///
    /// The errors are those of `get`.
    pub(in crate::storage) async fn get_for<F>(
        self: &Arc<Self>,
        other: &Self,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<Arc<T>, StorageError>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        // Timers and tasks panic without one.
        Handle::try_current().map_err(|_| StorageError::no_runtime())?;
        loop {
            let mut attempt = match self.find(&make) {
                FoundConnection::Value(value) => return Ok(value),
                FoundConnection::Failure(error) => return Err(error),
                FoundConnection::Running(attempt) => attempt,
            };
            let Some(waiter) = other.waiting.enter(1, MOST) else {
                let timeout = deadline.saturating_duration_since(Instant::now());
                return fail_delayed(StorageError::overloaded(self.name(), MOST), timeout).await;
            };
            // The next iteration finds the result, or starts another attempt if this one stalled.
            let _ = timeout_at(deadline.min(attempt.until), attempt.ended.changed()).await;
            drop(waiter);
            if Instant::now() >= deadline {
                return Err(self.not_connected());
            }
            // On a runtime that shuts down, each attempt ends before it begins. Yielding lets this
            // task end too.
            yield_now().await;
        }
    }

    /// Returns the current value, if it is usable. Otherwise begins an attempt in the background,
    /// unless one is running, or the backoff is not over.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn value_or_begin<F>(self: &Arc<Self>, make: impl Fn() -> F) -> Option<Arc<T>>
    where
        F: Future<Output = Result<T, StorageError>> + Send + 'static,
    {
        match self.find(&make) {
            FoundConnection::Value(value) => Some(value),
            FoundConnection::Running(_) | FoundConnection::Failure(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::runtime::{Builder, Runtime};
    use tokio::time::sleep;

    use super::*;
    use crate::storage::StorageErrorKind;

    type Attempted = Result<Made, StorageError>;

    const LATE: Result<Arc<Made>, StorageErrorKind> = Err(StorageErrorKind::Timeout);

    #[derive(Debug, PartialEq)]
    struct Made(u32);

    impl Usable for Made {}

    fn kind(result: Result<Arc<Made>, StorageError>) -> Result<Arc<Made>, StorageErrorKind> {
        result.map_err(|error| error.kind())
    }

    fn refused() -> StorageError {
        StorageError::refused("it", "no")
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
    }

    #[test]
    fn attempt_on_a_runtime_that_is_not_running_is_abandoned() {
        let (stopped, running) = (runtime(), runtime());
        let connection = Reconnecting::<Made>::new("it");
        let soon = || Instant::now() + Duration::from_millis(100);
        let late = stopped.block_on(async { kind(connection.get(soon(), pending::<Attempted>).await) });
        assert_eq!(late, LATE);
        running.block_on(async {
            let made = AtomicU32::new(0);
            let make = || ready(Ok(Made(made.fetch_add(1, Ordering::SeqCst))));
            assert_eq!(kind(connection.get(soon(), make).await), LATE, "the first attempt may still succeed");
            let value = kind(connection.get(Instant::now() + STALLED_AFTER, make).await);
            assert_eq!(value, Ok(Arc::new(Made(0))));
        });
        // The end of the abandoned attempt changes nothing.
        drop(stopped);
        running.block_on(async {
            let value = kind(connection.get(soon(), pending::<Attempted>).await);
            assert_eq!(value, Ok(Arc::new(Made(0))));
        });
    }

    /// Guards against this defect: an attempt on a runtime that nothing drives ends all renewals.
    #[cfg(feature = "redis-cluster")]
    #[test]
    fn renewal_on_a_runtime_that_is_not_running_is_abandoned() {
        let (stopped, running) = (runtime(), runtime());
        let connection = Reconnecting::<Made>::new("it");
        let renewed = async || {
            connection.renew(|| ready(Ok(Made(1))));
            sleep(MIN_BACKOFF).await;
            connection.value().unwrap().0
        };
        running.block_on(async {
            let value = kind(connection.get(Instant::now() + FRESH, || ready(Ok(Made(0)))).await);
            assert_eq!(value, Ok(Arc::new(Made(0))));
        });
        stopped.block_on(async {
            sleep(2 * FRESH).await;
            connection.renew(pending::<Attempted>);
        });
        running.block_on(async {
            sleep(2 * FRESH).await;
            assert_eq!(renewed().await, 0, "the first renewal may still succeed");
            sleep(STALLED_AFTER).await;
            assert_eq!(renewed().await, 1);
        });
    }

    #[test]
    fn attempt_that_succeeds_first_sets_the_value() {
        runtime().block_on(async {
            let connection = Reconnecting::<Made>::new("it");
            let (release, mut released) = watch::channel(false);
            let slow = || {
                let mut released = released.clone();
                async move { released.wait_for(|released| *released).await.map(|_| Made(1)).map_err(|_| refused()) }
            };
            assert_eq!(kind(connection.get(Instant::now() + STALLED_AFTER / 2, slow).await), LATE);
            let fails = async || kind(connection.get(Instant::now() + STALLED_AFTER, || ready(Err(refused()))).await);
            assert_eq!(fails().await, Err(StorageErrorKind::Refused));
            released.mark_unchanged();
            release.send_replace(true);
            let deadline = Instant::now() + STALLED_AFTER;
            while kind(connection.get(deadline, || ready(Err(refused()))).await) != Ok(Arc::new(Made(1))) {
                assert!(Instant::now() < deadline);
                sleep(MIN_BACKOFF / 2).await;
            }
        });
    }
}
