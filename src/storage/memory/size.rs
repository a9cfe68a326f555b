//! The size of the states of a key, and the room that a hit needs.

use std::mem;

use crate::policy::{Limit, Policy};
use crate::strategy::{Log, State};
use crate::time::Timestamp;

/// The bytes per state: 32 bytes for its slot, and 8 bytes for the vacant slots of the table. In a
/// large table, 73 % to 88 % of the slots are used.
pub(super) const SLOT_BYTES: usize = 40;

/// The bytes of an entry in the slab of logs.
pub(super) const LOG_ENTRY_BYTES: usize = 24;

/// The bytes of a new log.
const NEW_LOG: usize = LOG_ENTRY_BYTES + mem::size_of::<Log>() + 64;

/// An amount of keys, states and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) keys: usize,
    /// The number of states.
    pub(super) slots: usize,
    /// The number of bytes of logs.
    pub(super) logs: usize,
}

impl Size {
    /// A key with one small state.
    pub(super) const SMALL: Self = Self { keys: 1, slots: 1, logs: 0 };

    pub(super) const fn bytes(self) -> usize {
        self.slots * SLOT_BYTES + self.logs
    }
}

/// Returns the bytes of a log in a storage.
#[inline]
pub(super) fn log_bytes(log: &Log) -> usize {
    LOG_ENTRY_BYTES + log.bytes()
}

/// The maximum room that a hit needs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    pub(super) size: Size,
    /// The bytes of the longest growing log, after it has grown.
    pub(super) longest: usize,
}

impl Need {
    /// The need of a new key with one small state.
    pub(super) const SMALL: Self = Self { size: Size::SMALL, longest: 0 };

    /// Returns the maximum need of a hit at `now`. `is_new` is `true` if the key is not stored.
    #[inline]
    pub(super) fn of(policy: &Policy, states: &[State], now: Timestamp, is_new: bool) -> Self {
        let mut need = Self { size: Size { keys: usize::from(is_new), slots: 0, logs: 0 }, longest: 0 };
        for (limit, state) in policy.limits().iter().zip(states) {
            match state {
                State::Fresh => {
                    need.size.slots += 1;
                    if keeps_log(limit) {
                        need.grow(0, NEW_LOG);
                    }
                }
                State::Log(log) => {
                    let growth = log.growth_at(now);
                    if growth > 0 {
                        need.grow(log.bytes(), growth);
                    }
                }
                State::Counts { .. } => {}
            }
        }
        need
    }

    fn grow(&mut self, bytes: usize, growth: usize) {
        self.size.logs += growth;
        self.longest = self.longest.max(bytes + growth);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.size == Size::default()
    }
}

fn keeps_log(limit: &Limit) -> bool {
    limit.strategy().log_entries(limit.quota()) > 0
}
