//! Random fleets of processes with leases on a virtual clock.

mod link;
mod process;
mod spending;

use std::time::Duration;

use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::{Key, MemoryStorage, Policy};

use self::link::Link;
use self::process::Process;
pub use self::spending::{Promise, Spending};
use crate::random::Numbers;

/// The policies of fleets: each strategy that can be leased, and several limits.
pub const FLEETS: [&str; 12] = [
    "fixed-window 1000/2s",
    "fixed-window-aligned 1000/2s",
    "calendar 1000/day",
    "moving-window 1000/2s",
    "sliding-window-counter 1000/2s",
    "sliding-window-counter-aligned 1000/2s",
    "token-bucket 1000/2s",
    "token-bucket 1000/2s burst 2500",
    "token-bucket 2000/2s burst 500; moving-window 1000/2s",
    "fixed-window 4500/10s; sliding-window-counter 750/2s",
    "calendar 2500/day; token-bucket 1000/2s burst 1500",
    "moving-window 4000/20s; fixed-window-aligned 500/1s",
];

/// The number of steps of a [`Rhythm`]'s round.
const ROUND: u64 = 60;
/// The step of a round at which leases are about to end.
const LATE: u64 = 20;

/// The times at which the processes hit. With a rhythm, each period has a round of [`ROUND`] steps.
/// The late processes take a slice at its begin, and spend it from the step [`LATE`] on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rhythm {
    None,
    /// The other processes hit before the late ones.
    Early,
    /// The other processes hit together with the late ones.
    Late,
}

/// A random fleet.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub policy: Policy,
    /// The configured time of a lease in microseconds, if it is not the default.
    pub ttl: Option<u64>,
    pub rhythm: Rhythm,
    pub slice: u32,
    pub processes: u64,
    /// The most hits of a process and runtime in a step.
    pub load: u64,
    /// The mean time of a step in microseconds.
    pub step: u64,
    pub steps: u64,
    /// The number of losses in 100 messages.
    pub losses: u64,
    /// The number of keys. With two, each process has room for one.
    pub keys: u64,
    /// `true` if processes stop, crash and close their leases, links fail, callers leave, and hits
    /// are charged and settled.
    pub is_troubled: bool,
}

impl Fleet {
    /// Returns a random fleet with this policy.
    pub fn random(policy: Policy, numbers: &mut Numbers) -> Self {
        let ttl = numbers.one_of(&[None, None, Some(20_000), Some(700_000)]);
        let lease = ttl.unwrap_or_else(|| default_lease(&policy));
        let rhythm = numbers.one_of(&[Rhythm::None, Rhythm::Early, Rhythm::Late]);
        let steps = match rhythm {
            Rhythm::None => [2_000, 10_000, 40_000],
            Rhythm::Early | Rhythm::Late => [lease / 2_000, lease / 500, lease / 200],
        };
        Self {
            policy,
            ttl,
            rhythm,
            slice: numbers.one_of(&[3, 20, 1_000, 1_000]),
            processes: 1 + numbers.below(8),
            load: numbers.one_of(&[2, 10, 50, 50]),
            step: numbers.one_of(&steps),
            steps: numbers.one_of(&[100, 300]),
            losses: numbers.one_of(&[0, 0, 2, 20]),
            keys: numbers.one_of(&[1, 1, 1, 2]),
            is_troubled: numbers.below(4) > 0,
        }
    }

    /// Returns the longest time of a lease in microseconds.
    pub fn lease(&self) -> u64 {
        self.ttl.unwrap_or_else(|| default_lease(&self.policy))
    }

    /// Runs the fleet. It begins up to ten seconds before midnight, so that the windows of a day
    /// end, too.
    pub fn run(&self, numbers: &mut Numbers) -> Spending {
        let clock = ManualClock::default();
        clock.set(clock.now().minus(numbers.below(10_000_000)));
        let storage = MemoryStorage::builder().clock(clock.clone()).build().unwrap();
        let mut spending = Spending::default();
        let windows = spending.windows();
        let begin = |numbers: &mut Numbers| {
            Process::start(self, Link::new(&storage, &windows, self.losses, numbers), clock.now(), numbers)
        };
        let mut processes: Vec<_> = (0..self.processes).map(|_| begin(numbers)).collect();
        for step in 0..self.steps {
            let passed = Duration::from_micros(self.pause(step, numbers));
            clock.advance(passed);
            for process in &mut processes {
                process.pass(passed);
                process.step(self, step, clock.now(), &mut spending, numbers);
                if self.is_troubled && numbers.below(200) == 0 {
                    if numbers.below(2) == 0 {
                        process.close();
                    }
                    // A crash: no task of the process runs after it.
                    spending.count(std::mem::replace(process, begin(numbers)).leases());
                }
            }
        }
        for process in &processes {
            spending.count(process.leases());
        }
        spending
    }

    /// Returns the microseconds to the next step.
    fn pause(&self, step: u64, numbers: &mut Numbers) -> u64 {
        let (late, period) = (self.lease() * 8 / 10, 20 * default_lease(&self.policy));
        let jump = match (self.rhythm, step % ROUND) {
            (Rhythm::None, _) if numbers.below(40) == 0 => self.lease() * numbers.below(40),
            (Rhythm::Early | Rhythm::Late, LATE) => late,
            (Rhythm::Early | Rhythm::Late, 0) => period.saturating_sub(late),
            _ => 0,
        };
        jump + numbers.below(2 * self.step)
    }
}

/// Returns the default time of a lease in microseconds: a twentieth of the shortest period, and at
/// most a second.
fn default_lease(policy: &Policy) -> u64 {
    policy.limits().iter().map(|limit| limit.quota().period_micros() / 20).min().unwrap().min(1_000_000)
}

/// Returns the key with this number.
fn key(number: usize) -> Key {
    Key::from(number as u64)
}
