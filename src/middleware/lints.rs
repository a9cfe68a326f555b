//! The lints that a layer has reported.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::lint::Lint;

/// The number of requests that are inspected after the start.
const INSPECTED_REQUESTS: u32 = 1_024;

/// The lints that a layer has reported, and the number of requests that it still inspects.
#[derive(Debug)]
pub(super) struct Lints {
    started: AtomicBool,
    left: AtomicU32,
    reported: AtomicU32,
}

impl Default for Lints {
    fn default() -> Self {
        Self { started: AtomicBool::new(false), left: AtomicU32::new(INSPECTED_REQUESTS), reported: AtomicU32::new(0) }
    }
}

impl Lints {
    /// Returns `true` at the first call.
    pub(super) fn start(&self) -> bool {
        !self.started.swap(true, Ordering::Relaxed)
    }

    /// Returns `true` if the next request is to be inspected.
    #[inline]
    pub(super) fn is_inspecting(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// Counts an inspected request, and returns the number of requests that were left before it. If
    /// other threads have counted the last ones meanwhile, returns 1.
    pub(super) fn count_inspected(&self) -> u32 {
        let count = |left: u32| left.checked_sub(1);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).unwrap_or(1)
    }

    /// Returns `true` at the first call with this lint.
    pub(super) fn is_first(&self, lint: Lint) -> bool {
        self.reported.fetch_or(lint.bit(), Ordering::Relaxed) & lint.bit() == 0
    }
}
