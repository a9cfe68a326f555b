//! What the handles on a store share.

use std::sync::Arc;
use std::time::Duration;

use super::Loaded;
use super::queues::Queues;
use super::skew::{Skew, View};
use crate::Timestamp;
use crate::storage::Clock;

pub(super) struct CasShared<S> {
    pub(super) store: S,
    pub(super) busy: Queues,
    pub(super) skew: Skew,
    time: Time,
}

#[derive(Clone)]
pub(super) enum Time {
    /// The store's, or else the machine's as it is set now: others go by theirs.
    Stores,
    Chosen(Arc<dyn Clock>),
}

impl<S> CasShared<S> {
    pub(super) fn new(store: S, time: Time, skew: Skew) -> Self {
        Self { store, busy: Queues::default(), skew, time }
    }

    /// The same store with no key in use.
    pub(super) fn with(&self, time: Option<Time>, max_skew: Duration) -> Self
    where
        S: Clone,
    {
        Self::new(self.store.clone(), time.unwrap_or_else(|| self.time.clone()), Skew::new(max_skew))
    }

    /// Returns what to decide on when this is loaded.
    pub(super) fn view<'a, V>(&self, loaded: &'a Loaded<V>) -> View<'a> {
        self.skew.view(&loaded.text, self.now(loaded))
    }

    /// The time of this node when this was loaded.
    pub(super) fn now<V>(&self, loaded: &Loaded<V>) -> Timestamp {
        match &self.time {
            Time::Stores => loaded.now.unwrap_or_else(Timestamp::wall_clock),
            Time::Chosen(clock) => clock.now(),
        }
    }
}
