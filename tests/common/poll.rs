//! Futures that a test polls by hand.

use std::convert::Infallible;
use std::future::Ready;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Polls a future once.
pub fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns the result of a memory storage, whose futures are always ready.
pub fn now<T>(answer: Ready<Result<T, Infallible>>) -> T {
    answer.into_inner().unwrap()
}
