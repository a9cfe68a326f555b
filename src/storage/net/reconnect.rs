//! What takes I/O to make: one attempt at a time, in a task of its own, for all who wait for it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::calls::{MOST, Waiters, overloaded};
use super::race::{TRIES, race};
use super::{CONNECT_WITHIN, LinkError};

/// After a failed attempt, for so long nobody makes another; each failure doubles it.
const SHORTEST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// What was made a moment ago is not made anew for many who doubt it at once.
const FRESH: Duration = Duration::from_millis(100);

/// An attempt that takes longer may be on a runtime that nobody drives, where it does not even find out that it is late.
const STANDS_STILL: Duration = CONNECT_WITHIN.saturating_mul(2);

/// A value that somebody wants, made when it is wanted.
///
/// No lock is held while anything is waited for. An attempt goes on when all who wanted it have gone; when its runtime ends
/// with it, or [stands still](STANDS_STILL), the next who wants the value makes another. Whichever succeeds first is the value.
pub(in crate::storage) struct Reconnecting<T, E> {
    /// Named in errors.
    name: Box<str>,
    pub(super) waiting: Waiters,
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
    /// The attempt that was begun last, if it is running.
    attempt: Option<Running>,
    attempts: u64,
    /// Why there is no value, which is the answer until `not_before`.
    failure: Option<E>,
    not_before: Instant,
    wait: Duration,
}

#[derive(Clone)]
struct Running {
    /// The how manieth it is.
    number: u64,
    /// Closed when it ends.
    ended: watch::Receiver<()>,
    /// If it has not ended by then, others need not wait for it.
    until: Instant,
}

enum Found<T, E> {
    Value(Arc<T>),
    Attempt(Running),
    Failure(E),
}

