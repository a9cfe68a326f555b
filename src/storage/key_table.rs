//! A hash table with a bounded number of keys, for wrappers that keep data per key.

use std::hash::{BuildHasher, Hasher};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use foldhash::quality::RandomState;

use crate::key::Key;
use crate::policy::Policy;
use crate::sync::unpoisoned;
use crate::time::micros;

/// The approximate maximum number of rows in a bucket. Each bucket has one lock.
const WAYS: usize = 16;

/// The largest `max_keys` of a table. An empty table takes two bytes of memory for each of
/// `max_keys`.
const MAX_KEYS: usize = 100_000_000;

/// Panics if `max_keys` is out of range. The message contains `example`, a valid number, and
/// `alternative`, the advice for callers that want zero keys.
#[track_caller]
pub(crate) fn assert_max_keys(max_keys: usize, example: &str, alternative: &str) {
    assert!(
        (1..=MAX_KEYS).contains(&max_keys),
        "max_keys must be at least 1 and at most 100 million, for example {example}; {alternative}"
    );
}

/// Returns the microseconds for which a wrapper keeps an entry.
#[track_caller]
pub(crate) fn checked_ttl(ttl: Duration) -> u64 {
    assert!(
        (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(&ttl),
        "invalid ttl {ttl:?}: it must be at least 1 ms and at most 1 day, for example Duration::from_secs(1)"
    );
    micros(ttl)
}

/// A hash table with a row for each policy and key.
///
/// A row's hash selects its bucket. The table itself does not limit the rows. Its callers keep at
/// most [`ways`](Bucket::ways) rows in each bucket, so the table needs no counter that all threads
/// share.
#[derive(Debug)]
pub(crate) struct KeyTable<T> {
    buckets: Box<[Mutex<Vec<KeyedValue<T>>>]>,
    /// The maximum number of rows that callers may keep in a bucket.
    ways: usize,
    secrets: [RandomState; 2],
}

/// Identifies a row: a hash of 128 bits of the policy, the kind and the key. Each table has its own
/// random secrets, so clients cannot construct keys that collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TableKey([u64; 2]);

#[derive(Debug)]
struct KeyedValue<T> {
    key: TableKey,
    value: T,
}

/// The rows of one bucket, locked, with the key that was looked up.
pub(crate) struct Bucket<'a, T> {
    rows: MutexGuard<'a, Vec<KeyedValue<T>>>,
    key: TableKey,
    /// The maximum number of rows that callers may keep in a bucket.
    pub(crate) ways: usize,
}

impl<T> KeyTable<T> {
    /// Creates a table for up to `max_keys` keys, which must be between 1 and [`MAX_KEYS`].
    pub(crate) fn new(max_keys: usize) -> Self {
        let buckets = (max_keys / WAYS).max(1);
        Self {
            buckets: (0..buckets).map(|_| Mutex::default()).collect(),
            ways: max_keys / buckets,
            secrets: [RandomState::default(), RandomState::default()],
        }
    }

    /// Returns the table key of a row. A shadow policy has the same digest as the policy that contains
    /// it, but its own states and its own row.
    pub(crate) fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        let kind = if policy.is_shadow() { policy.limit_digests().first().copied().unwrap_or_default() } else { 0 };
        let [first, second] = self.secrets.each_ref().map(|secret| {
            let mut hasher = secret.build_hasher();
            // The digest is a hash, so another kind makes it that of no other policy.
            hasher.write_u128(policy.digest() ^ u128::from(kind));
            hasher.write(key.as_bytes());
            hasher.finish()
        });
        TableKey([first, second])
    }

    /// Locks the bucket of a row.
    pub(crate) fn lock(&self, key: TableKey) -> Bucket<'_, T> {
        #[allow(clippy::cast_possible_truncation)] // less than the number of buckets
        let number = ((u128::from(key.0[1]) * self.buckets.len() as u128) >> u64::BITS) as usize;
        let rows = unpoisoned(self.buckets[number].lock());
        Bucket { rows, key, ways: self.ways }
    }

    /// Returns the number of rows for which `counts` returns `true`. Locks one bucket at a time.
    pub(crate) fn count(&self, counts: impl Fn(&T) -> bool) -> usize {
        let mut count = 0;
        self.visit_all(|row| count += usize::from(counts(row)));
        count
    }

    /// Calls `visit` for each row. Locks one bucket at a time.
    pub(crate) fn visit_all(&self, mut visit: impl FnMut(&mut T)) {
        let mut bucket = 0;
        while self.visit(bucket, &mut visit) {
            bucket += 1;
        }
    }

    /// Calls `visit` for each row of the bucket with this index. Returns `false` if there is no
    /// such bucket.
    pub(crate) fn visit(&self, bucket: usize, mut visit: impl FnMut(&mut T)) -> bool {
        let Some(bucket) = self.buckets.get(bucket) else { return false };
        let mut rows = unpoisoned(bucket.lock());
        rows.iter_mut().for_each(|row| visit(&mut row.value));
        true
    }
}

