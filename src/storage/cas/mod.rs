//! Compare and swap: two methods, and every strategy runs on a store.

mod busy;
mod desk;
mod error;
mod job;
mod pause;
mod round;
mod shared;
mod size;
pub(super) mod skew;
mod storage;

use std::fmt;
use std::time::Duration;

pub use self::error::CasError;
pub use self::storage::Cas;
use crate::{BoxError, Timestamp};

/// A store that can say what stands under a key, and put something else there unless somebody else has done so meanwhile.
///
/// What stands there is text: the states of the key's limits, written and read by [`Cas`], which makes a
/// [`Storage`](crate::Storage) of it. A store keeps it as it is.
///
/// A store has to compare and to put in one step: looking first and putting then loses what somebody else puts in between. The
/// feature `testing` has the suite that finds out.
///
/// The futures of both methods may be dropped at any time, and are when it takes too long.
///
/// ```
/// use std::collections::HashMap;
/// use std::convert::Infallible;
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
/// use tower_ratelimit::storage::{Cas, CasStorage, Loaded, Swapped};
/// use tower_ratelimit::{Key, Quota, RateLimiter};
///
/// /// Texts with the number of their writing. It never forgets, for a look at the shape.
/// #[derive(Clone, Debug, Default)]
/// struct Texts(Arc<Mutex<HashMap<String, (String, u64)>>>);
///
/// impl CasStorage for Texts {
///     type Error = Infallible;
///     type Version = u64;
///
///     async fn load(&self, key: &str) -> Result<Loaded<u64>, Infallible> {
///         let (text, version) = self.0.lock().unwrap().get(key).cloned().unwrap_or_default();
///         Ok(Loaded { text, version, now: None })
///     }
///
///     async fn swap(&self, key: &str, version: &u64, text: &str, _: Duration) -> Result<Swapped<u64>, Infallible> {
///         let mut texts = self.0.lock().unwrap();
///         let stands = texts.entry(key.to_owned()).or_default();
///         if stands.1 != *version {
///             return Ok(Swapped::Lost(None));
///         }
///         *stands = (text.to_owned(), version + 1);
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
pub trait CasStorage: Clone + fmt::Debug + Send + Sync + 'static {
    /// Why it could not say or do so.
    type Error: Into<BoxError> + Send + 'static;
    /// What tells a text under a key from all that stand there before and after, and from nothing being there: a number that each
    /// writing has for itself, or the text.
    ///
    /// When a key is removed and another text written there, the version is none that was there before: what counts has to go on
    /// counting.
    type Version: Send + Sync + 'static;

    /// What stands under a key: printable ASCII of any length, with spaces in it. Where that is too long for a store, or its keys
    /// have no spaces, it keeps a hash.
    fn load(&self, key: &str) -> impl Future<Output = Result<Loaded<Self::Version>, Self::Error>> + Send;

    /// Puts `text` under a key, or nothing when it is empty, if what stands there is still what was loaded as `version`.
    /// It is to stay at least for `keep`, and not much longer.
    ///
    /// # Errors
    ///
    /// When it is not known that the text stands there, nor that it does not. It is not tried again: that could count twice.
    fn swap(
        &self,
        key: &str,
        version: &Self::Version,
        text: &str,
        keep: Duration,
    ) -> impl Future<Output = Result<Swapped<Self::Version>, Self::Error>> + Send;

    /// How long a text may be, in bytes; `None` when there is no saying. A policy that may remember more is refused when it meets
    /// the storage.
    fn longest(&self) -> Option<usize> {
        None
    }
}

/// What stands under a key.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Loaded<V> {
    /// Empty when there is nothing.
    pub text: String,
    /// What [`swap`](CasStorage::swap) compares with.
    pub version: V,
    /// The store's time, if it has a clock of its own that all processes share.
    pub now: Option<Timestamp>,
}

/// What became of an attempt to swap.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "a swap is either stored or lost")]
pub enum Swapped<V> {
    /// The text stands there.
    Stored,
    /// Somebody else was faster: what stands there now, where the store says so in the same breath.
    Lost(Option<Loaded<V>>),
}
