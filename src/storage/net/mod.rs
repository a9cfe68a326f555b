//! What the ways to all servers have in common: connected when they are used, and again after failures.

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

/// How long connecting may take, whoever waits for it.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// Why there is no answer, as one kind of server tells it. Many may be told the same.
pub(super) trait LinkError: Clone + fmt::Debug + Send + Sync + 'static {
    /// There was no connection to `server` in time.
    fn late(server: &str) -> Self;

    /// So many calls are in flight on the connection to `server` that this one was not sent.
    fn overloaded(server: &str, in_flight: usize) -> Self;

    /// Whether a deadline has passed.
    fn is_timeout(&self) -> bool;
}