impl<T> Bucket<'_, T> {
    pub(crate) fn find(&mut self) -> Option<&mut T> {
        let key = self.key;
        self.rows.iter_mut().find(|row| row.key == key).map(|row| &mut row.value)
    }

    pub(crate) fn find_or_insert(&mut self, make: impl FnOnce() -> T) -> &mut T {
        let key = self.key;
        let at = self.rows.iter().position(|row| row.key == key).unwrap_or_else(|| {
            self.rows.push(KeyedValue { key, value: make() });
            self.rows.len() - 1
        });
        &mut self.rows[at].value
    }

    /// Removes the row that was looked up. Keeps a little memory for the next one.
    pub(crate) fn remove(&mut self) {
        let key = self.key;
        if let Some(at) = self.rows.iter().position(|row| row.key == key) {
            self.rows.swap_remove(at);
        }
        if self.rows.len() < self.rows.capacity() / 4 {
            self.rows.shrink_to(WAYS);
        }
    }

    /// Returns all rows of the bucket except the one that was looked up. They may belong to other
    /// policies.
    pub(crate) fn others(&mut self) -> impl Iterator<Item = &mut T> {
        let key = self.key;
        self.rows.iter_mut().filter(move |row| row.key != key).map(|row| &mut row.value)
    }

    /// Removes the rows for which `keep` returns `false`. Frees the memory of an empty bucket.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&mut T) -> bool) {
        self.rows.retain_mut(|row| keep(&mut row.value));
        if self.rows.is_empty() {
            *self.rows = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    #[test]
    fn rows_differ_by_policy_shadow_and_key() {
        let table = KeyTable::new(100);
        let [one, two] = ["one", "two"].map(|name| Policy::from(Quota::per_day(1)).with_name(name));
        let one = one.shadow(Quota::per_day(2).into()).shadow(Quota::per_hour(2).into());
        let [a, b] = ["a", "b"].map(Key::from);
        let [first, second] = one.shadows() else { panic!("no shadows") };
        let rows = [(&one, &a), (&one, &b), (first, &a), (second, &a), (&two, &a)];
        for (number, (policy, key)) in rows.into_iter().enumerate() {
            let row = table.place(policy, key);
            assert_eq!(table.lock(row).find(), None);
            table.lock(row).find_or_insert(|| number);
        }
        for (number, (policy, key)) in rows.into_iter().enumerate() {
            assert_eq!(table.lock(table.place(policy, key)).find(), Some(&mut number.clone()));
        }
    }

    #[test]
    fn table_holds_nearly_max_keys_and_never_more() {
        for max_keys in [1, 2, 15, 16, 17, 31, 32, 33, 1_000, 1_000_000] {
            let table = KeyTable::<()>::new(max_keys);
            assert!(table.ways >= 1 && table.ways * table.buckets.len() <= max_keys, "{max_keys}");
            assert!(table.ways * table.buckets.len() * 17 / 16 + 16 > max_keys * 15 / 16, "{max_keys}");
        }
    }
}
