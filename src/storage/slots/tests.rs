//! Random schedules of processes that share the slots of a key, on a virtual clock.

use std::time::Duration;

use super::{Claim, Ledger};
use crate::time::{Timestamp, micros};

const TIME_TO_LIVE: Duration = Duration::from_secs(30);
const RENEWAL: u64 = 10_000_000;
const SECOND: u64 = 1_000_000;
const SCHEDULES: u64 = 100_000;
const STEPS: usize = 40;

/// Pseudorandom numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn small(&mut self, limit: u32) -> u32 {
        u32::try_from(self.below(limit.into())).unwrap_or(0)
    }
}

/// A process that shares the slots: what it knows, and its clock.
#[derive(Clone)]
struct Process {
    id: u64,
    sequence: u64,
    in_use: u32,
    /// The time by which its clock is ahead, in microseconds.
    ahead: u64,
    renewed: u64,
    is_alive: bool,
    /// Claims that were sent, and arrive late or twice.
    delayed: Vec<Claim>,
}

struct Schedule {
    ledger: Ledger,
    slots: u32,
    /// The real time in microseconds.
    now: u64,
    processes: Vec<Process>,
    next_id: u64,
    /// `true` while more slots may be in use, because a process has not renewed its own in time.
    was_late: bool,
}

impl Schedule {
    fn new(numbers: &mut Numbers) -> Self {
        let mut schedule = Self {
            ledger: Ledger::default(),
            slots: 1 + numbers.small(6),
            now: 1_000 * SECOND,
            processes: Vec::new(),
            next_id: 1,
            was_late: false,
        };
        for _ in 0..2 + numbers.below(3) {
            schedule.start(numbers);
        }
        schedule
    }

    fn start(&mut self, numbers: &mut Numbers) {
        // Clocks differ by less than two thirds of the time to live.
        let ahead = numbers.below(19 * SECOND);
        let renewed = self.now;
        let (id, delayed) = (self.next_id, Vec::new());
        self.processes.push(Process { id, sequence: 0, in_use: 0, ahead, renewed, is_alive: true, delayed });
        self.next_id += 1;
    }

    /// Makes a claim. The reply may be lost, and the message may arrive again later.
    fn claim(&mut self, at: usize, costs: &[u32], numbers: &mut Numbers) {
        let (slots, process) = (self.slots, &mut self.processes[at]);
        process.sequence += 1;
        let (least, first) = (process.in_use, costs.first().copied().unwrap_or(0));
        let all: u32 = costs.iter().sum();
        let claim = Claim {
            process: process.id,
            sequence: process.sequence,
            least,
            first: least + first,
            most: (least + all).min(slots).max(least),
            slots,
            time_to_live: TIME_TO_LIVE,
        };
        match numbers.below(8) {
            // The message is lost, or arrives later.
            0 => return,
            1 => return process.delayed.push(claim),
            2 => process.delayed.push(claim),
            _ => {}
        }
        let granted = self.ledger.claim(Timestamp::from_micros(self.now + process.ahead), &claim);
        self.ledger = Ledger::parse(&self.ledger.to_text()).expect("a ledger parses its own text");
        assert!(granted.count >= claim.least && granted.count <= claim.most.max(claim.least));
        process.renewed = self.now;
        if numbers.below(8) == 0 {
            // The reply is lost, so nothing is admitted.
            return;
        }
        for cost in costs {
            if process.in_use + cost <= granted.count {
                process.in_use += cost;
            } else {
                break;
            }
        }
    }

