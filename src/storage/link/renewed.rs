//! What takes I/O to make: one attempt at a time, in a task of its own, for all who wait for it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::LinkError;

/// After a failed attempt, for so long nobody makes another; each failure doubles it.
const SHORTEST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// What was made a moment ago is not made anew for many who doubt it at once.
const FRESH: Duration = Duration::from_millis(100);

/// A value that somebody wants, made when it is wanted.
///
/// No lock is held while anything is waited for. An attempt goes on when all who wanted it have gone; when its runtime ends
/// with it, the next who wants the value makes another.
pub(in crate::storage) struct Renewed<T, E> {
    /// Named in errors.
    name: Box<str>,
    state: Mutex<State<T, E>>,
}

/// What can become useless by itself.
pub(in crate::storage) trait Usable {
    fn is_usable(&self) -> bool {
        true
    }
}

struct State<T, E> {
    value: Option<Arc<T>>,
    /// Closed when the attempt that is running ends.
    attempt: Option<watch::Receiver<()>>,
    /// Why there is no value, which is the answer until `not_before`.
    failure: Option<E>,
    not_before: Instant,
    wait: Duration,
}

enum Found<T, E> {
    Value(Arc<T>),
    Attempt(watch::Receiver<()>),
    Failure(E),
}

impl<T: Usable + Send + Sync + 'static, E: LinkError> Renewed<T, E> {
    pub(in crate::storage) fn new(name: &str) -> Arc<Self> {
        let (not_before, wait) = (Instant::now(), SHORTEST_WAIT);
        let state = State { value: None, attempt: None, failure: None, not_before, wait };
        Arc::new(Self { name: name.into(), state: Mutex::new(state) })
    }

    pub(in crate::storage) fn name(&self) -> &str {
        &self.name
    }

    /// The value, if it is there by `deadline`; `make` is called when there is none, nobody makes one, and it has not failed a
    /// moment ago.
    pub(in crate::storage) async fn get<F>(
        self: &Arc<Self>,
        deadline: Instant,
        make: impl Fn() -> F,
    ) -> Result<Arc<T>, E>
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        loop {
            let mut attempt = match self.find(&make) {
                Found::Value(value) => return Ok(value),
                Found::Failure(error) => return Err(error),
                Found::Attempt(attempt) => attempt,
            };
            let ended = timeout_at(deadline, attempt.changed()).await.is_ok();
            if !ended || Instant::now() >= deadline {
                return Err(E::late(&self.name));
            }
            // On a runtime that is ending, each attempt ends before it begins, and so is to end who waits.
            yield_now().await;
        }
    }

    fn find<F>(self: &Arc<Self>, make: impl Fn() -> F) -> Found<T, E>
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let state = self.lock();
        if let Some(value) = state.value.as_ref().filter(|value| value.is_usable()) {
            return Found::Value(Arc::clone(value));
        }
        if let Some(attempt) = &state.attempt {
            return Found::Attempt(attempt.clone());
        }
        match &state.failure {
            Some(error) if Instant::now() < state.not_before => Found::Failure(error.clone()),
            _ => Found::Attempt(self.attempt(state, make())),
        }
    }

    /// Makes another value in the background, in whose place the present one stays meanwhile; not while one is being made, nor
    /// right after one has been or has failed.
    #[cfg(feature = "redis-cluster")]
    pub(in crate::storage) fn renew<F>(self: &Arc<Self>, make: impl Fn() -> F)
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let state = self.lock();
        if state.attempt.is_none() && Instant::now() >= state.not_before {
            self.attempt(state, make());
        }
    }

    /// The value is of no more use, and another is to be made at once, or after a moment with `error` as the answer.
    pub(in crate::storage) fn give_up(&self, value: &Arc<T>, error: Option<&E>) {
        let mut state = self.lock();
        if state.value.as_ref().is_some_and(|present| Arc::ptr_eq(present, value)) {
            let given_up = state.value.take();
            (state.failure, state.not_before) = (error.cloned(), Instant::now() + LONGEST_WAIT);
            drop(state);
            drop(given_up);
        }
    }

    fn attempt<F>(self: &Arc<Self>, mut state: MutexGuard<'_, State<T, E>>, make: F) -> watch::Receiver<()>
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (running, ended) = watch::channel(());
        state.attempt = Some(ended.clone());
        // A runtime that is ending drops what is spawned at once, and that takes the lock.
        drop(state);
        let mut attempt = Attempt { of: Arc::clone(self), made: None, _running: running };
        tokio::spawn(async move {
            let made = make.await;
            attempt.made = Some(made);
            drop(attempt);
        });
        ended
    }

    fn end(&self, made: Option<Result<T, E>>) {
        let mut state = self.lock();
        state.attempt = None;
        let before = match made {
            Some(Ok(value)) => {
                (state.failure, state.wait) = (None, SHORTEST_WAIT);
                state.not_before = Instant::now() + FRESH;
                state.value.replace(Arc::new(value))
            }
            Some(Err(error)) => {
                (state.failure, state.not_before) = (Some(error), Instant::now() + state.wait);
                state.wait = (state.wait * 2).min(LONGEST_WAIT);
                None
            }
            None => None,
        };
        drop(state);
        drop(before);
    }
}

impl<T, E> Renewed<T, E> {
    fn lock(&self) -> MutexGuard<'_, State<T, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends however its task ends, also when a runtime drops it: first the state, then who waits is told.
struct Attempt<T: Usable + Send + Sync + 'static, E: LinkError> {
    of: Arc<Renewed<T, E>>,
    made: Option<Result<T, E>>,
    _running: watch::Sender<()>,
}

impl<T: Usable + Send + Sync + 'static, E: LinkError> Drop for Attempt<T, E> {
    fn drop(&mut self) {
        self.of.end(self.made.take());
    }
}

impl<T, E: fmt::Debug> fmt::Debug for Renewed<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let (there, failure) = (state.value.is_some(), &state.failure);
        f.debug_struct("Renewed")
            .field("name", &self.name)
            .field("there", &there)
            .field("failure", failure)
            .finish_non_exhaustive()
    }
}
