//! Hits that wait until they are admitted.
//!
//! The hits of one policy and key wait in a queue, and only the first of a queue asks the storage.
//! So a window that turns causes one storage call for each hit that it admits, and one for the first
//! hit that it refuses.

mod attempt;
mod queues;
mod refusal;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use self::attempt::Attempt;
pub(crate) use self::attempt::Spent;
pub(crate) use self::queues::Queues;
pub(crate) use self::refusal::Refusal;
use crate::storage::StorageRequest;
use crate::{Decision, Key, Op, Policy, SharedPolicy, Storage};

/// The maximum jitter after the end of a refusal.
const MAX_JITTER: Duration = Duration::from_secs(1);

/// The time by which a hit in a queue may exceed its deadline, if units become available just at
/// the deadline. Timers are up to a millisecond late, and the hits ahead need their decisions first.
const GRACE: Duration = Duration::from_millis(10);

/// After a storage failure, each hit of a queue asks the storage itself, within this time.
const MAX_SPREAD: Duration = Duration::from_millis(100);

/// The maximum wait. An `Instant` in a more distant future can overflow on some systems.
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 365 * 86_400);

/// A hit that can be made several times, until it is admitted.
pub(crate) struct Waiter<St> {
    pub(crate) storage: St,
    /// Each attempt reads it, so the attempts follow a live policy.
    pub(crate) policy: SharedPolicy,
    pub(crate) key: Key,
    pub(crate) cost: u32,
}

/// The last attempt of a hit.
pub(crate) struct Attempted<St: Storage> {
    pub(crate) policy: Policy,
    pub(crate) decided: Result<Decision, St::Error>,
}

impl<St: Storage> Waiter<St> {
    /// Makes the hit once. If the future is dropped, an admitted hit is refunded.
    pub(crate) async fn attempt(&self) -> Attempted<St> {
        let policy = self.policy.read().into_owned();
        let deciding = self.storage.decide(StorageRequest::new(&policy, &self.key, Op::Hit, self.cost));
        let spent = Spent::new(self.storage.clone(), policy.clone(), self.key.clone());
        Attempted { policy, decided: Attempt::new(deciding, spent).await }
    }

    /// Waits after a refusal, until the hit is admitted, or cannot be admitted before the deadline.
    pub(crate) async fn wait(&self, queues: &Queues, mut refusal: Refusal, deadline: Instant) -> Attempted<St> {
        while refusal.ends_by(deadline) {
            let place = queues.join(refusal.policy().digest(), &self.key);
            place.record(&refusal);
            let Ok(turn) = timeout_at(later(deadline, GRACE), place.turn()).await else {
                return place.latest(refusal).into_attempted();
            };
            // The queue was dissolved after a storage failure.
            if turn.is_none() {
                sleep(random_up_to(MAX_SPREAD)).await;
            }
            loop {
                if turn.is_some() {
                    refusal = place.latest(refusal);
                    let end = place.end_of(&refusal);
                    if end > deadline {
                        return refusal.lasting_until(end).into_attempted();
                    }
                    if end > Instant::now() {
                        sleep_past(end, deadline).await;
                        // Newer hits may have been refused for longer.
                        continue;
                    }
                }
                let Attempted { policy, decided } = self.attempt().await;
                match decided {
                    Ok(decision) if decision.is_refused() => {
                        refusal = Refusal::new(decision, policy);
                        place.record(&refusal);
                    }
                    Ok(decision) => {
                        place.forget_refusal();
                        return Attempted { policy, decided: Ok(decision) };
                    }
                    Err(error) => {
                        place.dissolve();
                        return Attempted { policy, decided: Err(error) };
                    }
                }
                if turn.is_none() || !refusal.ends_by(deadline) {
                    break;
                }
            }
        }
        refusal.into_attempted()
    }
}

/// Sleeps until `end`, plus jitter of up to a tenth of that time, but not past the deadline. Without
/// jitter, all keys whose windows turn together would ask the storage at the same instant, in all
/// processes.
async fn sleep_past(end: Instant, deadline: Instant) {
    let wait = end.saturating_duration_since(Instant::now());
    let longest = (wait / 10).min(MAX_JITTER).min(deadline.saturating_duration_since(end));
    sleep_until(end + random_up_to(longest)).await;
}

fn random_up_to(longest: Duration) -> Duration {
    let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX - 1);
    Duration::from_micros(RandomState::new().hash_one(micros) % (micros + 1))
}

/// Returns the instant after `wait`, which can be any duration.
pub(crate) fn later(instant: Instant, wait: Duration) -> Instant {
    instant.checked_add(wait.min(LONGEST_WAIT)).unwrap_or(instant)
}
