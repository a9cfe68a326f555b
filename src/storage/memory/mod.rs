mod builder;
mod decide;
mod evict;
mod insert;
mod logs;
#[cfg(all(test, tower_ratelimit_loom))]
mod loom;
mod multi;
mod padded;
mod refusal_hint;
mod shard;
mod single;
mod slot;
mod stats;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod time;
mod usage;

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::hash::{BuildHasher, Hasher};
use std::hint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, TryLockError};

use foldhash::quality::RandomState;

pub use self::builder::{MemoryStorageBuilder, OnFull};
use self::decide::{Want, with_states};
use self::padded::Padded;
use self::shard::{KeyHash, Shard};
use self::stats::Counts;
pub use self::stats::MemoryStats;
use self::time::Time;
use self::usage::{Bounds, Size, Usage};
use super::{Storage, StorageRequest, Summary};
use crate::sync::MutexGuard;
use crate::{Decision, Key, Op, Policy};

/// Keeps states in this process: sharded, bounded and exact, without a background task. The default.
///
/// Clones are handles on the same states. It cannot fail.
///
/// # Bounds
///
/// It holds at most 1,000,000 keys ([`max_keys`](MemoryStorageBuilder::max_keys)) and at most 128 bytes
/// for each of them ([`max_bytes`](MemoryStorageBuilder::max_bytes)). Both bounds hold at every instant,
/// and the bytes are exact to within 10 %, beside about 3 kB for each of its shards. A shard is for 8,192
/// keys.
///
/// Logs of moving windows take at most half of the bytes. A log is long if it takes more than a
/// ten-thousandth of that half, and more than 128 entries do. Long logs take at most three quarters of
/// that half, so that other clients have room beside them.
///
/// Each hit and each peek does a little sweeping. Expired keys are soon gone, even if their clients
/// never come back. After a flood of keys has expired, the next few thousand hits give its memory back.
///
/// # When it is full
///
/// - A newcomer evicts a key. It looks at a few keys, first in its own shard and then in all others. An
///   expired key goes first, else the one that would be forgotten soonest. A key that is being refused is
///   never evicted, so a flood of new keys frees no key from its limit.
/// - If all keys that it looked at are being refused, the newcomer is refused. Such a decision is
///   [storage full](Decision::is_storage_full). With [`OnFull::Admit`] it is admitted and not stored.
/// - A log that has to grow evicts the keys of other logs if it is short. A long log that cannot grow
///   refuses its own client, and no other one, until its oldest entry expires.
///
/// A key is being refused if no unit is left to it. A key that is refused only because it asked for more
/// than it has left may be evicted. Policies that share a storage share its room. [`stats`](Self::stats)
/// counts the hits that found no room.
///
/// # Bytes of a client
///
/// A state takes 40 bytes. A moving window has a log beside it: 16 bytes for each hit up to 128 hits, and
/// four to six for longer logs. The table shows clients that have used up one limit, by hits that are
/// spread over the period, in a storage with the default bounds.
///
#[doc = include_str!("capacity.md")]
///
/// # Collisions
///
/// The storage keeps a keyed hash of each key and not the key itself. It has 95 bits, and the secret is
/// random. Two keys collide by chance once in 2^95, and an attacker cannot aim at a collision.
///
/// # Examples
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
    usage: Usage,
    bounds: Bounds,
    on_full: OnFull,
    counts: Counts,
    /// Until then no shard is looked at for a key to evict, and for a log to evict: microseconds.
    full_until: [AtomicU64; 2],
    /// The shard that is being swept.
    sweeping: AtomicUsize,
    secrets: [RandomState; 2],
    clock: Time,
}

/// So many keys share a lock, when the storage is full. Small tables: no insert has much to move when one grows.
const KEYS_PER_SHARD: usize = 8_192;

impl MemoryStorage {
    /// Creates a storage for up to 1,000,000 keys and 128 MB, with the system's time.
    pub fn new() -> Self {
        Self::builder().build().unwrap_or_else(|_| unreachable!("the defaults are valid"))
    }

    /// Returns a builder for a storage with other bounds or another clock.
    pub fn builder() -> MemoryStorageBuilder {
        MemoryStorageBuilder::new()
    }

    fn with(bounds: Bounds, on_full: OnFull, clock: Time) -> Self {
        let shards = (bounds.keys / KEYS_PER_SHARD).clamp(1, 4_096).next_power_of_two();
        Self(Arc::new(Shared {
            shards: (0..shards).map(|_| Padded::default()).collect(),
            shift: u64::BITS - shards.trailing_zeros(),
            usage: Usage::default(),
            bounds,
            on_full,
            counts: Counts::default(),
            full_until: Default::default(),
            sweeping: AtomicUsize::new(0),
            secrets: [RandomState::default(), RandomState::default()],
            clock,
        }))
    }

    /// Whether a hit goes on at once; if not, it has been refused.
    pub(crate) fn admit(&self, ask: &StorageRequest<'_>) -> bool {
        self.0.try_admit(ask, Want::AtOnce, None)
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

    /// Returns what the storage holds, and how many hits found no room.
    pub fn stats(&self) -> MemoryStats {
        self.0.counts.stats(self.0.usage.size())
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
            .field("stats", &self.stats())
            .field("max_keys", &self.0.bounds.keys)
            .field("max_bytes", &self.0.bounds.bytes)
            .field("clock", &self.0.clock)
            .finish_non_exhaustive()
    }
}

impl Storage for MemoryStorage {
    type Error = Infallible;
    type DecideFuture = Ready<Result<Decision, Infallible>>;
    type UpdateFuture = Ready<Result<(), Infallible>>;

    #[inline]
    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        ready(Ok(self.0.decide(&ask)))
    }

    #[inline]
    fn try_admit(&self, ask: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        ask.op == Op::Hit && self.0.try_admit(&ask, Want::Yes, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let (key, number) = self.0.locate(policy, key);
        let mut shard = self.0.lock(number);
        self.0.shards[number].retract(key.hash);
        let freed = shard.clear(key, policy.limit_digests());
        drop(shard);
        self.0.usage.settle(freed, Size::default());
        ready(Ok(()))
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        let (key, number) = self.0.locate(policy, key);
        let read = self.0.clock.now();
        let mut shard = self.0.lock(number);
        self.0.shards[number].retract(key.hash);
        let now = shard.time(read, &self.0.clock);
        with_states(policy, |states| {
            let run = shard.run(key);
            let before = shard.load(run.clone(), key, policy.limit_digests(), states);
            policy.refund(states, now, decision);
            let peek = policy.decide(states, now, Op::Peek, 1);
            let after = shard.save(run, key, policy.limit_digests(), states, now, Some(peek.limits()));
            self.0.usage.settle(before, after);
        });
        // The key may be one that can be evicted now.
        self.0.full_until.iter().for_each(|until| until.store(0, Ordering::Relaxed));
        ready(Ok(()))
    }

    fn clients_to_fill(&self, policy: &Policy) -> Option<u64> {
        Some(self.0.bounds.clients(policy) as u64)
    }
}

impl Shared {
    /// Forgets all keys. Returns how many there were.
    fn forget_all(&self) -> u64 {
        let forget = |number: usize| {
            let mut shard = self.lock(number);
            self.shards[number].take_down_any();
            let freed = shard.reset();
            drop(shard);
            self.usage.settle(freed, Size::default());
            freed.keys as u64
        };
        (0..self.shards.len()).map(forget).sum()
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
