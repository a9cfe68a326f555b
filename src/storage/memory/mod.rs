//! The memory storage: shards of a table of small slots, without a background task.
//!
//! - The states of a key are adjacent, so a policy of several limits needs one lookup. The fast
//!   path is compiled for each number of limits from one to six, because the general path costs
//!   370 ns instead of 30 to 120.
//! - All paths are generic over the answer: a `bool` for `try_admit` takes 333 instructions, a full
//!   decision 551. The numbers are computed after the shard is unlocked.
//! - The clock is read after the hash and before the lock, and again only if another thread has
//!   decided at a later instant. So the time of one key never goes back unless the clock does.
//!   Reading it first took up to 15 % longer.
//! - A thread that finds a shard locked spins with growing pauses before it sleeps. If it slept at
//!   once, two threads on one key would do half the work of one.
//! - The processor stalls on a large read of memory that was just written in small pieces. This was
//!   most of the time of a hit. So statuses have no padding, the fields of a slot are ordered
//!   differently from the order in which strategies write them, decisions are filled in place, and
//!   some functions are always inlined.
//! - The table uses linear probing in hash order. A large one grows by an eighth at 7/8, a small one
//!   doubles at 1/2, and both shrink below 73 %. One large table took 2.2 times the bound while it was
//!   resized.
//! - Logs take at most half of the bytes, so they cannot displace clients of other strategies. Long
//!   logs evict nothing. Without that rule, 30 growing logs evicted all other clients repeatedly.
//! - A new key of a full storage examines eight keys near its own position, then eight of each
//!   other shard. After no shard had room, new keys examine only their own shard for the next 1 ms or
//!   8 µs per shard, the longer of the two, and eight times as long for logs. So a flood of new keys
//!   stays cheap.
//! - One decision in sixteen sweeps 64 slots, or one in 64 while nothing has expired. A flood of a
//!   million keys is gone after about 2,000 hits, with logs after 10,000.

mod answer;
mod decide;
mod evict;
mod inner;
mod kept_keys;
mod listing;
#[cfg(all(test, tower_ratelimit_loom))]
mod loom;
mod members;
mod shard;
mod shard_cell;
mod size;
mod slot;
mod table;
#[cfg(test)]
mod tests;
mod time;
mod usage;

use std::fmt;
use std::sync::Arc;

use self::answer::Mode;
use self::inner::MemoryInner;
pub use self::inner::OnFull;
use self::size::Bounds;
use self::time::StorageClock;
pub use self::usage::MemoryStats;
use super::{Clock, KeyPage, KeysRequest, Storage, StorageFuture, StorageRequest, Summary, SystemClock};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};

/// Keeps the rate limit states of keys in the memory of this process. This is the default storage.
///
/// Its decisions are exact, and it needs no background task. It returns an error only for a request
/// that it does not support, of the kind
/// [`Unsupported`](crate::storage::StorageErrorKind::Unsupported). Clones are handles to the same
/// states.
///
/// # Bounds
///
/// The storage holds at most 1,000,000 keys ([`max_keys`](MemoryStorageBuilder::max_keys)) with at
/// most 128,000,000 bytes in total ([`max_bytes`](MemoryStorageBuilder::max_bytes)). All policies
/// of a storage share its bounds. The storage exceeds a bound only slightly, by the states of hits
/// that run at the same time, by those of a decision on [several keys](crate::RateLimitLayer::and), and
/// by logs of more than 128 hits, which can grow a little while their oldest hits expire.
///
/// The keys are divided among shards, each with its own lock. There is about one shard for each
/// 8,192 keys of `max_keys`, but at least 64 and at most 4,096. Only a storage for fewer than 8,192
/// keys has fewer shards, about one for each 128 keys. The allocated memory differs from the
/// counted bytes by at most 10 %, plus about 3 kB per shard. While the table of a shard is resized,
/// the memory of its states is allocated twice.
///
/// Logs of moving windows take at most half of the bytes. A log is long if it has more than about
/// 128 entries and takes more than 1/10,000 of that half. Long logs cannot grow into the last
/// quarter of that half, which is reserved for short logs.
///
/// Every 16th to 64th decision sweeps a small part of the storage, so expired keys are removed even
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
/// - A short log that has to grow evicts keys: keys with other logs if logs take half of the bytes,
///   and otherwise any keys. If it cannot, the hit is refused as storage full.
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

    /// Returns `true` if `other` is a handle to the same states.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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

/// The default of [`MemoryStorageBuilder::max_keys`].
const MAX_KEYS: usize = 1_000_000;

/// The default of [`MemoryStorageBuilder::max_bytes`] per key.
const BYTES_PER_KEY: usize = 128;

/// The minimum of the default of `max_bytes`.
const MIN_DEFAULT_BYTES: usize = 1 << 20;

