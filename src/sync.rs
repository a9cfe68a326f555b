//! Locks and atomics: those of std, or those of loom when `scripts/loom` checks its models. And futures
//! that are polled together.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{LockResult, PoisonError};
use std::task::Poll;

#[cfg(tower_ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(tower_ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Returns the guard of a lock, even if a thread has panicked while it held the lock.
///
/// All locks of the crate may be used after a panic: the code that holds them calls nothing that
/// panics, or leaves the data in order if it does.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// Polls all futures together, so that one that hangs does not delay the others. Returns their results
/// in the same order.
///
/// `futures_util::future::join_all` does the same. But the core would then compile three more crates:
/// `futures-util`, `futures-core` and `futures-task`. A program without axum may not have them.
/// `try_join_all` would drop the other calls when one fails, and leave their outcome unknown.
pub(crate) async fn join_all<F: Future + Unpin>(futures: Vec<F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.into_iter().map(|future| (future, None)).collect();
    poll_fn(|cx| {
        let mut is_pending = false;
        for (future, result) in all.iter_mut().filter(|(_, result)| result.is_none()) {
            match Pin::new(future).poll(cx) {
                Poll::Ready(done) => *result = Some(done),
                Poll::Pending => is_pending = true,
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    all.into_iter().filter_map(|(_, result)| result).collect()
}

/// Helpers of the loom models.
#[cfg(all(test, tower_ratelimit_loom))]
pub(crate) mod race {
    use std::sync::Arc;

    use loom::thread;

    /// The order in which the two closures of a model start.
    #[derive(Clone, Copy)]
    pub(crate) struct Race {
        is_swapped: bool,
    }

    /// Runs the model in all interleavings, twice: each closure of the race starts first once.
    ///
    /// To find races, loom (0.7) remembers only the last access to each atomic. If a thread loads
    /// an atomic before it stores to it, this hides its race with an earlier load of the other
    /// thread. loom then does not try the store before that load. It tries this order if the
    /// storing thread starts first.
    pub(crate) fn model(f: impl Fn(Race) + Copy + Send + Sync + 'static) {
        for is_swapped in [false, true] {
            loom::model(move || f(Race { is_swapped }));
        }
    }

    impl Race {
        /// Runs `a` and `b` at the same time. Returns their results.
        pub(crate) fn run<T: 'static, A: 'static, B: 'static>(
            self,
            shared: &Arc<T>,
            a: impl FnOnce(&T) -> A + 'static,
            b: impl FnOnce(&T) -> B + 'static,
        ) -> (A, B) {
            let other = Arc::clone(shared);
            if self.is_swapped {
                let a = thread::spawn(move || a(&other));
                let b = b(shared);
                (a.join().unwrap(), b)
            } else {
                let b = thread::spawn(move || b(&other));
                let a = a(shared);
                (a, b.join().unwrap())
            }
        }
    }
}
