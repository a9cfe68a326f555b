use super::MemoryStorage;
use super::time::Time;
use super::usage::Bounds;
use crate::error::ConfigError;
use crate::storage::{Clock, SystemClock};

/// The default of [`MemoryStorageBuilder::max_keys`].
pub(super) const MAX_KEYS: usize = 1_000_000;

/// The default of [`MemoryStorageBuilder::max_bytes`] per key.
const BYTES_PER_KEY: usize = 128;

/// The minimum of the default of `max_bytes`.
const MIN_DEFAULT_BYTES: usize = 1 << 20;

/// The smallest valid `max_bytes`, which has room for a few keys with many limits.
const MIN_BYTES: usize = 65_536;

/// The decision on a hit of a new key if a [`MemoryStorage`] is full and cannot evict another key.
/// Defaults to `Refuse`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a new key is either refused or admitted")]
pub enum OnFull {
    /// Refuses the hit. All limits hold, and new clients are refused until a stored key can be
    /// evicted.
    #[default]
    Refuse,
    /// Admits the hit without storing it. New clients are served without limits until a stored key
    /// can be evicted.
    Admit,
}

/// Builds a [`MemoryStorage`] with other options than the defaults. Created by
/// [`MemoryStorage::builder`].
#[derive(Debug)]
#[must_use]
pub struct MemoryStorageBuilder {
    max_keys: usize,
    max_bytes: Option<usize>,
    on_full: OnFull,
    clock: Option<Time>,
}

impl MemoryStorageBuilder {
    pub(super) fn new() -> Self {
        Self { max_keys: MAX_KEYS, max_bytes: None, on_full: OnFull::Refuse, clock: None }
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
        Self { clock: Some(Time::of(clock)), ..self }
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
        let clock = self.clock.unwrap_or_else(|| Time::System(SystemClock::new()));
        let default_bytes = self.max_keys.saturating_mul(BYTES_PER_KEY).max(MIN_DEFAULT_BYTES);
        let bounds = Bounds { keys: self.max_keys, bytes: self.max_bytes.unwrap_or(default_bytes) };
        Ok(MemoryStorage::with(bounds, self.on_full, clock))
    }
}
