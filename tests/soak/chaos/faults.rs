//! The faults of the server.

use std::thread;
use std::time::Duration;

use common::random::Numbers;
use common::servers::Server;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Killed, and restarted after a pause.
    Killed,
    /// Terminated, and restarted after a pause.
    Stopped,
    /// Suspended, and resumed after a pause.
    Paused,
    /// Restarted without a pause.
    Restarted,
}

pub(crate) const KINDS: [Kind; 4] = [Kind::Killed, Kind::Stopped, Kind::Paused, Kind::Restarted];

pub(crate) struct Faults {
    server: Server,
    numbers: Numbers,
    /// The number of faults of each kind.
    pub(crate) happened: [u32; KINDS.len()],
}

impl Faults {
    pub(crate) fn new(server: Server, numbers: Numbers) -> Self {
        Self { server, numbers, happened: [0; KINDS.len()] }
    }

    /// Waits, then causes one of the faults that have happened least.
    pub(crate) fn next(&mut self) {
        self.wait(300, 1_000);
        let least = self.happened.iter().copied().min().unwrap_or(0);
        let rare: Vec<usize> = (0..KINDS.len()).filter(|&kind| self.happened[kind] <= least + 1).collect();
        let kind = self.numbers.one_of(&rare);
        self.happened[kind] += 1;
        match KINDS[kind] {
            Kind::Killed => {
                self.server.kill();
                self.wait(300, 1_500);
                self.server.restart();
            }
            Kind::Stopped => {
                self.server.end();
                self.wait(300, 1_500);
                self.server.restart();
            }
            Kind::Paused => {
                self.server.stop();
                // Longer than the deadline and its tolerance.
                self.wait(1_200, 1_800);
                self.server.resume();
            }
            Kind::Restarted => self.server.restart(),
        }
    }

    fn wait(&mut self, least: u64, most: u64) {
        thread::sleep(Duration::from_millis(least + self.numbers.below(most - least)));
    }
}
