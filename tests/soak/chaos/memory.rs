//! The memory of processes over time.

use std::fs;
use std::time::Duration;

/// The tolerated growth in KiB: keys until their period ends, buffers, and memory of the allocator.
const TOLERANCE: u64 = 4 * 1_024;

/// The measured sizes in KiB, with the time of each.
#[derive(Debug, Default)]
pub(crate) struct Memory(Vec<(Duration, u64)>);

impl Memory {
    pub(crate) fn note(&mut self, at: Duration, size: u64) {
        self.0.push((at, size));
    }

    /// Returns the largest size of the first half.
    pub(crate) fn early(&self) -> u64 {
        let half = self.0.last().map_or(Duration::ZERO, |(at, _)| *at / 2);
        self.0.iter().filter(|(at, _)| *at <= half).map(|(_, size)| *size).max().unwrap_or(0)
    }

    /// Returns the last size.
    pub(crate) fn late(&self) -> u64 {
        self.0.last().map_or(0, |(_, size)| *size)
    }

    pub(crate) fn is_flat(&self) -> bool {
        self.early() > 0 && self.late() <= self.early() + TOLERANCE
    }
}

/// Returns the resident memory of a process in KiB.
pub(crate) fn resident(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).expect("the process is running");
    let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    size.and_then(|size| size.parse().ok()).expect("the status contains VmRSS")
}
