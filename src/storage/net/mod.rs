//! Connections to servers: opened at the first use, and opened again after failures.

mod calls;
mod get;
pub(super) mod race;
mod ready;
mod reconnect;
pub(super) mod socket;
mod waiters;

use std::time::Duration;

#[cfg(feature = "redis")]
pub(super) use self::calls::Call;
pub(super) use self::calls::{Calls, Connected};
pub(super) use self::ready::until_ready;
pub(super) use self::reconnect::{Reconnecting, Usable};
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
pub(super) use self::waiters::MOST;
pub(super) use self::waiters::overloaded;

/// The timeout of an attempt to connect. It does not depend on the timeouts of the waiting calls.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);
