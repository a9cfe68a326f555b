//! What is kept of keys beside a storage, in bounded room.

use std::hash::{BuildHasher, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::quality::RandomState;

use crate::{Key, Policy};

/// So many keys look for room at one place, and wait for one lock.
const WAYS: usize = 16;

/// For so many keys there is a table at most: its buckets take two bytes for each before there is any.
pub(super) const MOST: usize = 100_000_000;

/// Rows found by policy and key. A key has room in one bucket only, so that the whole is bounded without anybody counting it.
#[derive(Debug)]
pub(super) struct Table<T> {
    buckets: Box<[Mutex<Vec<Row<T>>>]>,
    ways: usize,
    secrets: [RandomState; 2],
}

/// Where a key's row is, if there is one: a keyed hash of policy and key, 128 bits, with a secret of this table's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TableKey([u64; 2]);

#[derive(Debug)]
struct Row<T> {
    place: TableKey,
    it: T,
}

/// The rows of one bucket, locked.
pub(super) struct Bucket<'a, T> {
    rows: MutexGuard<'a, Vec<Row<T>>>,
    place: TableKey,
    /// How many of the rows may be there to stay.
    pub(super) ways: usize,
}

impl<T> Table<T> {
    /// With room for so many keys at most, at least 1 and no more than [`MOST`].
    pub(super) fn new(most: usize) -> Self {
        let buckets = (most / WAYS).max(1);
        Self {
            buckets: (0..buckets).map(|_| Mutex::default()).collect(),
            ways: most / buckets,
            secrets: [RandomState::default(), RandomState::default()],
        }
    }

    /// `what` tells rows of one policy's name and one key apart.
    pub(super) fn place(&self, policy: &Policy, what: u32, key: &Key) -> TableKey {
        let [first, second] = self.secrets.each_ref().map(|secret| {
            let mut hasher = secret.build_hasher();
            hasher.write_u128(policy.digest());
            hasher.write_u32(what);
            hasher.write(key.as_bytes());
            hasher.finish()
        });
        TableKey([first, second])
    }

    pub(super) fn lock(&self, place: TableKey) -> Bucket<'_, T> {
        #[allow(clippy::cast_possible_truncation)] // less than the number of buckets
        let number = ((u128::from(place.0[1]) * self.buckets.len() as u128) >> u64::BITS) as usize;
        let rows = self.buckets[number].lock().unwrap_or_else(PoisonError::into_inner);
        Bucket { rows, place, ways: self.ways }
    }

    /// Counts rows, a bucket at a time.
    pub(super) fn count(&self, counts: impl Fn(&T) -> bool) -> usize {
        let (mut bucket, mut count) = (0, 0);
        while self.visit(bucket, |row| count += usize::from(counts(row))) {
            bucket += 1;
        }
        count
    }

    /// Calls `visit` for each row of one bucket. Buckets are numbered from 0. Returns `false` if
    /// there is no such bucket.
    pub(super) fn visit(&self, bucket: usize, mut visit: impl FnMut(&mut T)) -> bool {
        let Some(bucket) = self.buckets.get(bucket) else { return false };
        let mut rows = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        rows.iter_mut().for_each(|row| visit(&mut row.it));
        true
    }
}

impl<T> Bucket<'_, T> {
    pub(super) fn find(&mut self) -> Option<&mut T> {
        let place = self.place;
        self.rows.iter_mut().find(|row| row.place == place).map(|row| &mut row.it)
    }

    pub(super) fn find_or_insert(&mut self, make: impl FnOnce() -> T) -> &mut T {
        let place = self.place;
        let at = self.rows.iter().position(|row| row.place == place).unwrap_or_else(|| {
            self.rows.push(Row { place, it: make() });
            self.rows.len() - 1
        });
        &mut self.rows[at].it
    }

    /// All rows but that of the place, whoever's they are.
    pub(super) fn others(&mut self) -> impl Iterator<Item = &mut T> {
        let place = self.place;
        self.rows.iter_mut().filter(move |row| row.place != place).map(|row| &mut row.it)
    }

    /// Throws out the rows that are not to stay. Room that was made for many is given back when nobody is left.
    pub(super) fn retain(&mut self, mut stays: impl FnMut(&mut T) -> bool) {
        self.rows.retain_mut(|row| stays(&mut row.it));
        if self.rows.is_empty() {
            *self.rows = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quota;

    #[test]
    fn rows_are_of_a_policy_a_key_and_what_else_tells_them_apart() {
        let table = Table::new(100);
        let [one, two] = ["one", "two"].map(|name| Policy::from(Quota::per_day(1)).with_name(name));
        let [a, b] = ["a", "b"].map(Key::from);
        let places = [(&one, 0, &a), (&one, 0, &b), (&one, 1, &a), (&two, 0, &a)];
        for (number, (policy, what, key)) in places.into_iter().enumerate() {
            let place = table.place(policy, what, key);
            assert_eq!(table.lock(place).find(), None);
            table.lock(place).find_or_insert(|| number);
        }
        for (number, (policy, what, key)) in places.into_iter().enumerate() {
            assert_eq!(table.lock(table.place(policy, what, key)).find(), Some(&mut number.clone()));
        }
    }

    #[test]
    fn there_is_never_room_for_more_than_was_said() {
        for most in [1, 2, 15, 16, 17, 31, 32, 33, 1_000, 1_000_000] {
            let table = Table::<()>::new(most);
            assert!(table.ways >= 1 && table.ways * table.buckets.len() <= most, "{most}");
            assert!(table.ways * table.buckets.len() * 17 / 16 + 16 > most * 15 / 16, "{most}");
        }
    }
}
