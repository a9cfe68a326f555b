mod decide;
mod few;
#[cfg(all(test, tower_ratelimit_loom))]
mod loom;
mod newcomer;
mod notice;
mod one;
mod padded;
mod room;
mod shard;
mod slot;
mod table;
mod time;

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::hash::{BuildHasher, Hasher};
use std::hint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, TryLockError};

use foldhash::quality::RandomState;

use self::decide::{Want, with_states};
use self::padded::Padded;
use self::shard::{KeyHash, Shard};
use self::time::Time;
use super::{Ask, Clock, Shown, Storage, SystemClock};
use crate::sync::MutexGuard;
use crate::{ConfigError, Decision, Key, Op, Policy, Timestamp};

/// Keeps states in this process: sharded, bounded, exact, with no task in the background. The default.
///
/// Clones are handles on the same states. It cannot fail.
///
/// # Bounds
///
/// At most a million keys are kept unless [told otherwise](MemoryStorageBuilder::max_keys), each of about forty bytes for
/// one limit. The bound counts weight: one for a key, and as much again for every 128 bytes of a moving window's log.
///
/// Each hit does a little sweeping, so what has expired is soon gone without anybody coming back for it. When all the room
/// is taken, a few keys are looked at to make some: one that has expired goes first, else the one that would be forgotten
/// soonest of those that would be admitted anyway. A key that is being refused is never thrown out, so a flood of new
/// keys frees nobody. If all that were looked at are being refused, the newcomer is not stored but refused itself: such a
/// decision [is crowded](Decision::is_crowded), its `retry_after` is the soonest of theirs, and
/// [`crowded`](Self::crowded) counts it.
///
/// A key is being refused when not one unit is left to it; one that is refused only for asking more than it has left may be
/// thrown out. Policies that share a storage share its room: keys refused for a day by one crowd the newcomers of another. A
/// log that has to grow makes room in the same way, but where no other key can make room for it, because there is none, it
/// grows beyond the bound.
///
/// Keys themselves are not kept, only a keyed hash of each, 95 bits and which shard, with a secret of this storage's own: two
/// keys meet by chance once in 2^95, and nobody outside knows where to aim.
///
/// ```
/// use tower_ratelimit::{MemoryStorage, Quota, RateLimiter};
///
/// let storage = MemoryStorage::builder().max_keys(100_000).build()?;
/// let limiter = RateLimiter::with_storage(Quota::per_minute(60), storage);
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct MemoryStorage(Arc<Shared>);

struct Shared {
    shards: Box<[Padded]>,
    /// How far to shift a hash for the number of its shard.
    shift: u32,
    weight: AtomicUsize,
    max_weight: usize,
    crowded: AtomicU64,
    /// The shard that is being swept.
    sweeping: AtomicUsize,
    secrets: [RandomState; 2],
    clock: Time,
}

/// Unless told otherwise.
const MAX_KEYS: usize = 1_000_000;

/// So many keys share a lock, when the storage is full. Small tables: no insert has much to move when one grows.
const KEYS_PER_SHARD: usize = 8_192;

impl MemoryStorage {
    /// A storage for up to a million keys, with the system's time.
    pub fn new() -> Self {
        Self::with(MAX_KEYS, Time::System(SystemClock::new()))
    }

    /// A storage with other bounds or another clock.
    pub fn builder() -> MemoryStorageBuilder {
        MemoryStorageBuilder { max_keys: MAX_KEYS, clock: None }
    }

    fn with(max_keys: usize, clock: Time) -> Self {
        let shards = (max_keys / KEYS_PER_SHARD).clamp(1, 4_096).next_power_of_two();
        Self(Arc::new(Shared {
            shards: (0..shards).map(|_| Padded::default()).collect(),
            shift: u64::BITS - shards.trailing_zeros(),
            weight: AtomicUsize::new(0),
            max_weight: max_keys,
            crowded: AtomicU64::new(0),
            sweeping: AtomicUsize::new(0),
            secrets: [RandomState::default(), RandomState::default()],
            clock,
        }))
    }

