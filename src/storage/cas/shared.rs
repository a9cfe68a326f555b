//! What the handles on a store share.

use std::sync::Arc;

use super::Loaded;
use super::busy::Busy;
use crate::Timestamp;
use crate::storage::Clock;

pub(super) struct Shared<S> {
    pub(super) store: S,
    pub(super) busy: Busy,
    time: Time,
}

pub(super) enum Time {
    /// The store's, or else the machine's as it is set now: others go by theirs.
    Stores,
    Chosen(Arc<dyn Clock>),
}

impl<S> Shared<S> {
    pub(super) fn new(store: S, time: Time) -> Self {
        Self { store, busy: Busy::default(), time }
    }

    /// What time it was when this was loaded.
    pub(super) fn now<V>(&self, loaded: &Loaded<V>) -> Timestamp {
        match &self.time {
            Time::Stores => loaded.now.unwrap_or_else(Timestamp::wall_clock),
            Time::Chosen(clock) => clock.now(),
        }
    }
}
