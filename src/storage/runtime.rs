//! The tokio runtime of the caller.

use std::panic::catch_unwind;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::sleep;

/// Returns the current runtime if its time is enabled. Tokio has no other way to find this out.
pub(crate) fn runtime_with_time() -> Option<Handle> {
    let runtime = Handle::try_current().ok()?;
    catch_unwind(|| drop(sleep(Duration::ZERO))).ok()?;
    Some(runtime)
}
