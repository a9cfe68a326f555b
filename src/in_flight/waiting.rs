//! The requests that wait for slots, and their answers.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::policy::{Policy, SharedPolicy};
use crate::storage::StorageError;
use crate::waiting::{Seat, Seats};

/// A request that waits for slots.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    /// Read again when slots become free, to follow the changes of live slots.
    pub(super) policy: SharedPolicy,
    pub(super) cost: u32,
    /// The seats of the layer. `None` if the request is refused when the store has no slots for it.
    pub(super) seats: Option<Arc<Seats>>,
    /// Taken when the slots do not suffice. Until then, the request only waits for the store.
    pub(super) seat: Option<Seat>,
    pub(super) answer: oneshot::Sender<Answer<T>>,
}

/// The answer to a waiting request.
#[derive(Debug)]
pub(super) enum Answer<T> {
    /// Contains the policy by which the request was decided, because live slots may have changed.
    Taken(T, Policy),
    /// Contains the free slots of the key, and the policy.
    Full(u32, Policy),
    Failed(StorageError),
    /// The store has no slots for the request, which waits with a seat. Contains the next answer.
    Seated(oneshot::Receiver<Self>),
}

/// A request that has left the queue.
pub(super) struct Left<T> {
    pub(super) waiting: Waiting<T>,
    pub(super) reason: Reason,
}

/// The reason why a request has left the queue.
pub(super) enum Reason {
    /// It has its slots. Contains the free slots of the key afterwards, and the policy.
    Granted(u32, Policy),
    /// Contains the free slots of the key, and the policy.
    Full(u32, Policy),
    Failed(StorageError),
}
