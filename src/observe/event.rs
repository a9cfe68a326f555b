//! Events: the decisions, failures and settlements of a layer.

use std::error::Error;

use crate::decision::Decision;
use crate::extract::KeyError;
use crate::key::Key;
use crate::policy::{Limit, Policy};
use crate::storage::StorageError;
use crate::strategy::{Lock, Status};

/// The kind of an [`Event`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// The storage decided a hit, or a peek for a request that costs 0.
    Decided(&'a Decision),
    /// The storage, or the lookup of the policy, failed.
    Failed {
        /// The error: a [`StorageError`], or the `LookupError` of the lookup.
        error: &'a (dyn Error + Send + Sync + 'static),
        /// `true` if the request was forwarded.
        admitted: bool,
    },
    /// The key extractor, the closure of [`cost`](crate::RateLimitLayer::cost) or the lookup of
    /// the policy returned an error.
    KeyError(&'a KeyError),
    /// The cost of a hit was corrected for one of these reasons:
    ///
    /// - The head of the response, or a [`Reservation`](crate::Reservation), has set the actual
    ///   cost.
    /// - The request was dropped after its hit was admitted, while it was delayed or waited for the
    ///   inner service. The actual cost is then 0.
    Settled {
        /// The decision on the hit, with its estimated cost.
        decision: &'a Decision,
        /// The actual cost in units, which differs from the estimated one.
        actual: u32,
        /// `true` if the actual cost is smaller, but the hit had expired in all limits before it
        /// was settled. Then its units were free again already, and nothing was refunded.
        expired: bool,
    },
    /// The cost of a hit could not be corrected, or its key could not be cleared. The storage failed,
    /// or an asynchronous storage was called outside of a tokio runtime.
    ///
    /// The hit keeps its estimated cost. If [`StorageError::may_have_counted`] returns `true` for
    /// `error`, the storage may have executed the call nevertheless.
    SettleFailed {
        /// The decision on the hit, with its estimated cost.
        decision: &'a Decision,
        /// The actual cost in units. 0 if the key could not be cleared.
        actual: u32,
        /// The reason of the failure.
        error: &'a StorageError,
    },
    /// The hit of a request was not settled, but its key was cleared, by
    /// [`clear_when`](crate::RateLimitLayer::clear_when) or
    /// [`Reservation::clear`](crate::Reservation::clear). Contains the decision on the hit.
    Cleared(&'a Decision),
    /// A hit has started the lock of a [`Lockout`](crate::Lockout). With
    /// [`charge_when`](crate::RateLimitLayer::charge_when), the lock is reported when the request
    /// is settled, unless the hit is refunded before the lock ends, which ends the lock. A lock is not
    /// reported if a charge has started it, or if it starts with the refusal of a hit that continues
    /// to [wait](crate::RateLimitLayer::wait).
    Locked(Lock),
    /// An admitted hit has brought the spent units of a limit to the share of
    /// [`near_limit`](crate::RateLimitLayer::near_limit), or beyond it. Another event reports the
    /// decision on the hit.
    NearLimit {
        /// The limit, which is one of the policy of the event.
        limit: &'a Limit,
        /// The status of the limit after the hit.
        status: &'a Status,
    },
    /// A [`Reservation`](crate::Reservation) was dropped and not settled. The hit keeps its
    /// estimated cost.
    Unsettled(&'a Decision),
}

/// An event in a layer, for example a decision on a request. An
/// [observer](crate::RateLimitLayer::observer) receives it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Event<'a> {
    /// The kind of the event.
    pub kind: EventKind<'a>,
    /// The policy of the request. For an event of a [shadow limit](Policy#shadow-limits), this is
    /// the limit's own policy from [`Policy::shadows`]. If a `PolicyLookup` fails or returns a
    /// [`KeyError`], this is a placeholder with the name `unknown`.
    pub policy: &'a Policy,
    /// The key. `None` for [`EventKind::KeyError`], and if a `PolicyLookup` failed. A key may be a
    /// secret or personal data, so be careful where you write it.
    pub key: Option<&'a Key>,
    /// `true` if the decision is not enforced: in a [shadow](crate::RateLimitLayer::shadow) layer,
    /// and for a shadow limit.
    pub shadow: bool,
}

impl Event<'_> {
    /// Returns the outcome as one word, for example as a label of a metric.
    ///
    /// | outcome | event |
    /// |---|---|
    /// | `admitted` | the hit was admitted without a delay |
    /// | `delayed` | the hit was admitted with a [delay](Decision::delay) |
    /// | `refused` | a limit refused the hit |
    /// | `storage_full` | the [full storage](Decision::is_storage_full) refused the hit |
    /// | `contended` | the [contended](Decision::is_contended) storage refused the hit |
    /// | `failed_open` | [`EventKind::Failed`], and the request was forwarded |
    /// | `failed_closed` | [`EventKind::Failed`], and the request was refused |
    /// | `missing` | [`EventKind::KeyError`] |
    /// | `refunded` | [`EventKind::Settled`] with a smaller cost |
    /// | `expired` | [`EventKind::Settled`] with a smaller cost, after the hit had expired |
    /// | `charged` | [`EventKind::Settled`] with a greater cost |
    /// | `settle_failed` | [`EventKind::SettleFailed`] |
    /// | `cleared` | [`EventKind::Cleared`] |
    /// | `unsettled` | [`EventKind::Unsettled`] |
    /// | `locked` | [`EventKind::Locked`] |
    /// | `near_limit` | [`EventKind::NearLimit`] |
    pub fn outcome(&self) -> &'static str {
        match self.kind {
            EventKind::Decided(decision) if decision.is_storage_full() => "storage_full",
            EventKind::Decided(decision) if decision.is_contended() => "contended",
            EventKind::Decided(decision) if decision.is_refused() => "refused",
            EventKind::Decided(decision) if decision.is_at_once() => "admitted",
            EventKind::Decided(_) => "delayed",
            EventKind::Failed { admitted: true, .. } => "failed_open",
            EventKind::Failed { admitted: false, .. } => "failed_closed",
            EventKind::KeyError(_) => "missing",
            EventKind::Settled { expired: true, .. } => "expired",
            EventKind::Settled { decision, actual, .. } if actual < decision.cost() => "refunded",
            EventKind::Settled { .. } => "charged",
            EventKind::SettleFailed { .. } => "settle_failed",
            EventKind::Cleared(_) => "cleared",
            EventKind::Unsettled(_) => "unsettled",
            EventKind::Locked(_) => "locked",
            EventKind::NearLimit { .. } => "near_limit",
        }
    }

    /// Returns the difference between the estimated and the actual cost of a hit in units.
    ///
    /// | kind of the event | result |
    /// |---|---|
    /// | [`Settled`](EventKind::Settled), [`SettleFailed`](EventKind::SettleFailed) | the difference, without a sign |
    /// | [`Settled`](EventKind::Settled) after the hit had expired | 0 |
    /// | [`Cleared`](EventKind::Cleared), [`Unsettled`](EventKind::Unsettled) | 0 |
    /// | all others | `None` |
    ///
    /// A storage does not report how many units it has changed. So the result can be too large in
    /// these cases:
    ///
    /// - A part of the hit had expired: a token bucket had refilled some of its units, or one of
    ///   several limits had refilled all of them.
    /// - A limit had nothing to refund: later hits were in the queue of a leaky bucket, or the key
    ///   was cleared or evicted.
    /// - The difference was not charged, because a full memory storage did not contain the key.
    pub fn settled_units(&self) -> Option<u32> {
        match self.kind {
            EventKind::Settled { expired: true, .. } | EventKind::Cleared(_) | EventKind::Unsettled(_) => Some(0),
            EventKind::Settled { decision, actual, .. } | EventKind::SettleFailed { decision, actual, .. } => {
                Some(actual.abs_diff(decision.cost()))
            }
            _ => None,
        }
    }
}