impl<T: Usable + Send + Sync + 'static, E: LinkError> Reconnecting<T, E> {
    pub(in crate::storage) fn new(name: &str) -> Arc<Self> {
        let (not_before, wait) = (Instant::now(), SHORTEST_WAIT);
        let state = State { value: None, attempt: None, attempts: 0, failure: None, not_before, wait };
        Arc::new(Self { name: name.into(), waiting: Waiters::default(), state: Mutex::new(state) })
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
            let Some(waiter) = self.waiting.enter() else {
                let patience = deadline.saturating_duration_since(Instant::now());
                return overloaded(E::overloaded(&self.name, MOST), patience).await;
            };
            // Whether it has ended or is to be waited for no longer, the next look tells.
            let _ = timeout_at(deadline.min(attempt.until), attempt.ended.changed()).await;
            drop(waiter);
            if Instant::now() >= deadline {
                return Err(E::late(&self.name));
            }
            // On a runtime that is ending, each attempt ends before it begins, and so is to end who waits.
            yield_now().await;
        }
    }

    /// The present value, if it is usable.
    pub(in crate::storage) fn value(&self) -> Option<Arc<T>> {
        self.lock().value.as_ref().filter(|value| value.is_usable()).cloned()
    }

    fn find<F>(self: &Arc<Self>, make: impl Fn() -> F) -> Found<T, E>
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let state = self.lock();
        if let Some(value) = state.value.as_ref().filter(|value| value.is_usable()) {
            return Found::Value(Arc::clone(value));
        }
        if let Some(attempt) = state.attempt.as_ref().filter(|attempt| Instant::now() < attempt.until) {
            return Found::Attempt(attempt.clone());
        }
        match &state.failure {
            Some(error) if Instant::now() < state.not_before => Found::Failure(error.clone()),
            _ => Found::Attempt(self.attempt(state, [(); TRIES].map(|()| make()))),
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
            self.attempt(state, [(); TRIES].map(|()| make()));
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

    fn attempt<F>(self: &Arc<Self>, mut state: MutexGuard<'_, State<T, E>>, tries: [F; TRIES]) -> Running
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (running, ended) = watch::channel(());
        state.attempts += 1;
        let begun = Running { number: state.attempts, ended, until: Instant::now() + STANDS_STILL };
        state.attempt = Some(begun.clone());
        // A runtime that is ending drops what is spawned at once, and that takes the lock.
        drop(state);
        let mut attempt = Attempt { of: Arc::clone(self), number: begun.number, made: None, _running: running };
        tokio::spawn(async move {
            let made = race(tries).await;
            attempt.made = Some(made);
            drop(attempt);
        });
        begun
    }

    fn end(&self, number: u64, made: Option<Result<T, E>>) {
        let mut state = self.lock();
        let is_last = state.attempt.take_if(|attempt| attempt.number == number).is_some();
        let is_there = state.value.as_ref().is_some_and(|value| value.is_usable());
        // One that others did not wait for any more, and that comes too late.
        let made = made.filter(|made| is_last || (made.is_ok() && !is_there));
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

impl<T, E> Reconnecting<T, E> {
    fn lock(&self) -> MutexGuard<'_, State<T, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends however its task ends, also when a runtime drops it: first the state, then who waits is told.
struct Attempt<T: Usable + Send + Sync + 'static, E: LinkError> {
    of: Arc<Reconnecting<T, E>>,
    number: u64,
    made: Option<Result<T, E>>,
    _running: watch::Sender<()>,
}

impl<T: Usable + Send + Sync + 'static, E: LinkError> Drop for Attempt<T, E> {
    fn drop(&mut self) {
        self.of.end(self.number, self.made.take());
    }
}

impl<T, E: fmt::Debug> fmt::Debug for Reconnecting<T, E> {
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

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Made(u32);

    impl Usable for Made {}

    #[derive(Clone, Debug, PartialEq)]
    struct Late;

    impl LinkError for Late {
        fn late(_: &str) -> Self {
            Self
        }

        fn overloaded(_: &str, _: usize) -> Self {
            Self
        }

        fn is_timeout(&self) -> bool {
            true
        }
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
    }

    #[test]
    fn an_attempt_left_where_nobody_drives_it_is_not_waited_for_for_ever() {
        let (left, driven) = (runtime(), runtime());
        let renewed = Reconnecting::<Made, Late>::new("it");
        let soon = || Instant::now() + Duration::from_millis(100);
        let late = left.block_on(async { renewed.get(soon(), pending::<Result<Made, Late>>).await });
        assert_eq!(late, Err(Late));
        driven.block_on(async {
            let made = AtomicU32::new(0);
            let make = || ready(Ok(Made(made.fetch_add(1, Ordering::SeqCst))));
            assert_eq!(renewed.get(soon(), make).await, Err(Late), "it may still be made");
            let value = renewed.get(Instant::now() + STANDS_STILL, make).await;
            assert_eq!(value, Ok(Arc::new(Made(0))));
        });
        // What ends later changes nothing.
        drop(left);
        driven.block_on(async {
            let value = renewed.get(soon(), pending::<Result<Made, Late>>).await;
            assert_eq!(value, Ok(Arc::new(Made(0))));
        });
    }

    #[test]
    fn whichever_of_two_attempts_succeeds_first_is_the_value() {
        runtime().block_on(async {
            let renewed = Reconnecting::<Made, Late>::new("it");
            let (tell, mut told) = watch::channel(false);
            let slow = || {
                let mut told = told.clone();
                async move { told.wait_for(|told| *told).await.map(|_| Made(1)).map_err(|_| Late) }
            };
            assert_eq!(renewed.get(Instant::now() + STANDS_STILL / 2, slow).await, Err(Late));
            let fails = async || renewed.get(Instant::now() + STANDS_STILL, || ready(Err(Late))).await;
            assert_eq!(fails().await, Err(Late));
            told.mark_unchanged();
            tell.send_replace(true);
            let deadline = Instant::now() + STANDS_STILL;
            while renewed.get(deadline, || ready(Err(Late))).await != Ok(Arc::new(Made(1))) {
                assert!(Instant::now() < deadline);
                tokio::time::sleep(SHORTEST_WAIT / 2).await;
            }
        });
    }
}
