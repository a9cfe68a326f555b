//! Slices of a window that nodes take in one trip and spend without asking.

mod answers;
mod errand;
mod error;
mod job;
mod lease;
mod shared;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

pub use self::error::LeaseError;
use self::job::{Answer, Want};
use self::shared::{Doubt, Shared, Turn};
use crate::error::or_panic;
use crate::storage::around::table::MOST;
use crate::storage::{Ask, Clock, Shown, Storage, SystemClock};
use crate::{ConfigError, Decision, Key, Op, Policy};

/// Takes units of a fixed window from the storage inside by the slice, and spends them without asking: for the few keys that are hit
/// more often than a server can be asked, by several nodes at once.
///
/// A hit takes `slice` units in one trip, as if it cost so much; the next ones are answered here until the slice is spent. The storage
/// counts what is leased as spent, so all nodes together never admit more than the limit, whatever they do and however many there
/// are.
///
/// 1. A lease ends with its window. That is counted from before the storage was asked, by this machine's monotonic clock, so no unit
///    is spent after its window, however long the answer took and whatever the clocks of two machines say.
/// 2. No slice is larger than a sixteenth of what remains, as the storage said last, or of the limit, when a window begins; the last units are
///    taken one by one. A slice that is refused is tried with less, down to what the hit costs.
/// 3. Callers of one key wait for one trip, which asks for what all of them want. They need not stay: what was taken for one who has
///    left is left here for others.
/// 4. A [`refund`](Storage::refund) puts the units back into the slice they came from, or, when it is there no longer, gives them back to
///    the storage. A [`clear`](Storage::clear) drops the slice and clears the storage; slices of other nodes go on until their
///    windows end, so after a clear they may admit that much more.
/// 5. The remaining units that are told are those left here and those the storage said were left to everybody when it was last asked: at
///    least the former, at most both. A refusal is always the storage's, and tells what remained then.
/// 6. One node alone decides exactly as if there were no leases.
///
/// # What is left unused
///
/// What is leased and not spent when the window ends is lost to others, and while it is open it is what others are refused: of `n` nodes at
/// most `n - 1` slices, none of them more than a sixteenth of the limit. That is when all the others took a slice and had no hit since; where
/// nodes share the load evenly it is a fraction of that, as slices shrink while the window is used up. What is given back to a node, and what was
/// taken for callers who have left, is there besides, until it is spent.
///
/// A slice of a hundredth of the limit is a good one: it costs one or two trips for a hundred hits. On eight nodes with an even load half a percent of
/// the limit is unused when the first hit is refused, and where the demand is a quarter above the limit, all is spent before the
/// window ends. `BENCHMARKS.md` has the curves.
///
/// # Which policies
///
/// One [`FixedWindow`](crate::FixedWindow), anchored or aligned: all others are refused when policy and storage
/// [meet](Storage::validate), with an error that says what to write. Limits that are only tried out beside
/// one are asked of the storage as they are, and so is what is chosen for each request and is no fixed window. Keys that are hit seldom cost a slice of their window on each node that sees them: give them a
/// policy without leases.
///
/// # Bounds and failures
///
/// Up to 10,000 keys have a lease [unless it is said](Self::max_keys); when there is no room, the one that nobody has asked for the longest
/// gives back what it has left. What the storage cannot decide fails all who wait for it. A hit may wait for the answer that it came too late for and then for its own, two
/// deadlines of a server that hangs; give the storage inside half of what a request may take. Of a server that answers, it may be a few
/// answers one after the other. A storage that makes one wait needs a runtime of tokio's.
///
/// # Order
///
/// Put them around everything else: `Leases::new(RefusalCache::new(Breaker::new(redis).fallback(..)), 100)`. With a
/// [`RefusalCache`](super::RefusalCache) inside, a window that is used up is not asked for again and again; with a
/// [`Breaker`](super::Breaker) inside, what was leased is spent while Redis is away. Nothing is leased of a
/// [fallback](Decision::is_from_fallback): it admits its share.
///
/// ```
/// use tower_ratelimit::storage::Leases;
/// use tower_ratelimit::{FixedWindow, Key, MemoryStorage, Policy, Quota, RateLimiter};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In place of a server's.
/// let storage = Leases::new(MemoryStorage::new(), 100);
/// let policy = Policy::new(FixedWindow::new(), Quota::per_minute(100_000));
/// let limiter = RateLimiter::with_storage(policy, storage.clone());
///
/// for _ in 0..1_000 {
///     assert!(limiter.hit(&Key::everybody()).await?.is_admitted());
/// }
/// assert_eq!((storage.asked(), storage.answered()), (10, 990));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Leases<St: Storage>(Arc<Shared<St>>);

