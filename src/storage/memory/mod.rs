mod answer;
mod builder;
mod decide;
mod evict;
mod general;
mod insert;
mod logs;
mod lookup;
#[cfg(all(test, tower_ratelimit_loom))]
mod loom;
mod padded;
#[cfg(feature = "metrics")]
mod published;
mod refusal_hint;
mod shard;
mod size;
mod slot;
mod small;
mod stats;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod time;
mod usage;

use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use foldhash::quality::RandomState;

use self::answer::Mode;
pub use self::builder::{MemoryStorageBuilder, OnFull};
use self::general::with_states;
use self::padded::Padded;
use self::shard::KeyHash;
use self::size::Size;
use self::stats::Counts;
pub use self::stats::MemoryStats;
use self::time::Time;
use self::usage::{Bounds, Usage};
use super::{Storage, StorageFuture, StorageRequest, Summary};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::time::micros;

/// Keeps the rate limit states of keys in the memory of this process. This is the default storage.
///
/// Its decisions are exact, its operations never fail, and it needs no background task. Clones are
/// handles to the same states.
///
/// # Bounds
///
/// The storage holds at most 1,000,000 keys ([`max_keys`](MemoryStorageBuilder::max_keys)) with at
/// most 128,000,000 bytes in total ([`max_bytes`](MemoryStorageBuilder::max_bytes)). All policies
/// of a storage share its bounds. The storage exceeds a bound only slightly, by the states of hits
/// that run at the same time and by the part of a long log that is decoded.
///
/// The keys are divided among shards, each with its own lock. There is about one shard for each
/// 8,192 keys of `max_keys`, but at least 64 and at most 4,096. The allocated memory differs from the
/// counted bytes by at most 10 %, plus about 3 kB per shard. A storage for fewer than 8,192 keys has
/// about one shard for each 128 keys. While the table of a shard is resized, the memory of its states is
/// allocated twice.
///
/// Logs of moving windows take at most half of the bytes. A log is long if it has more than about
/// 128 entries and takes more than 1/10,000 of that half. Long logs cannot grow into the last
/// quarter of that half, which is reserved for short logs.
///
/// About every 16th decision sweeps a small part of the storage, so expired keys are removed even
/// if their clients never return. After a flood of keys has expired, the next few thousand hits
/// release its memory.
///
/// # Eviction
///
/// In this section, a key is being refused if it has no units left. A key with units left can be
/// evicted, even if the cost of its hits exceeds them.
///
/// - If the storage is full, a new key evicts another one. The storage looks at a few keys, first
///   in the shard of the new key and then in all others. It evicts an expired key, or else the one
///   that would expire first. It never evicts a key that is being refused, so a flood of new keys
///   frees no key from its limit.
/// - If all of these keys are being refused, the new key is refused. Its decision is marked as
///   [storage full](Decision::is_storage_full). With [`OnFull::Admit`], the new key is admitted and
///   not stored.
/// - A short log that has to grow evicts keys with other logs.
/// - A long log that cannot grow evicts no key. Its own client is refused until its oldest entry
///   expires.
/// - A key of a [shadow limit](Policy#shadow-limits) evicts no key, and can be evicted like an
///   expired key.
///
/// [`stats`](Self::stats) counts the hits that found no room.
///
/// # Memory per client
///
/// A key has one state per limit. A state takes 40 bytes. The state of a moving window also has a
/// log, which takes 16 bytes per hit for up to 128 hits, and about three to six bytes per hit for
/// at least 1,000 hits. The table shows clients that have used up one limit with hits spread over
/// the period, in a storage with the default bounds.
///
#[doc = include_str!("capacity.md")]
///
/// # Collisions
///
/// The storage keeps a hash of each key instead of the key. Keys with the same hash share their
/// counts. The hash has at least 94 bits and is seeded with secrets that are random in each process,
/// so an attacker cannot compute a colliding pair.
///
/// Two random keys collide with a probability of at most 2^-94. However, the two halves of the hash
/// share some of the secrets, so a pair that was chosen without knowing them may collide with a
/// probability of up to about 2^-47.
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
pub struct MemoryStorage(Arc<MemoryInner>);

struct MemoryInner {
    shards: Box<[Padded]>,
    /// The number of bits by which the upper 63 bits of a hash are shifted right to get the number
    /// of its shard.
    shift: u32,
    usage: Usage,
    bounds: Bounds,
    on_full: OnFull,
    counts: Counts,
    /// The times, in microseconds, until which a search for a key to evict skips the other shards.
    /// The first is for any key, the second for a key with a log.
    full_until: [AtomicU64; 2],
    /// The number of the shard that is being swept.
    sweeping: AtomicUsize,
    secrets: [RandomState; 2],
    /// The resolution of the clock, in microseconds.
    resolution: u64,
    clock: Time,
}

/// The number of keys that share a lock when the storage is full. It is small, so that growing a
/// table never takes long.
const KEYS_PER_SHARD: usize = 8_192;

/// The minimum number of shards, unless they would have very few keys. While the table of a shard is
/// resized, the old table and the new one exist. With 64 shards, the old one takes about a 64th of the
/// memory.
const MIN_SHARDS: usize = 64;

/// The smallest number of keys for which a small storage has another shard.
const MIN_KEYS_PER_SHARD: usize = 128;

impl MemoryStorage {
    /// Creates a storage for up to 1,000,000 keys and 128 MB, with a
    /// [`SystemClock`](super::SystemClock) and [`OnFull::Refuse`].
    pub fn new() -> Self {
        Self::builder().build().unwrap_or_else(|_| unreachable!("the defaults are valid"))
    }

