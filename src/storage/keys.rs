//! A page of the keys of a policy, and the request for it.

use super::{StorageError, StorageErrorKind};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;

/// The largest number of keys of a page.
const MOST: usize = 1_000;

/// A request to [`Storage::keys`](crate::Storage::keys) for a page of keys.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeysRequest<'a> {
    /// The policy whose keys are listed.
    pub policy: &'a Policy,
    /// The beginning of the [texts](Key#impl-Display-for-Key) of the keys, for example `t:ali`, in
    /// printable ASCII. Empty for all keys.
    pub prefix: &'a str,
    /// The value of [`KeyPage::next`] of the page before, or `None` for the first page.
    pub after: Option<&'a str>,
    /// The desired number of keys of a page. Values below 1 count as 1, and values above 1,000 as
    /// 1,000.
    pub limit: usize,
}

impl<'a> KeysRequest<'a> {
    /// Creates a request for a page. `limit` is the desired number of keys, from 1 to 1,000.
    pub fn new(policy: &'a Policy, prefix: &'a str, after: Option<&'a str>, limit: usize) -> Self {
        Self { policy, prefix, after, limit: limit.clamp(1, MOST) }
    }

    /// Returns the number of keys of a page, within its bounds.
    pub(super) fn limit(&self) -> usize {
        self.limit.clamp(1, MOST)
    }

    /// Returns an error if a part of the request cannot be a part of a name.
    pub(super) fn check(&self) -> Result<(), StorageError> {
        let is_text = |text: &str| text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if !is_text(self.prefix) {
            return Err(StorageError::new(
                StorageErrorKind::Unsupported,
                "the prefix of the keys is not printable ASCII: write it as in the text of a key, for example t:%C3%A9",
            ));
        }
        if is_text(self.after.unwrap_or_default()) { Ok(()) } else { Err(unknown_page()) }
    }
}

/// A page of keys. Returned by [`Storage::keys`](crate::Storage::keys) and
/// [`RateLimiter::keys`](crate::RateLimiter::keys).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct KeyPage {
    /// The keys, each with the decision of a peek at one unit.
    pub keys: Vec<(Key, Decision)>,
    /// The position of the next page, for [`KeysRequest::after`], or `None` if this is the last
    /// page. The position is printable ASCII, and can contain a key.
    #[doc(alias = "cursor")]
    pub next: Option<String>,
}

impl KeyPage {
    /// Creates a page.
    pub fn new(keys: Vec<(Key, Decision)>, next: Option<String>) -> Self {
        Self { keys, next }
    }
}

/// Returns `true` if the peek shows a state that has an effect.
pub(super) fn is_in_use(peek: &Decision) -> bool {
    peek.statuses().iter().any(|status| status.reset_after_micros() > 0)
}

/// Returns the error of a page that does not follow another one.
pub(super) fn unknown_page() -> StorageError {
    StorageError::new(StorageErrorKind::Unsupported, "unknown page of keys: pass `KeyPage::next` of the page before")
}

/// Returns the error of a storage that cannot list its keys.
pub(super) fn cannot_list() -> StorageError {
    StorageError::new(StorageErrorKind::Unsupported, "this storage cannot list its keys")
}
