//! Assertions that a law suite detects a fault.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Asserts that `check` panics with a message that begins with `law`. `broken` is the faulty
/// implementation, for the message of this assertion.
pub fn assert_breaks(law: &str, broken: impl Debug, check: impl FnOnce()) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(check)) else {
        panic!("{broken:?} obeys all laws, but should break {law:?}")
    };
    let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    assert!(message.starts_with(law), "{broken:?} should break {law:?}, but the suite reports: {message}");
    assert!(message.lines().count() <= 10, "{broken:?}: a failure has at most ten lines: {message}");
}

/// Asserts that each fault breaks the law beside it.
pub fn assert_each_breaks<F: Debug + Copy, const N: usize>(faults: [(F, &str); N], check: impl Fn(F)) {
    for (fault, law) in faults {
        assert_breaks(law, fault, || check(fault));
    }
}
