//! Connections to servers: opened at the first use, and opened again after failures.

mod calls;
mod kind;
mod race;
mod ready;
mod reconnect;
pub(super) mod socket;

use std::fmt;
use std::time::Duration;

#[cfg(any(feature = "memcached", feature = "etcd"))]
pub(super) use self::calls::MOST;
pub(super) use self::calls::{Calls, Connected, overloaded};
pub(super) use self::kind::Kind;
pub(super) use self::ready::until_ready;
pub(super) use self::reconnect::{Reconnecting, Usable};

/// The timeout of an attempt to connect. It does not depend on the timeouts of the waiting calls.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// The error of a server storage. One error may be returned to many callers, so it can be cloned.
pub(super) trait LinkError: Clone + fmt::Debug + Send + Sync + 'static {
    /// Creates the error of a call that had no connection to `server` in time.
    fn late(server: &str) -> Self;

    /// Creates the error of a call that was not sent, because `in_flight` calls to `server` were in
    /// flight.
    fn overloaded(server: &str, in_flight: usize) -> Self;

    /// Returns `true` for a timeout.
    fn is_timeout(&self) -> bool;
}