/// Unless told otherwise.
const MAX_KEYS: usize = 10_000;

impl<St: Storage> Leases<St> {
    /// Leases of `slice` units of what this storage keeps.
    ///
    /// # Panics
    ///
    /// When the slice is 0; [`try_new`](Self::try_new) returns an error instead.
    #[track_caller]
    pub fn new(storage: St, slice: u32) -> Self {
        or_panic(Self::try_new(storage, slice))
    }

    /// As [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// When the slice is 0.
    pub fn try_new(storage: St, slice: u32) -> Result<Self, ConfigError> {
        if slice == 0 {
            return Err(ConfigError::new(
                "a slice must be at least 1, for example 100: to take every unit by itself, leave the leases out",
            ));
        }
        Ok(Self(Arc::new(Shared::new(storage, slice, MAX_KEYS, Arc::new(SystemClock::new())))))
    }

    /// The same with no leases.
    fn with(self, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        Self(Arc::new(Shared::new(self.0.inner.clone(), self.0.slice, max_keys, clock)))
    }

    /// How many keys have a lease at most, 10,000 unless it is said. Say it before they are used: leases are left behind.
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
                "max_keys must be at least 1 and at most 100 million, for example 10_000: where no key is to have a lease, leave the leases out",
            ));
        }
        let clock = Arc::clone(&self.0.clock);
        Ok(self.with(max_keys, clock))
    }

    /// Another clock than the system's, for what passes here: for tests. It need not agree with the storage's.
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        let max_keys = self.0.max_keys;
        self.with(max_keys, Arc::new(clock))
    }

    /// The storage inside.
    pub fn inner(&self) -> &St {
        &self.0.inner
    }

    /// How many hits have been answered without a trip of their own.
    pub fn answered(&self) -> u64 {
        self.0.tally.counted().0
    }

    /// How often the storage has been asked for units.
    pub fn asked(&self) -> u64 {
        self.0.tally.counted().1
    }

    /// How many keys have a lease of a window that is open.
    pub fn held(&self) -> usize {
        self.0.held()
    }

    fn done(&self, turn: Turn<St>, inside: impl FnOnce(&St) -> St::Done) -> Change<St> {
        Change(match turn {
            Turn::Here(_) => Doing::Here,
            Turn::Wait(answer) => Doing::Wait(answer),
            Turn::Inside => Doing::Inside(inside(&self.0.inner), None),
        })
    }
}

/// Whether slices can be taken of it: one fixed window. What is only tried out has none.
fn check(policy: &Policy) -> Result<(), ConfigError> {
    if policy.is_shadow() || is_leased(policy) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "leases are slices of one fixed window, and {policy} is something else: write for example \
         \"fixed-window 10000/minute\", or leave the leases out"
    )))
}

fn is_leased(policy: &Policy) -> bool {
    match policy.limits() {
        [limit] if !policy.is_shadow() => matches!(limit.strategy().name(), "fixed-window" | "fixed-window-aligned"),
        _ => false,
    }
}

impl<St: Storage> Storage for Leases<St> {
    type Error = LeaseError;
    type Decided = Deciding<St>;
    type Done = Change<St>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        Deciding(match self.0.decide(&ask, is_leased(ask.policy)) {
            Turn::Here(decision) => Progress::Here(Some(decision)),
            Turn::Wait(answer) => Progress::Wait(answer, Question::new(&self.0, &ask)),
            Turn::Inside => Progress::Inside(self.0.inner.decide(ask)),
        })
    }

    #[inline]
    fn hit_at_once(&self, ask: Ask<'_>, shown: Option<&mut Shown>) -> bool {
        if ask.op == Op::Peek || ask.cost == 0 {
            return false;
        }
        if let Some(decision) = self.0.take(&ask) {
            if let Some(shown) = shown {
                *shown = Shown { at: decision.at(), limit: *decision.shown() };
            }
            return true;
        }
        !is_leased(ask.policy) && !self.0.knows(ask.policy, ask.key) && self.0.inner.hit_at_once(ask, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let mut change = self.done(self.0.have_done(policy, key, Want::Clear), |inner| inner.clear(policy, key));
        if let Doing::Inside(_, doubt) = &mut change.0 {
            *doubt = Some(Doubt::new(&self.0, policy, key));
        }
        change
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        if decision.is_refused() || decision.cost() == 0 {
            return Change(Doing::Here);
        }
        let turn = self.0.put_back(policy, key, decision).unwrap_or(Turn::Inside);
        self.done(turn, |inner| inner.refund(policy, key, decision))
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        check(policy)?;
        self.0.inner.validate(policy)
    }
}