    /// Whether a hit goes on at once; if not, it has been refused.
    pub(crate) fn admit(&self, ask: &Ask<'_>) -> bool {
        self.0.hit_at_once(ask, Want::AtOnce, None)
    }

    /// Forgets all keys of all policies. Returns how many there were. Hits that happen meanwhile may stay.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryStorage, Quota, RateLimiter};
    ///
    /// let storage = MemoryStorage::new();
    /// let limiter = RateLimiter::with_storage(Quota::per_day(1), storage.clone());
    /// assert!(limiter.admit(&Key::from("alice")) && !limiter.admit(&Key::from("alice")));
    /// assert_eq!(storage.reset(), 1);
    /// assert!(limiter.admit(&Key::from("alice")));
    /// ```
    pub fn reset(&self) -> u64 {
        self.0.forget_all()
    }

    /// The weight of all that is kept: one for each key, and more for long logs.
    pub fn weight(&self) -> usize {
        self.0.weight.load(Ordering::Relaxed)
    }

    /// How many newcomers have been refused for want of room.
    pub fn crowded(&self) -> u64 {
        self.0.crowded.load(Ordering::Relaxed)
    }
}

impl Default for MemoryStorage {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStorage")
            .field("weight", &self.weight())
            .field("max_weight", &self.0.max_weight)
            .field("clock", &self.0.clock)
            .finish_non_exhaustive()
    }
}

impl Storage for MemoryStorage {
    type Error = Infallible;
    type Decided = Ready<Result<Decision, Infallible>>;
    type Done = Ready<Result<(), Infallible>>;

    #[inline]
    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        ready(Ok(self.0.decide(&ask)))
    }

    #[inline]
    fn hit_at_once(&self, ask: Ask<'_>, shown: Option<&mut Shown>) -> bool {
        ask.op == Op::Hit && self.0.hit_at_once(&ask, Want::Yes, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let (key, number) = self.0.locate(policy, key);
        let mut shard = self.0.lock(number);
        self.0.shards[number].take_down(key.hash);
        let freed = shard.clear(key, policy.limit_digests());
        drop(shard);
        self.0.weight.fetch_sub(freed, Ordering::Relaxed);
        ready(Ok(()))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        let (key, number) = self.0.locate(policy, key);
        let read = self.0.clock.now();
        let mut shard = self.0.lock(number);
        self.0.shards[number].take_down(key.hash);
        let now = shard.time(read, &self.0.clock);
        with_states(policy, |states| {
            let run = shard.run(key);
            let before = shard.load(run.clone(), key, policy.limit_digests(), states);
            policy.refund(states, now, decision);
            let peek = policy.decide(states, now, Op::Peek, 1);
            let after = shard.save(run, key, policy.limit_digests(), states, now, Some(peek.limits()));
            self.0.settle(before, after);
        });
        ready(Ok(()))
    }
}

impl Shared {
    /// Sweeps a part of the next shard.
    fn sweep(&self, now: Timestamp) {
        let number = self.sweeping.load(Ordering::Relaxed) % self.shards.len();
        // Somebody else's decision, or sweep, comes first.
        let Some(mut shard) = self.try_lock(number) else { return };
        let (freed, at_end) = shard.sweep(now);
        drop(shard);
        self.settle(freed, 0);
        if at_end {
            self.sweeping.store(number + 1, Ordering::Relaxed);
        }
    }

