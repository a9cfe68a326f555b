//! Hits that wait until they are admitted.
//!
//! The hits of one policy and key wait in a queue. A hit that has a turn may ask the storage. After
//! a refusal, only the first hit of the queue gets a turn. After an admission, as many get one as
//! there are units left, up to 32. So a new window causes about one storage call for each hit that
//! it admits.
//!
//! If each hit slept for its own `retry_after`, 1,000 hits on a window of 10 would ask 1,000 times
//! when the window turns, and 990 times at the next turn. With one turn at a time, a window of
//! 1,000 on a storage with a round trip of 5 ms would admit its units in 5 s.
//!
//! - A turn that is not taken passes on after 200 ms: a call that was polled once in `select!` and
//!   then kept would otherwise block all calls behind it.
//! - A refused hit gives its turn back and keeps its ticket, so the order stays. A dropped hit that
//!   is in flight keeps its turn until it is refunded. Otherwise the next hit would be refused
//!   because of units that return a round trip later.
//! - A new hit joins the end of a queue that is not empty, without asking. Otherwise the cheap hits
//!   of a busy key would take each unit before an expensive one at the front gets enough of them.
//! - After a failure of the storage, one more hit may ask at the same time. If all of them asked, a
//!   struggling storage would get a stampede. If one asked, they would wait for each other's
//!   timeouts.
//! - Sleeps have jitter of up to a tenth, because aligned windows of many keys turn at the same
//!   instant. A hit behind others may exceed its deadline by 10 ms: timers are late, and `max_wait`
//!   is often the period of the limit.

mod entry;
mod queue;
mod room;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use self::entry::QueueEntry;
pub(crate) use self::entry::WaitQueues;
use self::queue::Refusal;
pub(crate) use self::queue::later;
pub(crate) use self::room::{QueueFuture, Seat, Seats, WaitBounds, WaitingRoom};
use crate::decision::Decision;
use crate::key::Key;
use crate::observe::Reporter;
use crate::policy::{Limit, Op, Policy, SharedPolicy};
use crate::reservation::{LimitedKey, run_or_spawn};
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest};
use crate::time::random_up_to;

/// The maximum jitter after the end of a refusal.
const MAX_JITTER: Duration = Duration::from_secs(1);

/// The time for which a hit may wait for its turn after its deadline. Units may become available
/// just at the deadline, timers are up to a millisecond late, and the hits ahead need their
/// decisions first.
const GRACE: Duration = Duration::from_millis(10);

/// A hit that is repeated until it is admitted, or cannot be admitted before its deadline.
pub(crate) struct Waiter {
    pub(crate) storage: AnyStorage,
    /// The policy of the hit. Each attempt reads it, to follow the changes of a live policy.
    pub(crate) policy: SharedPolicy,
    pub(crate) key: Key,
    pub(crate) cost: u32,
    /// The instant until which an admitted hit may be delayed. `None` if its delay does not matter.
    pub(crate) delayed_until: Option<Instant>,
    /// Reports the failed refund of an attempt that was dropped. `None` without an observer.
    pub(crate) reporter: Option<Reporter>,
}

/// The result of a hit, and the policy that decided it.
pub(crate) struct HitResult {
    pub(crate) policy: Policy,
    pub(crate) decided: Result<Decision, StorageError>,
}

impl Waiter {
    /// Makes the hit, or adds it to its queue if other hits wait there. If it is refused, waits
    /// until it is admitted, the storage fails, or it cannot be admitted before the deadline.
    pub(crate) async fn hit(&self, queues: &Arc<WaitQueues>, deadline: Instant) -> HitResult {
        if !queues.is_empty() {
            let id = (self.policy.with(Policy::queue_digest), self.key.clone());
            if let Some((entry, ())) = QueueEntry::behind(queues, id, self.cost, deadline, || Some(())) {
                return self.wait(entry, None, deadline).await;
            }
        }
        let ((), first) = self.attempt(()).await;
        match &first.decided {
            Ok(decision) if decision.is_refused() => {
                let refusal = Refusal::new(decision.clone(), first.policy.clone());
                if !refusal.ends_by(deadline) {
                    return first;
                }
                let entry = QueueEntry::after(&refusal, &self.key, queues);
                self.wait(entry, Some(refusal), deadline).await
            }
            _ => first,
        }
    }

