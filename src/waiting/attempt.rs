use std::pin::Pin;
use std::task::{Context, Poll};

use crate::background::run_or_spawn;
use crate::{Decision, Key, Policy, Storage};

/// The policy and the key of a hit that may have to be refunded.
pub(crate) struct Spent<St> {
    storage: St,
    policy: Policy,
    key: Key,
}

impl<St: Storage> Spent<St> {
    pub(crate) fn new(storage: St, policy: Policy, key: Key) -> Self {
        Self { storage, policy, key }
    }

    /// Refunds the hit: immediately if the storage is ready, else in a task.
    pub(crate) fn refund(&self, decision: &Decision) {
        if decision.has_spent() {
            let refund = self.storage.settle(&self.policy, &self.key, decision, 0);
            // A failed refund leaves the hit charged. No caller is left that could get the error.
            run_or_spawn(refund, drop);
        }
    }
}

/// A hit in flight. If it is dropped, it continues in a task, and is refunded if it was admitted.
pub(super) struct Attempt<St: Storage> {
    /// `None` while it is polled, so that `drop` does not poll it again after a panic.
    hit: Option<(St::DecideFuture, Spent<St>)>,
}

impl<St: Storage> Attempt<St> {
    pub(super) fn new(deciding: St::DecideFuture, spent: Spent<St>) -> Self {
        Self { hit: Some((deciding, spent)) }
    }
}

impl<St: Storage> Unpin for Attempt<St> {}

impl<St: Storage> Future for Attempt<St> {
    type Output = Result<Decision, St::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (mut deciding, spent) = self.hit.take().expect("polled after it was ready");
        let polled = Pin::new(&mut deciding).poll(cx);
        if polled.is_pending() {
            self.hit = Some((deciding, spent));
        }
        polled
    }
}

impl<St: Storage> Drop for Attempt<St> {
    fn drop(&mut self) {
        if let Some((deciding, spent)) = self.hit.take() {
            run_or_spawn(deciding, move |decided| {
                if let Ok(decision) = decided {
                    spent.refund(&decision);
                }
            });
        }
    }
}
