//! A storage over any store with compare-and-swap.

mod batch;
#[cfg(any(feature = "etcd", feature = "postgres"))]
mod combine;
mod job;
mod length;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
mod recent;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
mod server;
mod several;
mod shared;
pub(super) mod skew;
mod slots;
mod storage;
mod worker;

use std::fmt;
use std::future::ready;
use std::time::{Duration, Instant};

#[cfg(feature = "sqlite")]
pub(super) use self::batch::Batch;
#[cfg(any(feature = "etcd", feature = "postgres"))]
pub(super) use self::combine::{SwapCombiner, SwapEach, TextSwap};
#[cfg(feature = "sqlite")]
pub(super) use self::job::Command;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
pub(super) use self::recent::RecentTexts;
#[cfg(any(feature = "memcached", feature = "etcd"))]
pub(super) use self::recent::VERSION_LASTS;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
pub(super) use self::server::{ServerCas, ServerStore, forward_to_server_cas};
#[cfg(any(feature = "etcd", feature = "postgres"))]
pub(super) use self::several::{KeySwap, SeveralFuture, SeveralKeys, SwappedAll};
pub use self::storage::Cas;
use crate::error::BoxError;
use crate::time::Timestamp;

/// A store of texts with compare-and-swap: it replaces the text of a key only if the version of the
/// text has not changed.
///
/// Implement this trait for a store of your own. [`Cas`] then makes it a
/// [`Storage`](crate::Storage). `Cas` writes and parses the texts. The store only keeps them.
///
/// A [`swap`](Self::swap) must compare and replace in one atomic step. Otherwise a text that
/// another process stores in between is lost. `testing::CasLaws` (feature `testing`) tests an
/// implementation.
///
/// [`load`](Self::load), [`swap`](Self::swap) and [`check`](Self::check) get a deadline. [`Cas`]
/// drops their futures after the deadline: shortly after it in the first round trip of a call that did
/// not wait for other calls of its key, and otherwise at most a full [timeout](Cas::timeout) after the
/// round trip began. A store can return an error that names the server when the deadline has passed. A
/// store that has no such error can ignore the deadline.
///
/// # Examples
///
/// ```
/// use std::collections::HashMap;
/// use std::convert::Infallible;
/// use std::sync::{Arc, Mutex};
/// use std::time::{Duration, Instant};
/// use tower_ratelimit::storage::{Cas, CasStorage, Loaded, Swapped};
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// /// Texts, each with the number of its last change. This example never removes any.
/// #[derive(Clone, Debug, Default)]
/// struct Texts(Arc<Mutex<HashMap<String, (String, u64)>>>);
///
/// impl CasStorage for Texts {
///     type Error = Infallible;
///     type Version = u64;
///
///     async fn load(&self, key: &str, _: Instant) -> Result<Loaded<u64>, Infallible> {
///         let (text, version) = self.0.lock().unwrap().get(key).cloned().unwrap_or_default();
///         Ok(Loaded { text, version, now: None })
///     }
///
///     async fn swap(
///         &self,
///         key: &str,
///         version: &u64,
///         text: &str,
///         _time_to_live: Duration,
///         _deadline: Instant,
///     ) -> Result<Swapped<u64>, Infallible> {
///         let mut texts = self.0.lock().unwrap();
///         let stored = texts.entry(key.to_owned()).or_default();
///         if stored.1 != *version {
///             return Ok(Swapped::Lost(None));
///         }
///         *stored = (text.to_owned(), version + 1);
///         Ok(Swapped::Stored)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = RateLimiter::with_storage(Quota::per_minute(2), Cas::new(Texts::default()));
/// assert_eq!(limiter.hit(&Key::from("alice")).await?.remaining(), 1);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "optimistic locking")]
pub trait CasStorage: Clone + fmt::Debug + Send + Sync + 'static {
    /// The error of the store. [`Cas`] converts it with
    /// [`StorageError::from_boxed`](super::StorageError::from_boxed).
    type Error: Into<BoxError> + Send + 'static;
    /// The version of a key's text, for example a number that changes with each write, or the text
    /// itself. A missing key has a version too.
    ///
    /// If the version is a number, a key must never have the same number twice, even if the key is
    /// removed and written again.
    type Version: Send + Sync + 'static;

    /// Returns the text of a key and the text's version. For a missing key, returns an empty text and
    /// the version of a missing key.
    ///
    /// A key is printable ASCII and can contain spaces. [`Cas`] uses keys of at most 201 bytes, and
    /// `testing::CasLaws` also longer ones. If the store supports only shorter keys or no spaces, use
    /// a hash of the key.
    ///
    /// # Errors
    ///
    /// Returns an error if the store cannot be read.
    fn load(
        &self,
        key: &str,
        deadline: Instant,
    ) -> impl Future<Output = Result<Loaded<Self::Version>, Self::Error>> + Send;

    /// Stores `text` if the version of the key's text is still `version`. An empty text removes the
    /// key. The store must keep the text for at least `time_to_live`, and should remove it soon
    /// afterwards.
    ///
    /// Returns [`Swapped::Stored`], or [`Swapped::Lost`] if the version has changed.
    ///
    /// # Errors
    ///
    /// Returns an error if the store fails. The text may have been stored nevertheless, so [`Cas`]
    /// does not retry: a retry could count a hit twice.
    fn swap(
        &self,
        key: &str,
        version: &Self::Version,
        text: &str,
        time_to_live: Duration,
        deadline: Instant,
    ) -> impl Future<Output = Result<Swapped<Self::Version>, Self::Error>> + Send;

    /// Checks that the store is reachable. [`Storage::check`](crate::Storage::check) of [`Cas`]
    /// calls this. The default implementation never fails.
    ///
    /// # Errors
    ///
    /// Returns an error if the store is not reachable.
    fn check(&self, deadline: Instant) -> impl Future<Output = Result<(), Self::Error>> + Send {
        let _ = deadline;
        ready(Ok(()))
    }

    /// Returns the latest text of a key that the store knows without a round trip, or `None` if it
    /// knows none. The default implementation returns `None`.
    ///
    /// [`Cas`] decides on this text and swaps immediately, which saves the round trip of
    /// [`load`](Self::load). The text may be outdated, because the swap compares its version.
    /// Before a swap has confirmed the text, `Cas` returns no decision on it. A decision that
    /// changes nothing needs no swap, so `Cas` makes it again on a loaded text.
    ///
    /// A lost swap shows that the recalled text is outdated. Return a newer text or `None` from
    /// then on.
    fn recall(&self, key: &str) -> Option<Loaded<Self::Version>> {
        let _ = key;
        None
    }

    /// Returns the largest length of a text in bytes, or `None` if it is unlimited. The default
    /// implementation returns `None`.
    ///
    /// A policy that can need longer texts is rejected when its limiter or layer is built. If the
    /// policy is chosen per request, the decision fails with the kind
    /// [`Unsupported`](super::StorageErrorKind::Unsupported) instead.
    fn max_text_len(&self) -> Option<usize> {
        None
    }
}

/// The text of a key and the text's version. Returned by [`load`](CasStorage::load) and
/// [`recall`](CasStorage::recall), and contained in [`Swapped::Lost`].
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Loaded<V> {
    /// The text, or an empty text if the key does not exist.
    pub text: String,
    /// The version of the text, for a later [`swap`](CasStorage::swap).
    pub version: V,
    /// The store's time if the store has a clock that all processes share, or else `None`. With
    /// `None`, [`Cas`] uses this machine's clock.
    pub now: Option<Timestamp>,
}

/// The result of [`CasStorage::swap`].
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "a swap is either stored or lost")]
pub enum Swapped<V> {
    /// The text was stored.
    Stored,
    /// The version has changed, so nothing was stored. Contains the current text if the swap
    /// returned it. Otherwise [`Cas`] loads it.
    Lost(Option<Loaded<V>>),
}
