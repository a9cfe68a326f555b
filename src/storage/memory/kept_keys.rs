//! The names of the keys, which a storage keeps only if it lists them.
//!
//! A name is added when a hit finds no state of its key, and not when a state is stored, so the fast
//! path does not change. It is not removed with the states, unless they are cleared. Instead, a shard
//! that has twice as many names as after the last time removes those without states. So does a sweep
//! that reaches the end of a shard, because no hit may add a name after a flood of keys.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Mutex;

use super::shard::{KeyHash, Shard};
use crate::policy::Op;
use crate::storage::{StorageRequest, names};
use crate::sync::unpoisoned;

/// The number of names of a shard that are never removed.
const FEW: usize = 64;

/// The largest number of names that are visited for a page, so that it takes at most a few
/// milliseconds.
const MOST_VISITED: usize = 16_384;

/// The names of the keys of each shard.
#[derive(Debug)]
pub(super) struct KeptKeys(Box<[Mutex<ShardNames>]>);

/// The names of the keys of a shard, `POLICY|KEY`, by their hashes.
#[derive(Debug)]
struct ShardNames {
    names: BTreeMap<(u64, u32), Box<str>>,
    /// The number of names at which those without states are removed.
    clean_at: usize,
}

/// The position of a key in the order of a listing: the number of its shard, and its hash.
pub(super) type Position = (usize, (u64, u32));

impl KeptKeys {
    pub(super) fn new(shards: usize) -> Self {
        let empty = || Mutex::new(ShardNames { names: BTreeMap::new(), clean_at: FEW });
        Self((0..shards).map(|_| empty()).collect())
    }

    /// Keeps the name of a key in this shard, unless the request adds no state.
    #[cold]
    pub(super) fn keep(&self, number: usize, shard: &Shard, key: KeyHash, request: &StorageRequest<'_>) {
        if request.op == Op::Peek || request.cost == 0 {
            return;
        }
        let mut kept = unpoisoned(self.0[number].lock());
        let KeyHash { hash, rest } = key;
        if kept.names.contains_key(&(hash, rest)) {
            return;
        }
        let name = names::of(request.policy, request.key);
        if !names::is_whole(&name) {
            return;
        }
        if kept.names.len() >= kept.clean_at {
            kept.clean(shard);
        }
        kept.names.insert((hash, rest), name.into());
    }

    /// Removes the names of a shard without states if they are the larger part. Does nothing while
    /// another thread reads the names.
    pub(super) fn clean(&self, number: usize, shard: &Shard) {
        if let Ok(mut kept) = self.0[number].try_lock()
            && kept.names.len() > FEW
            && kept.names.len() > 2 * shard.table.keys() + FEW
        {
            kept.clean(shard);
        }
    }

    /// Removes the name of a key.
    pub(super) fn remove(&self, number: usize, key: KeyHash) {
        unpoisoned(self.0[number].lock()).names.remove(&(key.hash, key.rest));
    }

    /// Removes all names.
    pub(super) fn clear(&self, number: usize) {
        let mut kept = unpoisoned(self.0[number].lock());
        kept.names.clear();
        kept.clean_at = FEW;
    }

    /// Returns up to `limit` names that begin with `beginning` and are behind `after`. Also returns the
    /// position of the last visited name, if there are more.
    pub(super) fn list(
        &self,
        after: Option<Position>,
        beginning: &str,
        limit: usize,
    ) -> (Vec<Box<str>>, Option<Position>) {
        let (mut found, mut visited) = (Vec::new(), 0);
        let (start, behind) = after.map_or((0, None), |(number, hash)| (number, Some(hash)));
        for (number, names) in self.0.iter().enumerate().skip(start) {
            let behind = behind.filter(|_| number == start).map_or(Bound::Unbounded, Bound::Excluded);
            for (&hash, name) in unpoisoned(names.lock()).names.range((behind, Bound::Unbounded)) {
                if name.starts_with(beginning) {
                    found.push(name.clone());
                }
                visited += 1;
                if found.len() >= limit || visited >= MOST_VISITED {
                    return (found, Some((number, hash)));
                }
            }
        }
        (found, None)
    }
}

impl ShardNames {
    /// Removes the names without states.
    fn clean(&mut self, shard: &Shard) {
        self.names.retain(|&(hash, rest), _| !shard.run(KeyHash { hash, rest }).is_empty());
        self.clean_at = 2 * self.names.len() + FEW;
    }
}
