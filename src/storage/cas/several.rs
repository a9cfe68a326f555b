//! Stores that replace the texts of several keys in one step.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Loaded;
use crate::storage::StorageError;

/// The maximum number of keys that are loaded and replaced in one step. By default, etcd allows a
/// transaction of 128 operations.
pub(super) const MAX_KEYS: usize = 64;

/// A store that compares and replaces the texts of several keys in one step. `V` is the version of a
/// text.
pub(in crate::storage) trait SeveralKeys<V>: fmt::Debug + Send + Sync {
    /// Returns the texts of the keys, in the same order.
    fn load_all<'a>(&'a self, keys: &'a [Arc<str>], deadline: Instant) -> SeveralFuture<'a, Vec<Loaded<V>>>;

    /// Stores the new texts of all keys, or none if the version of a text has changed. The keys are
    /// different.
    fn swap_all<'a>(&'a self, swaps: &'a [KeySwap<'a, V>], deadline: Instant) -> SeveralFuture<'a, SwappedAll<V>>;
}

pub(in crate::storage) type SeveralFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StorageError>> + Send + 'a>>;

/// The comparison of one key, and its new text.
#[derive(Clone, Copy, Debug)]
pub(in crate::storage) struct KeySwap<'a, V> {
    pub(in crate::storage) key: &'a Arc<str>,
    pub(in crate::storage) version: &'a V,
    /// The text to store and the time to keep it, or `None` if the text is only compared.
    pub(in crate::storage) change: Option<(&'a str, Duration)>,
}

/// The result of [`SeveralKeys::swap_all`].
#[derive(Debug)]
pub(in crate::storage) enum SwappedAll<V> {
    Stored,
    /// Nothing was stored. Contains the current texts in the order of the swaps, if the store
    /// returned them.
    Lost(Option<Vec<Loaded<V>>>),
}
