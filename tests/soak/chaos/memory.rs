//! The memory of processes, again and again.

use std::fs;
use std::time::Duration;

/// What may come and go: keys that are remembered until their period is over, buffers, what the
/// allocator keeps.
const PLAY: u64 = 4 * 1_024;

/// What was seen and when, in KiB.
#[derive(Debug, Default)]
pub(crate) struct Memory(Vec<(Duration, u64)>);

impl Memory {
    pub(crate) fn note(&mut self, at: Duration, size: u64) {
        self.0.push((at, size));
    }

    /// The most that there was in the first half.
    pub(crate) fn early(&self) -> u64 {
        let half = self.0.last().map_or(Duration::ZERO, |(at, _)| *at / 2);
        self.0.iter().filter(|(at, _)| *at <= half).map(|(_, size)| *size).max().unwrap_or(0)
    }

    /// What there was at last.
    pub(crate) fn late(&self) -> u64 {
        self.0.last().map_or(0, |(_, size)| *size)
    }

    pub(crate) fn is_flat(&self) -> bool {
        self.early() > 0 && self.late() <= self.early() + PLAY
    }
}

/// What a process has in memory, in KiB.
pub(crate) fn resident(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("it is running");
    let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    size.and_then(|size| size.parse().ok()).expect("its size is told")
}
