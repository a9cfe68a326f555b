//! Checks of errors and panics.

use std::error::Error;
use std::iter::successors;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tower_ratelimit::BoxError;

/// Returns the message of an error and all its causes, after checking that no message repeats its
/// cause.
pub fn message(error: impl Into<BoxError>) -> String {
    let error: BoxError = error.into();
    let levels: Vec<String> =
        successors(Some(&*error as &(dyn Error + 'static)), |&error| error.source()).map(ToString::to_string).collect();
    for pair in levels.windows(2) {
        assert!(!pair[0].contains(&pair[1]), "{levels:?}");
    }
    assert_eq!(format!("{error:#}"), levels.join(": "));
    levels.join(": ")
}

/// Returns the message of a panic.
pub fn panic_message<T>(make: impl FnOnce() -> T) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(make()))) else { panic!("expected a panic") };
    panic.downcast_ref::<&str>().map_or_else(|| panic.downcast_ref::<String>().unwrap().clone(), ToString::to_string)
}
