//! The keys that a process has decided, with the differences of their times to its clock.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::{Mutex, MutexGuard};

use crate::sync::unpoisoned;

/// The maximum number of keys in each of the two generations.
const GENERATION: usize = 8_192;

/// The difference between the time of a key and the clock of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Behind {
    /// The [mark](crate::storage::text::Head::mark) of the key's time.
    pub(super) mark: u64,
    /// The microseconds by which the clock is behind the time of the key.
    pub(super) micros: u64,
}

/// The keys that were decided last.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Keys are stored as hashes. The secrets are random, so clients cannot choose keys with equal
    /// hashes.
    secrets: RandomState,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    /// When this map is full, it becomes the old generation.
    new: HashMap<u64, Behind>,
    old: HashMap<u64, Behind>,
}

impl Known {
    pub(super) fn get(&self, key: &str) -> Option<Behind> {
        let (hash, generations) = (self.secrets.hash_one(key), self.lock());
        generations.new.get(&hash).or_else(|| generations.old.get(&hash)).copied()
    }

    pub(super) fn insert(&self, key: &str, behind: Behind) {
        let (hash, mut generations) = (self.secrets.hash_one(key), self.lock());
        if generations.new.len() >= GENERATION && !generations.new.contains_key(&hash) {
            generations.old = mem::take(&mut generations.new);
        }
        generations.new.insert(hash, behind);
    }

    fn lock(&self) -> MutexGuard<'_, Generations> {
        unpoisoned(self.generations.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_keys_is_bounded() {
        let known = Known::default();
        for number in 0..3 * GENERATION {
            known.insert(&number.to_string(), Behind { mark: 1, micros: number as u64 });
        }
        let generations = known.lock();
        assert_eq!(generations.new.len() + generations.old.len(), 2 * GENERATION);
        drop(generations);
        assert_eq!(known.get("0"), None);
        assert_eq!(known.get(&GENERATION.to_string()).map(|behind| behind.micros), Some(GENERATION as u64));
    }
}
