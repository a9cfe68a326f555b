//! Compare and swap: two methods, and every strategy runs on a store.

use std::fmt;
use std::time::Duration;

use crate::{BoxError, Timestamp};

/// A store that can say what stands under a key, and put something else there unless somebody else has done so meanwhile.
///
/// What stands there is text: the states of the key's limits, written and read by whoever calls this. A store keeps it as it is.
pub trait CasStorage: Clone + fmt::Debug + Send + Sync + 'static {
    /// Why it could not say or do so.
    type Error: Into<BoxError> + Send + 'static;
    /// What tells one writing under a key from every other, and from nothing being there.
    type Version: Send + Sync + 'static;

    /// What stands under a key.
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
}

/// What stands under a key.
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs)] // a storage fills in all there is
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
#[allow(clippy::exhaustive_enums)] // there is no third way
pub enum Swapped<V> {
    /// The text stands there.
    Stored,
    /// Somebody else was faster: what stands there now, where the store says so in the same breath.
    Lost(Option<Loaded<V>>),
}
