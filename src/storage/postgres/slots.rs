//! Bounds the connections to each server, including those that are being opened or closed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::socket::Address;

use crate::sync::unpoisoned;

/// A place for one connection. It is taken before the login, and dropped when the server has closed
/// the connection.
pub(super) type Slot = OwnedSemaphorePermit;

/// The slots of a storage on each server.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// The number of slots per server.
    count: usize,
    taken: Mutex<HashMap<Address, Arc<Semaphore>>>,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self { count, taken: Mutex::default() }
    }

    /// Waits for a free slot of the server.
    pub(super) async fn take(&self, address: &Address) -> Slot {
        let slots = {
            let mut taken = unpoisoned(self.taken.lock());
            // The addresses of a name can change, so those without a connection are forgotten.
            taken.retain(|other, slots| other == address || Arc::strong_count(slots) > 1);
            let new = || Arc::new(Semaphore::new(self.count));
            Arc::clone(taken.entry(address.clone()).or_insert_with(new))
        };
        slots.acquire_owned().await.unwrap_or_else(|_| unreachable!("the semaphore is never closed"))
    }
}
