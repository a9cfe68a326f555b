//! The short path compared with the other one, on random rows.

use tokio::sync::oneshot;

use super::Row;
use crate::in_flight::waiting::Waiting;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::storage::{KeyTable, TableKey};
use crate::strategy::InFlightLimit;

const ROWS: u64 = 20_000;
const STEPS: u64 = 30;

/// Pseudorandom numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(limit)).unwrap_or(0)
    }

    /// Returns a small number, or one near the largest.
    fn edge(&mut self) -> u32 {
        if self.below(8) == 0 { u32::MAX - self.below(3) } else { self.below(6) }
    }
}

fn policy(slots: u32) -> Policy {
    Policy::new(InFlightLimit(slots), Quota::per_second(1))
}

/// Takes slots as a table does: on the short path, or else on the other one.
fn take_short(row: &mut Row<()>, cost: u32, slots: u32) -> Option<u32> {
    row.take_alone(cost, slots).or_else(|| row.take(cost, slots))
}

/// A row that is changed on the short path, and a row that is never.
struct Pair {
    rows: [Row<()>; 2],
    at: TableKey,
    ticket: u64,
}

impl Pair {
    fn step(&mut self, numbers: &mut Numbers) {
        let [short, long] = &mut self.rows;
        match numbers.below(12) {
            0..=5 => {
                let (cost, slots) = (1 + numbers.edge().min(u32::MAX - 1), numbers.edge());
                let (alone, before) = (short.is_alone(), short.in_use());
                let is_taken = short.take_alone(cost, slots).inspect(|_| short.give_back(cost)).is_some();
                assert_eq!(short.in_use(), before);
                let expected = long.take(cost, slots);
                assert_eq!(is_taken, alone && expected.is_some(), "{cost} of {slots} slots, {before} in use");
                assert_eq!(take_short(short, cost, slots), expected, "{cost} of {slots} slots, {before} in use");
            }
            6..=8 => {
                let cost = numbers.below(4).min(short.in_use());
                self.rows.iter_mut().for_each(|row| row.give_back(cost));
            }
            9 => {
                let (slots, cost) = (numbers.below(6), 1 + numbers.below(3));
                self.ticket += 1;
                for row in &mut self.rows {
                    let (answer, policy) = (oneshot::channel().0, policy(slots).into());
                    row.enter(self.ticket, Waiting { policy, cost, seats: None, seat: None, answer });
                }
            }
            10 if numbers.below(10) == 0 => {
                let (policy, key) = (policy(numbers.below(6)), Key::from("a"));
                self.rows.iter_mut().for_each(|row| row.share(self.at, &policy, &key));
            }
            10 => {
                let ticket = self.ticket;
                self.rows.iter_mut().for_each(|row| row.leave(ticket));
            }
            _ => {
                let left = self.rows.each_mut().map(|row| row.grant().len());
                assert_eq!(left[0], left[1]);
            }
        }
    }
}

#[test]
fn short_path_takes_the_same_slots_as_the_other_one() {
    let (mut numbers, table) = (Numbers(20_261_128), KeyTable::<Row<()>>::new(16));
    let at = table.place(&policy(1), &Key::from("a"));
    let (mut alone, mut others) = (0, 0);
    for _ in 0..ROWS {
        let mut pair = Pair { rows: Default::default(), at, ticket: 0 };
        for _ in 0..STEPS {
            pair.step(&mut numbers);
            let [short, long] = &pair.rows;
            let numbers_of = |row: &Row<()>| (row.in_use(), row.waiting(), row.is_alone(), row.free(5));
            assert_eq!(numbers_of(short), numbers_of(long));
            let count = if short.is_alone() { &mut alone } else { &mut others };
            *count += 1;
        }
    }
    assert!(alone > ROWS && others > ROWS, "the steps reach both cases: {alone}, {others}");
}