    /// Makes the hit once. If the future is dropped, an admitted hit is refunded, and `entry` is
    /// dropped after that.
    ///
    /// If the hit would be delayed for too long, only peeks, because a refund would not free the
    /// slot of a delayed hit behind which others wait already. The result is then the admitted
    /// peek.
    async fn attempt<E: Send + 'static>(&self, entry: E) -> (E, HitResult) {
        let policy = self.policy.read().into_owned();
        if let Some(latest) = self.delayed_until.filter(|_| policy.delays()) {
            let decided = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Peek, self.cost)).await;
            let left = latest.saturating_duration_since(Instant::now());
            if decided.as_ref().map_or(true, |peeked| peeked.delay() > left) {
                return (entry, HitResult { policy, decided });
            }
        }
        let limited = self.limited(policy.clone());
        let deciding = limited.decide(Op::Hit, self.cost);
        let hit = UndecidedHit { deciding, limited, reporter: self.reporter.clone(), entry };
        let (entry, decided) = HitInFlight(Some(hit)).await;
        (entry, HitResult { policy, decided })
    }

    /// Returns the key of the hit under the policy that decided it.
    pub(crate) fn limited(&self, policy: Policy) -> LimitedKey {
        LimitedKey { storage: self.storage.clone(), policy, key: self.key.clone() }
    }

    /// Waits in a queue until the hit is admitted, the storage fails, or the hit cannot be admitted
    /// before the deadline. `refusal` is the refusal of its first attempt, if there was one.
    async fn wait(&self, mut entry: QueueEntry, mut refusal: Option<Refusal>, deadline: Instant) -> HitResult {
        loop {
            if timeout_at(later(deadline, GRACE), entry.turn()).await.is_err() {
                return self.give_up(entry).await;
            }
            refusal = entry.last_refusal().or(refusal);
            if let Some(end) = entry.end_of(refusal.as_ref()).filter(|end| *end > Instant::now()) {
                match refusal {
                    _ if end <= deadline => {
                        entry.sleep_until(past(end, deadline)).await;
                        // Newer hits may have been refused for longer.
                        continue;
                    }
                    Some(refusal) => return refusal.lasting_until(end).into_result(),
                    // The queue's refusal is for a smaller cost. An attempt gets the one for this
                    // cost.
                    None => {}
                }
            }
            let result;
            let watch = entry.watch();
            (entry, result) = watch.polls(self.attempt(entry)).await;
            match &result.decided {
                Ok(decision) if decision.is_refused() => {
                    let last = Refusal::new(decision.clone(), result.policy.clone());
                    entry.refused(&last);
                    if !last.ends_by(deadline) {
                        return result;
                    }
                    refusal = Some(last);
                }
                Ok(decision) => {
                    // The hits of this queue cannot spend units that are kept for others.
                    let kept = result.policy.limits().iter().map(Limit::kept).max().unwrap_or(0);
                    entry.admitted(decision.remaining().saturating_sub(kept));
                    return result;
                }
                Err(_) => {
                    entry.failed();
                    return result;
                }
            }
        }
    }

    /// Refuses a hit that had no turn before its deadline. Returns the queue's last refusal if it
    /// is for the same cost, else a peek.
    async fn give_up(&self, entry: QueueEntry) -> HitResult {
        if let Some(refusal) = entry.last_refusal() {
            return refusal.into_result();
        }
        drop(entry);
        let policy = self.policy.read().into_owned();
        let peeking = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Peek, self.cost));
        let decided = peeking.await.map(Decision::refuse_turn);
        HitResult { policy, decided }
    }
}

/// Returns `end`, plus jitter of up to a tenth of the time until then and at most [`MAX_JITTER`],
/// but not past the deadline. Without jitter, all keys whose windows end together would ask the
/// storage at the same instant, in all processes.
fn past(end: Instant, deadline: Instant) -> Instant {
    let wait = end.saturating_duration_since(Instant::now());
    let longest = (wait / 10).min(MAX_JITTER).min(deadline.saturating_duration_since(end));
    end + random_up_to(longest)
}

/// A hit in flight. If it is dropped, it continues in a task, and is refunded if it was admitted.
///
/// It keeps its entry in the queue until then. Otherwise the next hit would ask before the refund,
/// and would be refused. `None` while it is polled, so that `drop` does not poll it again after a
/// panic.
struct HitInFlight<E: Send + 'static>(Option<UndecidedHit<E>>);

struct UndecidedHit<E> {
    deciding: StorageFuture<Decision>,
    limited: LimitedKey,
    reporter: Option<Reporter>,
    entry: E,
}

impl<E: Send + 'static> Unpin for HitInFlight<E> {}

impl<E: Send + 'static> Future for HitInFlight<E> {
    type Output = (E, Result<Decision, StorageError>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut hit = self.0.take().expect("polled after it was ready");
        match Pin::new(&mut hit.deciding).poll(cx) {
            Poll::Ready(decided) => Poll::Ready((hit.entry, decided)),
            Poll::Pending => {
                self.0 = Some(hit);
                Poll::Pending
            }
        }
    }
}

impl<E: Send + 'static> Drop for HitInFlight<E> {
    fn drop(&mut self) {
        if let Some(UndecidedHit { deciding, limited, reporter, entry }) = self.0.take() {
            run_or_spawn(deciding, move |decided| {
                if let Ok(decision) = decided {
                    limited.refund(decision, reporter, entry);
                }
            });
        }
    }
}
