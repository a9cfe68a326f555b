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