    /// Counts what has been stored or removed.
    #[inline]
    fn settle(&self, before: usize, after: usize) {
        if after > before {
            self.weight.fetch_add(after - before, Ordering::Relaxed);
        } else if before > after {
            self.weight.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    /// The key under this policy as a keyed hash, and the number of its shard.
    #[inline]
    fn locate(&self, policy: &Policy, key: &Key) -> (KeyHash, usize) {
        let words = key.as_words();
        let half = |secret: &RandomState| {
            let mut hasher = secret.build_hasher();
            if let Some(words) = words {
                hasher.write_u64(words[0]);
                hasher.write_u64(words[1]);
            } else {
                hasher.write(key.as_bytes());
            }
            hasher.finish()
        };
        let (first, second) = (half(&self.secrets[0]), half(&self.secrets[1]));
        let digest = policy.digest();
        #[allow(clippy::cast_possible_truncation)] // the halves of it
        let (hash, rest) = (first ^ (digest >> 64) as u64, second ^ digest as u64);
        let number = rest.checked_shr(self.shift).unwrap_or(0);
        #[allow(clippy::cast_possible_truncation)] // less than the number of shards; the other half
        let (number, rest) = (number as usize, rest as u32);
        (KeyHash { hash, rest }, number)
    }

    #[inline]
    fn lock(&self, number: usize) -> MutexGuard<'_, Shard> {
        self.try_lock(number).unwrap_or_else(|| self.lock_contended(number))
    }

    /// Whoever holds a shard does so for less than it takes to go to sleep and be woken, so waking is the last resort. Each
    /// time somebody was faster, the wait doubles: who is at work on a shard has it in its cache, and is let finish.
    #[cold]
    fn lock_contended(&self, number: usize) -> MutexGuard<'_, Shard> {
        for tries in 0..6 {
            for _ in 0..32 << tries.min(2) {
                hint::spin_loop();
            }
            if let Some(shard) = self.try_lock(number) {
                return shard;
            }
        }
        // A strategy of the user's that panics leaves a state as it was, or fresh: others can go on.
        self.shards[number].shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shard, unless somebody has it.
    #[inline]
    fn try_lock(&self, number: usize) -> Option<MutexGuard<'_, Shard>> {
        match self.shards[number].shard.try_lock() {
            Ok(shard) => Some(shard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Builds a [`MemoryStorage`] with other bounds or another clock.
#[derive(Debug)]
#[must_use]
pub struct MemoryStorageBuilder {
    max_keys: usize,
    clock: Option<Box<dyn Clock>>,
}

impl MemoryStorageBuilder {
    /// How many keys are kept at most, a million unless said. Keys with long logs count for several.
    pub fn max_keys(self, max_keys: usize) -> Self {
        Self { max_keys, ..self }
    }

    /// Another clock than the system's.
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Box::new(clock)), ..self }
    }

    /// The storage.
    ///
    /// # Errors
    ///
    /// When it may keep no keys: nothing would ever be limited.
    pub fn build(self) -> Result<MemoryStorage, ConfigError> {
        if self.max_keys == 0 {
            return Err(ConfigError::new(
                "max_keys must be at least 1, for example 1_000_000: a storage that keeps nothing limits nobody",
            ));
        }
        let clock = self.clock.map_or_else(|| Time::System(SystemClock::new()), Time::Other);
        Ok(MemoryStorage::with(self.max_keys, clock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Op, Quota};

    /// Field defect: a resize that stalls one request for milliseconds. No table is ever large, so none takes long to move.
    #[test]
    fn no_insert_grows_a_big_table() {
        let storage = MemoryStorage::builder().max_keys(200_000).build().unwrap();
        let policy = Policy::from(Quota::per_hour(9));
        for key in 0..200_000_u64 {
            let _ = storage.0.decide(&Ask::new(&policy, &key.into(), Op::Hit, 1));
        }
        assert_eq!(storage.weight(), 200_000);
        let slots: Vec<_> = (0..storage.0.shards.len()).map(|number| storage.0.lock(number).slots()).collect();
        let (all, largest) = (slots.iter().sum::<usize>(), slots.iter().max().unwrap());
        assert!(*largest < 2 * KEYS_PER_SHARD, "{largest} slots in one table");
        assert!(all < 200_000 * 4 / 3, "{all} slots for 200,000 keys");
    }

    #[test]
    fn time_goes_back_only_with_the_clock() {
        let clock = crate::storage::ManualClock::default();
        let (early, late) = (clock.now(), clock.now().plus(100));
        clock.set(late);
        let (mut shard, time) = (Shard::default(), Time::Other(Box::new(clock.clone())));
        assert_eq!(shard.time(late, &time), late);
        assert_eq!(shard.time(early, &time), late, "read before somebody else decided");
        clock.set(early);
        assert_eq!(shard.time(early, &time), early);
    }
}