    fn step(&mut self, numbers: &mut Numbers) {
        let at = usize::try_from(numbers.below(self.processes.len() as u64)).unwrap_or(0);
        let is_alive = self.processes[at].is_alive;
        match numbers.below(10) {
            0..=3 if is_alive => {
                let costs: Vec<u32> = (0..=numbers.below(3)).map(|_| 1 + numbers.small(2)).collect();
                let costs: Vec<u32> = costs.into_iter().filter(|cost| *cost <= self.slots).collect();
                self.claim(at, &costs, numbers);
            }
            4..=6 if is_alive && self.processes[at].in_use > 0 => {
                let process = &mut self.processes[at];
                process.in_use -= 1 + numbers.small(process.in_use);
                self.claim(at, &[], numbers);
            }
            7 => {
                // A late or repeated message arrives. Messages do not outlive the time to live.
                let process = &mut self.processes[at];
                if let Some(claim) = process.delayed.pop() {
                    self.ledger.claim(Timestamp::from_micros(self.now + process.ahead), &claim);
                }
            }
            8 => self.crash_or_pause(at, numbers),
            _ => self.wait(numbers.below(6 * SECOND), numbers),
        }
    }

    fn crash_or_pause(&mut self, at: usize, numbers: &mut Numbers) {
        if !self.processes[at].is_alive {
            return;
        }
        match numbers.below(4) {
            0 => {
                // A crash ends its requests. A new process starts.
                (self.processes[at].is_alive, self.processes[at].in_use) = (false, 0);
                self.processes[at].delayed.clear();
                self.start(numbers);
            }
            1 => {
                // A pause that is longer than the time to live. The others go on, and take its slots.
                self.was_late |= self.processes[at].in_use > 0;
                self.processes[at].is_alive = false;
                for other in 0..self.processes.len() {
                    self.wait(52 * SECOND / self.processes.len() as u64, numbers);
                    if self.processes[other].is_alive {
                        self.claim(other, &[1, 1], numbers);
                    }
                }
                self.processes[at].delayed.clear();
                self.processes[at].is_alive = true;
                self.renew(at, numbers);
            }
            _ => {}
        }
    }

    /// Time passes, and each process renews its slots in time.
    fn wait(&mut self, span: u64, numbers: &mut Numbers) {
        for _ in 0..span.div_ceil(SECOND) {
            self.now += SECOND;
            for at in 0..self.processes.len() {
                if self.processes[at].is_alive && self.now - self.processes[at].renewed >= RENEWAL {
                    self.renew(at, numbers);
                }
            }
        }
    }

    /// Renews the slots of a process. A renewal that is lost is repeated.
    fn renew(&mut self, at: usize, numbers: &mut Numbers) {
        self.claim(at, &[], numbers);
        while self.processes[at].renewed < self.now {
            self.claim(at, &[], numbers);
        }
    }

    fn in_use(&self) -> u32 {
        self.processes.iter().map(|process| process.in_use).sum()
    }
}

#[test]
fn random_schedules_never_use_more_slots_than_there_are() {
    let mut numbers = Numbers(20_261_125);
    let (mut full, mut late) = (0_u64, 0_u64);
    for number in 0..SCHEDULES {
        let mut schedule = Schedule::new(&mut numbers);
        for _ in 0..STEPS {
            schedule.step(&mut numbers);
            let in_use = schedule.in_use();
            assert!(schedule.was_late || in_use <= schedule.slots, "schedule {number}: {in_use} of {}", schedule.slots);
            full += u64::from(in_use == schedule.slots);
            late += u64::from(in_use > schedule.slots);
            // The slots of a paused process are counted again, so nothing is granted until enough
            // requests have ended.
            schedule.was_late &= in_use > schedule.slots;
        }
        // After the time to live, all slots of crashed processes are free, and those of the others when
        // their requests have ended.
        for at in 0..schedule.processes.len() {
            schedule.processes[at].is_alive = false;
            schedule.processes[at].in_use = 0;
        }
        let (after, process) = (schedule.now + 20 * SECOND + micros(TIME_TO_LIVE), u64::MAX);
        let (slots, time_to_live) = (schedule.slots, TIME_TO_LIVE);
        let claim = Claim { process, sequence: 1, least: 0, first: slots, most: slots, slots, time_to_live };
        let granted = schedule.ledger.claim(Timestamp::from_micros(after), &claim);
        assert_eq!((granted.count, granted.free), (slots, 0), "schedule {number}");
    }
    assert!(full > SCHEDULES && late > SCHEDULES / 100, "the schedules reach both cases: {full}, {late}");
}
