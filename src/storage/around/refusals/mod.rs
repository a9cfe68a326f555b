//! A cache of refusals in front of a storage.

mod held;
mod known;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use self::known::{Beginning, Known, UnderWay};
use crate::error::or_panic;
use crate::storage::around::table::MOST;
use crate::storage::{Ask, Clock, Shown, Storage, SystemClock};
use crate::time::micros;
use crate::{ConfigError, Decision, Key, Op, Policy};

/// Caches refusals, so that refused clients barely reach the storage.
///
/// While a client is refused, each process asks the storage once for as long as the refusal says, or
/// once per [`life`](Self::life) (defaults to one second) if that is shorter. When a life is over, one
/// caller asks again. The others get the cached answer meanwhile, for one more life at most. Callers that
/// come before the first refusal has arrived ask the storage too.
///
/// A client cannot get past the cache by varying the cost of its requests: after at most four costs of
/// one key, all other costs are answered here.
///
/// # Cache hits
///
/// 1. A refusal at some cost refuses all larger costs until its `retry_after` is over. It also reports the
///    remaining units, and refuses all costs above those until more units come back. A quota that has
///    changed under the policy's name has entries of its own.
/// 2. A cached refusal is the storage's answer, as long as nobody else has changed the key. `retry_after`
///    and `reset_after` are what is left of them, at most one round trip too long. If units have come back
///    meanwhile, the remaining units are a lower bound.
/// 3. The wait of another cost is known for a fixed window, for a cost that can never fit, and for the
///    cost that is one unit above what remains. Otherwise the storage is asked once for that cost. Up to
///    four costs of one key are cached. While they are, and while a caller is asking, the wait of any
///    other cost is a lower bound: the client may have to wait again, and is never made to wait longer
///    than necessary. For a token bucket it is at most one microsecond too short.
/// 4. The time of an entry counts from before the storage was asked. So a refusal never outlives its
///    reason, however long its answer took.
///
/// # What is not cached
///
/// - Peeks, hits of cost 0, and costs that may fit into what remains.
/// - Policies with an elastic window: each refusal moves the window's end, so each has to reach the storage.
/// - Policies with a leaky bucket: dropped requests give their places back at any time.
/// - Refusals that are [contended](Decision::is_contended), [crowded](Decision::is_crowded) or
///   [from a fallback](Decision::is_from_fallback).
///
/// For these, a refused client reaches the storage with every request.
///
/// # What ends it early
///
/// A [`clear`](Storage::clear) or [`refund`](Storage::refund) by a handle on this cache drops the entries of
/// its key. So does an admitted hit, because fewer units remain. A refusal that was decided before that
/// and arrives later is not cached. What other processes clear and give back, and what the storage
/// loses, shows when the life is over and the storage has been asked.
///
/// # Bounds
///
/// [`max_keys`](Self::max_keys) bounds the number of cached keys. It defaults to 100,000. A key takes
/// some 300 bytes for each of its up to four costs. Sixteen keys share a bucket. When a bucket is full,
/// the key whose refusal ends first is evicted. So an attacker with many keys makes the storage be asked
/// more often, and gets nothing else.
///
/// # Order
///
/// Put it around the [`Breaker`](super::Breaker), if there is one: `RefusalCache::new(Breaker::new(redis).fallback(..))`. So who is known to
/// be refused stays refused while Redis is away, and what the cache answers is not taken for a sign of life. Refusals by a
/// [fallback](Decision::is_from_fallback) are not kept. Around the memory storage there is nothing to win.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RefusalCache;
/// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In place of a server's.
/// let storage = RefusalCache::new(MemoryStorage::new()).life(Duration::from_millis(500));
/// let limiter = RateLimiter::with_storage(Quota::per_hour(1), storage.clone());
/// let alice = Key::from("alice");
///
/// assert!(limiter.hit(&alice).await?.is_admitted());
/// for _ in 0..100 {
///     assert!(limiter.hit(&alice).await?.is_refused());
/// }
/// assert_eq!((storage.asked(), storage.answered(), storage.held()), (2, 99, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RefusalCache<St> {
    inner: St,
    known: Arc<Known>,
}

/// Unless told otherwise.
const MAX_KEYS: usize = 100_000;
const LIFE: u64 = 1_000_000;

impl<St: Storage> RefusalCache<St> {
    /// A cache in front of this storage.
    pub fn new(storage: St) -> Self {
        Self { inner: storage, known: Arc::new(Known::new(MAX_KEYS, LIFE, Arc::new(SystemClock::new()))) }
    }

    /// The same with nothing in it.
    fn with(self, max_keys: usize, life: u64, clock: Arc<dyn Clock>) -> Self {
        Self { known: Arc::new(Known::new(max_keys, life, clock)), ..self }
    }