/// The smallest valid `max_bytes`, which has room for a few keys with many limits.
const MIN_BYTES: usize = 65_536;

/// Builds a [`MemoryStorage`] with other options than the defaults. Created by
/// [`MemoryStorage::builder`].
#[derive(Debug)]
#[must_use]
pub struct MemoryStorageBuilder {
    max_keys: usize,
    max_bytes: Option<usize>,
    on_full: OnFull,
    clock: Option<StorageClock>,
    keeps_keys: bool,
}

impl MemoryStorageBuilder {
    fn new() -> Self {
        Self { max_keys: MAX_KEYS, max_bytes: None, on_full: OnFull::Refuse, clock: None, keeps_keys: false }
    }

    /// Sets the maximum number of keys, at least 1. Defaults to 1,000,000. A key counts once for
    /// each policy.
    pub fn max_keys(self, max_keys: usize) -> Self {
        Self { max_keys, ..self }
    }

    /// Sets the maximum size of all states in bytes, at least 65,536. Defaults to 128 times
    /// [`max_keys`](Self::max_keys), but at least 1 MiB.
    ///
    /// See [memory per client](MemoryStorage#memory-per-client).
    pub fn max_bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes: Some(max_bytes), ..self }
    }

    /// Sets the decision on a hit of a new key if the storage is full and cannot evict another key.
    /// Defaults to [`OnFull::Refuse`].
    ///
    /// ```
    /// use tower_ratelimit::MemoryStorage;
    /// use tower_ratelimit::storage::OnFull;
    ///
    /// let storage = MemoryStorage::builder().max_bytes(64 << 20).on_full(OnFull::Admit).build()?;
    /// assert_eq!(storage.stats().newcomers_admitted, 0);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    pub fn on_full(self, on_full: OnFull) -> Self {
        Self { on_full, ..self }
    }

    /// Sets the clock, for example in tests. Defaults to a [`SystemClock`].
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(StorageClock::of(clock)), ..self }
    }

    /// Keeps the text of each key beside its hash if `keep` is `true`, for [`Storage::keys`].
    /// Defaults to `false`.
    ///
    /// A text contains the policy's identity and the key. It takes about 80 bytes more than its
    /// length. A text of more than 200 bytes is not kept. The storage keeps at most about twice as
    /// many texts as keys, plus 64 per shard. [`max_bytes`](Self::max_bytes) does not count them.
    ///
    /// A hit of a new key takes longer, and so does each hit on a moving window or with more than
    /// six limits.
    pub fn keep_keys(self, keep: bool) -> Self {
        Self { keeps_keys: keep, ..self }
    }

    /// Builds the storage.
    ///
    /// # Errors
    ///
    /// Returns an error if `max_keys` is 0 or `max_bytes` is less than 65,536.
    pub fn build(self) -> Result<MemoryStorage, ConfigError> {
        if self.max_keys == 0 {
            return Err(ConfigError::new("invalid max_keys 0: it must be at least 1, for example 1_000_000"));
        }
        if let Some(bytes) = self.max_bytes.filter(|&bytes| bytes < MIN_BYTES) {
            return Err(ConfigError::new(format!(
                "invalid max_bytes {bytes}: it must be at least 65_536, for example 128_000_000"
            )));
        }
        let clock = self.clock.unwrap_or_else(|| StorageClock::System(SystemClock::new()));
        let default_bytes = self.max_keys.saturating_mul(BYTES_PER_KEY).max(MIN_DEFAULT_BYTES);
        let bounds = Bounds { keys: self.max_keys, bytes: self.max_bytes.unwrap_or(default_bytes) };
        Ok(MemoryStorage(Arc::new(MemoryInner::new(bounds, self.on_full, clock, self.keeps_keys))))
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

    fn decide_all(&self, requests: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if let [only] = requests {
            return StorageFuture::ok(vec![self.decide_now(only)]);
        }
        StorageFuture::ready(StorageRequest::check_members(requests).map(|()| members::decide(&self.0, requests)))
    }

    fn validate_members(&self, _: &[Policy]) -> Result<(), ConfigError> {
        Ok(())
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        self.0.clear(policy, key);
        StorageFuture::ok(())
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        self.0.settle(policy, key, decision, actual);
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

    /// Lists keys if the storage was built with [`keep_keys`](MemoryStorageBuilder::keep_keys).
    /// Locks one shard at a time. The future is ready immediately.
    ///
    /// # Errors
    ///
    /// Returns an error of the kind [`Unsupported`](crate::storage::StorageErrorKind::Unsupported)
    /// if the storage was built without `keep_keys`, or if a part of the request is invalid.
    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        StorageFuture::ready(listing::page(&self.0, &request))
    }
}
