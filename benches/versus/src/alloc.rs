//! An allocator that counts allocations on demand.
//!
//! The crate `allocation-counter` counts during timing, too, and copies the memory at each `realloc`,
//! so it would change the times that this program compares.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ON: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicIsize = AtomicIsize::new(0);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

/// Enables counting until it is dropped. Counting is off during timing, because it slows
/// allocations.
pub struct Count;

impl Count {
    pub fn start() -> Self {
        LIVE.store(0, Ordering::Relaxed);
        ALLOCATIONS.store(0, Ordering::Relaxed);
        ON.store(true, Ordering::Relaxed);
        Self
    }

    /// Returns the bytes that were allocated since the start and not freed.
    #[allow(clippy::unused_self)] // proves that counting is enabled
    pub fn live_bytes(&self) -> f64 {
        LIVE.load(Ordering::Relaxed) as f64
    }

    /// Returns the number of allocations and reallocations since the start.
    #[allow(clippy::unused_self)] // as above
    pub fn allocations(&self) -> f64 {
        ALLOCATIONS.load(Ordering::Relaxed) as f64
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        ON.store(false, Ordering::Relaxed);
    }
}

/// Returns the mean number of allocations per call of `step`.
pub fn allocations_per_call(mut step: impl FnMut()) -> f64 {
    const CALLS: u32 = 1_000;
    // A layer inspects its first 1,024 requests for lints, which allocates for some of them.
    (0..2 * CALLS).for_each(|_| step());
    let count = Count::start();
    for _ in 0..CALLS {
        step();
    }
    count.allocations() / f64::from(CALLS)
}

fn record(allocations: usize, bytes: isize) {
    if ON.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(allocations, Ordering::Relaxed);
        LIVE.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(1, layout.size().cast_signed());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        record(1, layout.size().cast_signed());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        record(1, size.cast_signed() - layout.size().cast_signed());
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        record(0, -layout.size().cast_signed());
        unsafe { System.dealloc(pointer, layout) }
    }
}
