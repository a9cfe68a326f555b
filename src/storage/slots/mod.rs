//! The slots of requests in flight that several processes share.

mod ledger;
#[cfg(test)]
mod tests;

use std::fmt;

pub(crate) use self::ledger::{Claim, Granted, LONGEST_TIME_TO_LIVE, Ledger};
use super::StorageFuture;
use crate::key::Key;
use crate::policy::Policy;

/// A store of ledgers, one for each policy and key. It applies a claim to a ledger atomically.
///
/// Other crates cannot name this trait. They get one from [`Storage::slots`](crate::Storage::slots).
pub trait SlotStore: fmt::Debug + Send + Sync {
    /// Applies a claim to the ledger of a key.
    ///
    /// # Errors
    ///
    /// Returns an error if the store fails. The claim may have been applied nevertheless, so the next one
    /// of the process states its slots again.
    fn claim(&self, policy: &Policy, key: &Key, claim: Claim) -> StorageFuture<Granted>;
}
