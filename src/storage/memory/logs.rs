use slab::Slab;

use crate::strategy::Log;

/// The logs of a shard. A slot has the index of its log. A log is taken out while a hit on its key
/// is decided.
#[derive(Debug, Default)]
pub(super) struct Logs(Slab<Option<Box<Log>>>);

impl Logs {
    /// Adds an empty entry for a log.
    pub(super) fn add(&mut self) -> u32 {
        u32::try_from(self.0.insert(None)).expect("fewer than 2^32 logs")
    }

    #[inline]
    pub(super) fn get(&self, index: u32) -> Option<&Log> {
        self.0[index as usize].as_deref()
    }

    #[inline]
    pub(super) fn take(&mut self, index: u32) -> Option<Box<Log>> {
        self.0[index as usize].take()
    }

    #[inline]
    pub(super) fn put(&mut self, index: u32, log: Box<Log>) {
        self.0[index as usize] = Some(log);
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Box<Log>> {
        self.0.remove(index as usize)
    }

    /// Returns `true` if most entries are vacant.
    pub(super) fn is_sparse(&self) -> bool {
        self.0.capacity() > 64 && self.0.len() < self.0.capacity() / 8 * 3
    }

    /// Moves all logs to a smaller slab. `indices` are all indices in use, and are updated.
    pub(super) fn shrink<'a>(&mut self, indices: impl Iterator<Item = &'a mut u32>) {
        let mut smaller = Slab::with_capacity(self.0.len() + self.0.len() / 3);
        for index in indices {
            let log = self.0.remove(*index as usize);
            *index = u32::try_from(smaller.insert(log)).expect("fewer than 2^32 logs");
        }
        self.0 = smaller;
    }
}