    /// Returns a builder, to create a storage with other options.
    pub fn builder() -> MemoryStorageBuilder {
        MemoryStorageBuilder::new()
    }

    fn with(bounds: Bounds, on_full: OnFull, clock: Time) -> Self {
        let few = (bounds.keys / MIN_KEYS_PER_SHARD).min(MIN_SHARDS);
        let shards = (bounds.keys / KEYS_PER_SHARD).max(few).clamp(1, 4_096).next_power_of_two();
        Self(Arc::new(MemoryInner {
            shards: (0..shards).map(|_| Padded::default()).collect(),
            shift: u64::BITS - 1 - shards.trailing_zeros(),
            usage: Usage::default(),
            bounds,
            on_full,
            counts: Counts::default(),
            full_until: Default::default(),
            sweeping: AtomicUsize::new(0),
            secrets: [RandomState::default(), RandomState::default()],
            resolution: micros(clock.resolution()),
            clock,
        }))
    }

    /// Returns `true` if a hit is admitted without a delay. A hit that would be delayed is not
    /// stored.
    pub(crate) fn admit(&self, request: &StorageRequest<'_>) -> bool {
        self.0.try_admit(request, Mode::Admit, None)
    }

    /// Returns the number of clients that fill the storage if all of them have exhausted a limit of
    /// `policy`.
    pub(crate) fn clients_to_fill(&self, policy: &Policy) -> u64 {
        self.0.bounds.clients(policy) as u64
    }

    /// Decides, like [`decide`](Storage::decide).
    #[inline]
    pub(crate) fn decide_now(&self, request: &StorageRequest<'_>) -> Decision {
        self.0.decide(request)
    }

    /// Returns the number of keys and bytes, and counts of evictions and of hits that found no
    /// room.
    pub fn stats(&self) -> MemoryStats {
        self.0.counts.stats(self.0.usage.size(), self.0.usage.evicted())
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
    #[inline]
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        StorageFuture::ok(self.0.decide(&request))
    }

    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, shown: Option<&mut Summary>) -> bool {
        request.op == Op::Hit && self.0.try_admit(&request, Mode::TryAdmit, shown)
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let (key, number) = self.0.locate(policy, key);
        let padded = &self.0.shards[number];
        let mut shard = padded.lock();
        padded.clear_hint(key.hash);
        let freed = shard.clear(key, policy.limit_digests());
        drop(shard);
        self.0.usage.settle(freed, Size::default());
        StorageFuture::ok(())
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() {
            return StorageFuture::ok(());
        }
        if let Some(more) = actual.checked_sub(decision.cost()) {
            let _ = self.0.decide(&StorageRequest::new(policy, key, Op::Charge, more));
            return StorageFuture::ok(());
        }
        let (key, number) = self.0.locate(policy, key);
        let padded = &self.0.shards[number];
        let read = self.0.clock.now();
        let mut shard = padded.lock();
        padded.clear_hint(key.hash);
        let now = shard.time(read, &self.0.clock);
        with_states(policy, |states| {
            let run = shard.run(key);
            let before = shard.load(run.clone(), key, policy.limit_digests(), states);
            policy.settle(states, now, decision, actual);
            let peek = policy.decide(states, now, Op::Peek, 1);
            let after = shard.save(run, key, policy.limit_digests(), states, now, Some(peek.limits()));
            self.0.usage.settle(before, after);
        });
        // The refund may have made a key evictable.
        self.0.full_until.iter().for_each(|until| until.store(0, Ordering::Relaxed));
        StorageFuture::ok(())
    }

    /// Removes all keys of all policies, and returns their number, including expired keys. The
    /// future is ready immediately and never fails.
    ///
    /// ```
    /// use tower_ratelimit::storage::Storage;
    /// use tower_ratelimit::{Key, LocalLimiter, MemoryStorage, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::storage::StorageError> {
    /// let storage = MemoryStorage::new();
    /// let limiter = LocalLimiter::with_storage(Quota::per_day(1), storage.clone());
    /// assert!(limiter.admit(&Key::from("alice")) && !limiter.admit(&Key::from("alice")));
    /// assert_eq!(storage.clear_all().await?, 1);
    /// assert!(limiter.admit(&Key::from("alice")));
    /// # Ok(())
    /// # }
    /// ```
    fn clear_all(&self) -> StorageFuture<u64> {
        StorageFuture::ok(self.0.remove_all())
    }
}

impl MemoryInner {
    /// Removes all keys. Returns their number.
    fn remove_all(&self) -> u64 {
        let remove = |padded: &Padded| {
            let mut shard = padded.lock();
            padded.clear_any_hint();
            let freed = shard.reset();
            drop(shard);
            self.usage.settle(freed, Size::default());
            freed.keys as u64
        };
        self.shards.iter().map(remove).sum()
    }

    /// Returns the keyed hash of the key under this policy, and the number of its shard.
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
        #[allow(clippy::cast_possible_truncation)] // the two halves of the digest
        let (hash, rest) = (first ^ (digest >> 64) as u64, second ^ digest as u64);
        // Two shifts, because a single one cannot shift by 64 bits if there is only one shard.
        let number = (rest >> 1).wrapping_shr(self.shift);
        #[allow(clippy::cast_possible_truncation)] // less than the number of shards, and the other half
        let (number, rest) = (number as usize, rest as u32);
        (KeyHash { hash, rest }, number)
    }
}
