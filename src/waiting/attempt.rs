use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::background::run_or_spawn;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::reservation::Account;
use crate::storage::{StorageError, StorageFuture};

/// The policy and the key of a hit that may have to be refunded.
pub(crate) struct Spent {
    pub(crate) account: Account,
    on_failed_refund: Option<OnFailedRefund>,
}

/// Called if a refund fails. No caller is left that could get the error.
pub(crate) type OnFailedRefund = Arc<dyn Fn(&Policy, &Key, &Decision, &StorageError) + Send + Sync>;

impl Spent {
    pub(crate) fn new(account: Account, on_failed_refund: Option<OnFailedRefund>) -> Self {
        Self { account, on_failed_refund }
    }

    /// Refunds the hit: immediately if the storage is ready, else in a task. Drops `place` after
    /// that. A failed refund leaves the units spent.
    pub(crate) fn refund<P: Send + 'static>(&self, decision: &Decision, place: P) {
        if !decision.has_spent() {
            return;
        }
        let report = self.on_failed_refund.clone();
        let (Account { policy, key, .. }, hit) = (self.account.clone(), decision.clone());
        run_or_spawn(self.account.correct(decision, 0), move |done| {
            drop(place);
            if let (Err(error), Some(report)) = (done, report) {
                report(&policy, &key, &hit, &error);
            }
        });
    }
}

/// A hit in flight. If it is dropped, it continues in a task, and is refunded if it was admitted.
///
/// It keeps its place in the queue until then. Otherwise the next hit would ask before the refund,
/// and would be refused.
pub(super) struct Attempt<P: Send + 'static> {
    /// `None` while it is polled, so that `drop` does not poll it again after a panic.
    hit: Option<(StorageFuture<Decision>, Spent, P)>,
}

impl<P: Send + 'static> Attempt<P> {
    pub(super) fn new(deciding: StorageFuture<Decision>, spent: Spent, place: P) -> Self {
        Self { hit: Some((deciding, spent, place)) }
    }
}

impl<P: Send + 'static> Unpin for Attempt<P> {}

impl<P: Send + 'static> Future for Attempt<P> {
    type Output = (P, Result<Decision, StorageError>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (mut deciding, spent, place) = self.hit.take().expect("polled after it was ready");
        match Pin::new(&mut deciding).poll(cx) {
            Poll::Ready(decided) => Poll::Ready((place, decided)),
            Poll::Pending => {
                self.hit = Some((deciding, spent, place));
                Poll::Pending
            }
        }
    }
}

impl<P: Send + 'static> Drop for Attempt<P> {
    fn drop(&mut self) {
        if let Some((deciding, spent, place)) = self.hit.take() {
            run_or_spawn(deciding, move |decided| {
                if let Ok(decision) = decided {
                    spent.refund(&decision, place);
                }
            });
        }
    }
}