/// Shows what is counted.
impl<St: Storage> fmt::Debug for Leases<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (answered, asked) = self.0.tally.counted();
        f.debug_struct("Leases")
            .field("inner", &self.0.inner)
            .field("slice", &self.0.slice)
            .field("max_keys", &self.0.max_keys)
            .field("held", &self.held())
            .field("answered", &answered)
            .field("asked", &asked)
            .finish_non_exhaustive()
    }
}

/// An answer of [`Leases`], on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Deciding<St: Storage>(Progress<St>);

#[allow(clippy::large_enum_variant, reason = "it is polled where it is made; boxing would cost a hit an allocation")]
enum Progress<St: Storage> {
    Here(Option<Decision>),
    Wait(oneshot::Receiver<Answer<St>>, Question<St>),
    Inside(St::Decided),
}

/// What a caller wants to know, who may have to ask by itself.
struct Question<St: Storage> {
    shared: Arc<Shared<St>>,
    policy: Policy,
    key: Key,
    op: Op,
    cost: u32,
}

impl<St: Storage> Question<St> {
    fn new(shared: &Arc<Shared<St>>, ask: &Ask<'_>) -> Self {
        let (shared, policy, key) = (Arc::clone(shared), ask.policy.clone(), ask.key.clone());
        Self { shared, policy, key, op: ask.op, cost: ask.cost }
    }

    fn ask(&self) -> St::Decided {
        self.shared.inner.decide(Ask::new(&self.policy, &self.key, self.op, self.cost))
    }
}

impl<St: Storage> Future for Deciding<St> {
    type Output = Result<Decision, LeaseError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let asked = match &mut self.0 {
                Progress::Here(decision) => {
                    return Poll::Ready(Ok(decision.take().expect("polled after it has answered")));
                }
                Progress::Inside(decided) => return Pin::new(decided).poll(cx).map_err(LeaseError::storage),
                Progress::Wait(answer, question) => match ready!(Pin::new(answer).poll(cx)) {
                    Ok(Ok(Some(given))) => return Poll::Ready(given.claim().ok_or_else(LeaseError::ended)),
                    Ok(Ok(None)) => question.ask(),
                    Ok(Err(error)) => return Poll::Ready(Err(error)),
                    Err(_) => return Poll::Ready(Err(LeaseError::ended())),
                },
            };
            self.0 = Progress::Inside(asked);
        }
    }
}

/// A change through [`Leases`], on its way.
#[must_use = "futures do nothing unless they are polled"]
pub struct Change<St: Storage>(Doing<St>);

enum Doing<St: Storage> {
    Here,
    Wait(oneshot::Receiver<Answer<St>>),
    /// And what is dropped when a clear is over that others did not wait for.
    Inside(St::Done, Option<Doubt<St>>),
}

impl<St: Storage> Future for Change<St> {
    type Output = Result<(), LeaseError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match &mut self.0 {
            Doing::Here => Ok(()),
            Doing::Inside(done, doubt) => {
                let done = ready!(Pin::new(done).poll(cx));
                drop(doubt.take());
                done.map_err(LeaseError::storage)
            }
            Doing::Wait(answer) => match ready!(Pin::new(answer).poll(cx)) {
                Ok(answer) => answer.map(drop),
                Err(_) => Err(LeaseError::ended()),
            },
        })
    }
}

impl<St: Storage> fmt::Debug for Deciding<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deciding").finish_non_exhaustive()
    }
}

impl<St: Storage> fmt::Debug for Change<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Change").finish_non_exhaustive()
    }
}
