//! Futures that a test polls by hand.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_util::FutureExt;
use tower_ratelimit::storage::StorageFuture;

/// Polls a future once.
pub fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns the result of a memory storage, whose futures are always ready.
pub fn now<T>(answer: StorageFuture<T>) -> T {
    answer.now_or_never().expect("a storage that is ready").unwrap()
}

/// Polls a future until it is ready, without a runtime.
pub fn outside_of_a_runtime<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}
