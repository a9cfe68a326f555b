//! A map of the keys that were used last, in bounded memory.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem;

/// The maximum number of keys in each of the two generations.
const GENERATION: usize = 8_192;

/// A map that forgets the keys that were inserted first. It holds between one and two generations.
#[derive(Debug)]
pub(in crate::storage) struct RecentMap<K, V> {
    /// The keys that were inserted last. When this map is full, it becomes the old generation.
    new: HashMap<K, V>,
    old: HashMap<K, V>,
}

impl<K, V> Default for RecentMap<K, V> {
    fn default() -> Self {
        Self { new: HashMap::new(), old: HashMap::new() }
    }
}

impl<K: Hash + Eq, V> RecentMap<K, V> {
    pub(in crate::storage) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.new.get(key).or_else(|| self.old.get(key))
    }

    pub(in crate::storage) fn insert(&mut self, key: K, value: V) {
        if self.new.len() >= GENERATION && !self.new.contains_key(&key) {
            self.old = mem::take(&mut self.new);
        }
        self.new.insert(key, value);
    }

    #[cfg(any(test, feature = "memcached", feature = "etcd", feature = "postgres"))]
    pub(in crate::storage) fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.new.remove(key);
        self.old.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_keys_is_bounded() {
        let mut map = RecentMap::default();
        for key in 0..3 * GENERATION {
            map.insert(key, 1);
        }
        assert_eq!(map.new.len() + map.old.len(), 2 * GENERATION);
        assert_eq!((map.get(&(GENERATION - 1)), map.get(&GENERATION)), (None, Some(&1)));
        map.insert(GENERATION, 2);
        assert_eq!(map.get(&GENERATION), Some(&2), "the new generation counts");
        map.remove(&GENERATION);
        assert_eq!(map.get(&GENERATION), None, "both generations have had it");
    }
}
