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

mod place;
mod queue;
mod room;

use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

pub(crate) use self::place::{Place, Queues};
pub(crate) use self::queue::{Refusal, later};
pub(crate) use self::room::{Pause, Stage, Turn, WaitBounds, WaitingRoom};
use crate::background::run_or_spawn;
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy, SharedPolicy};
use crate::reservation::Account;
use crate::reservation::Correction;
use crate::storage::{AnyStorage, Storage, StorageError, StorageFuture, StorageRequest};

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
    /// Called if an attempt was dropped and its refund fails.
    pub(crate) on_failed_refund: Option<OnFailedRefund>,
}

/// The last attempt of a hit.
pub(crate) struct Attempted {
    pub(crate) policy: Policy,
    pub(crate) decided: Result<Decision, StorageError>,
}

impl Waiter {
    /// Makes the hit once. If the future is dropped, an admitted hit is refunded, and `place` is
    /// dropped after that.
    ///
    /// If the hit would be delayed for too long, only peeks, because a refund would not free the
    /// slot of a delayed hit behind which others wait already. The result is then the admitted
    /// peek.
    pub(crate) async fn attempt<P: Send + 'static>(&self, place: P) -> (P, Attempted) {
        let policy = self.policy.read().into_owned();
        if let Some(latest) = self.delayed_until.filter(|_| policy.delays()) {
            let decided = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Peek, self.cost)).await;
            let left = latest.saturating_duration_since(Instant::now());
            if decided.as_ref().map_or(true, |peeked| peeked.delay() > left) {
                return (place, Attempted { policy, decided });
            }
        }
        let deciding = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Hit, self.cost));
        let spent = self.spent(policy.clone());
        let (place, decided) = Attempt::<P>::new(deciding, spent, place).await;
        (place, Attempted { policy, decided })
    }

    /// Returns the hit, for a refund.
    pub(crate) fn spent(&self, policy: Policy) -> Spent {
        let account = Account { storage: self.storage.clone(), policy, key: self.key.clone() };
        Spent::new(account, self.on_failed_refund.clone())
    }

    /// Adds the hit to the end of its queue before its first attempt, so that it does not overtake
    /// the hits that wait there. Returns `None` if no hit waits, if the hit costs nothing, or if it
    /// cannot be admitted before `deadline` according to the queue's last refusal. The caller then
    /// makes the first attempt without a place.
    pub(crate) fn join_behind(&self, queues: &Arc<Queues>, deadline: Instant) -> Option<Place> {
        if queues.is_empty() {
            return None;
        }
        let id = (self.policy.with(Policy::digest), self.key.clone());
        Place::behind(queues, id, self.cost, deadline)
    }

    /// Waits in a queue until the hit is admitted, the storage fails, or the hit cannot be admitted
    /// before the deadline. `refusal` is the refusal of its first attempt, if there was one.
    pub(crate) async fn wait(&self, mut place: Place, mut refusal: Option<Refusal>, deadline: Instant) -> Attempted {
        loop {
            if timeout_at(later(deadline, GRACE), place.turn()).await.is_err() {
                return self.give_up(place).await;
            }
            refusal = place.last_refusal().or(refusal);
            if let Some(end) = place.end_of(refusal.as_ref()).filter(|end| *end > Instant::now()) {
                match refusal {
                    _ if end <= deadline => {
                        place.sleep_until(past(end, deadline)).await;
                        // Newer hits may have been refused for longer.
                        continue;
                    }
                    Some(refusal) => return refusal.lasting_until(end).into_attempted(),
                    // The queue's refusal is for a smaller cost. An attempt gets the one for this
                    // cost.
                    None => {}
                }
            }
            let attempted;
            let watch = place.watch();
            (place, attempted) = watch.polls(self.attempt(place)).await;
            match &attempted.decided {
                Ok(decision) if decision.is_refused() => {
                    let last = Refusal::new(decision.clone(), attempted.policy.clone());
                    place.refused(&last);
                    if !last.ends_by(deadline) {
                        return attempted;
                    }
                    refusal = Some(last);
                }
                Ok(decision) => {
                    place.admitted(decision.remaining());
                    return attempted;
                }
                Err(_) => {
                    place.failed();
                    return attempted;
                }
            }
        }
    }

    /// Refuses a hit that had no turn before its deadline. Returns the queue's last refusal if it
    /// is for the same cost, else a peek.
    async fn give_up(&self, place: Place) -> Attempted {
        if let Some(refusal) = place.last_refusal() {
            return refusal.into_attempted();
        }
        drop(place);
        let policy = self.policy.read().into_owned();
        let peeking = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Peek, self.cost));
        let decided = peeking.await.map(Decision::refuse_turn);
        Attempted { policy, decided }
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

fn random_up_to(longest: Duration) -> Duration {
    let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX - 1);
    Duration::from_micros(RandomState::new().hash_one(micros) % (micros + 1))
}

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
        run_or_spawn(self.account.correct(decision, Correction::Cost(0)), move |done| {
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