    /// For how long a refusal is answered without asking, a second unless it is said: after that the storage is asked again, and what
    /// others have cleared, given back or changed shows. Say it before the cache is used: what it knows is gone.
    ///
    /// # Panics
    ///
    /// When it is less than a millisecond or more than a day; [`try_life`](Self::try_life) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn life(self, life: Duration) -> Self {
        or_panic(self.try_life(life))
    }

    /// As [`life`](Self::life).
    ///
    /// # Errors
    ///
    /// When it is less than a millisecond or more than a day.
    pub fn try_life(self, life: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(&life) {
            return Err(ConfigError::new(format!(
                "a life of {life:?} cannot be: use at least a millisecond and at most a day, \
                 for example Duration::from_secs(1)"
            )));
        }
        let (max_keys, clock) = (self.known.max_keys, Arc::clone(&self.known.clock));
        Ok(self.with(max_keys, micros(life), clock))
    }

    /// Of how many keys refusals are kept at most, 100,000 unless it is said. Say it before the cache is used.
    ///
    /// # Panics
    ///
    /// When it is 0 or more than 100 million; [`try_max_keys`](Self::try_max_keys) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn max_keys(self, max_keys: usize) -> Self {
        or_panic(self.try_max_keys(max_keys))
    }

    /// As [`max_keys`](Self::max_keys).
    ///
    /// # Errors
    ///
    /// When it is 0 or more than 100 million.
    pub fn try_max_keys(self, max_keys: usize) -> Result<Self, ConfigError> {
        if max_keys == 0 || max_keys > MOST {
            return Err(ConfigError::new(
                "max_keys must be at least 1 and at most 100 million, for example 100_000: to keep no refusals, leave the cache out",
            ));
        }
        let (life, clock) = (self.known.life, Arc::clone(&self.known.clock));
        Ok(self.with(max_keys, life, clock))
    }

    /// Another clock than the system's, for what passes here: for tests. It need not agree with the storage's.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let (max_keys, life) = (self.known.max_keys, self.known.life);
        self.with(max_keys, life, Arc::new(clock))
    }

    /// The storage inside.
    pub fn inner(&self) -> &St {
        &self.inner
    }

    /// How many hits have been refused from what is known.
    pub fn answered(&self) -> u64 {
        self.known.tally.counted().0
    }

    /// How many hits the storage has been asked to decide.
    pub fn asked(&self) -> u64 {
        self.known.tally.counted().1
    }

    /// Of how many keys a refusal is kept; some of them may be over, as nobody has come by since.
    pub fn held(&self) -> usize {
        self.known.held()
    }

    fn change(&self, policy: &Policy, key: &Key, change: impl FnOnce(&St) -> St::Done) -> Change<St::Done> {
        // It may be done as soon as it is asked for, or whenever it is polled; so what is known is dropped then, and again when it is
        // done or given up.
        let doubt = Doubt { known: Arc::clone(&self.known), policy: policy.clone(), key: key.clone() };
        let done = change(&self.inner);
        doubt.known.forget(policy, key);
        Change { done, doubt: Some(doubt) }
    }
}

impl<St: Storage> Storage for RefusalCache<St> {
    type Error = St::Error;
    type Decided = Answer<St::Decided>;
    type Done = Change<St::Done>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        if ask.op == Op::Peek || ask.cost == 0 {
            return Answer(Progress::Asked(self.inner.decide(ask), None));
        }
        match self.known.begin(&ask) {
            Beginning::Known(decision) => Answer(Progress::Known(Some(decision))),
            Beginning::Ask(under_way) => Answer(Progress::Asked(self.inner.decide(ask), Some(under_way))),
        }
    }

    fn hit_at_once(&self, ask: Ask<'_>, shown: Option<&mut Shown>) -> bool {
        if ask.cost == 0 {
            return self.inner.hit_at_once(ask, shown);
        }
        // The decision that is asked for next says the rest.
        if self.known.knows(&ask) || !self.inner.hit_at_once(ask, shown) {
            return false;
        }
        self.known.tally.asked(ask.policy);
        self.known.forget(ask.policy, ask.key);
        true
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        self.change(policy, key, |storage| storage.clear(policy, key))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        self.change(policy, key, |storage| storage.refund(policy, key, decision))
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        self.inner.clients_to_fill(policy)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.inner.validate(policy)
    }
}

/// Shows what is counted.
impl<St: fmt::Debug> fmt::Debug for RefusalCache<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (answered, asked) = self.known.tally.counted();
        f.debug_struct("RefusalCache")
            .field("inner", &self.inner)
            .field("life", &Duration::from_micros(self.known.life))
            .field("max_keys", &self.known.max_keys)
            .field("held", &self.known.held())
            .field("answered", &answered)
            .field("asked", &asked)
            .finish_non_exhaustive()
    }
}

/// An answer of a [`RefusalCache`], on its way.
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct Answer<F>(Progress<F>);

#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "it is polled where it is made; boxing would cost a refusal an allocation"
)]
enum Progress<F> {
    Known(Option<Decision>),
    Asked(F, Option<UnderWay>),
}

impl<F, E> Future for Answer<F>
where
    F: Future<Output = Result<Decision, E>> + Unpin,
{
    type Output = Result<Decision, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Progress::Known(decision) => Poll::Ready(Ok(decision.take().expect("polled after it has answered"))),
            Progress::Asked(asked, under_way) => {
                let answer = std::task::ready!(Pin::new(asked).poll(cx));
                if let (Some(under_way), Ok(decision)) = (under_way.take(), &answer) {
                    under_way.decided(decision);
                }
                Poll::Ready(answer)
            }
        }
    }
}

/// A change through a [`RefusalCache`], on its way.
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct Change<F> {
    done: F,
    doubt: Option<Doubt>,
}

impl<F: Future + Unpin> Future for Change<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let done = std::task::ready!(Pin::new(&mut self.done).poll(cx));
        drop(self.doubt.take());
        Poll::Ready(done)
    }
}

/// While a change is under way; what is known when it ends is from before.
#[derive(Debug)]
struct Doubt {
    known: Arc<Known>,
    policy: Policy,
    key: Key,
}

impl Drop for Doubt {
    fn drop(&mut self) {
        self.known.forget(&self.policy, &self.key);
    }
}
