mod decide;
mod error;
mod keys;
mod link;
mod probe;
mod quote;
mod reply;
mod reset;
mod script;
mod size;
mod swap;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use self::error::RedisStorageError;
use self::link::Link;
use self::script::Scripts;
use self::swap::Swapping;
use self::url::Target;
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::net::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, deadline};

/// Shares states between processes on Redis (6.2 or later) or Valkey (7.2 or later).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// let storage = RedisStorage::new("redis://localhost/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = RedisStorage::new("http://localhost").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://localhost\": its scheme is \"http\", write redis://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// One script decides a policy of any number of limits in one round trip, by the server's clock. So
/// concurrent hits of all processes together are admitted exactly up to the limit. A strategy without a
/// [script](crate::strategy::Strategy::script) takes two round trips or more, and its hits can be refused
/// as [contended](crate::Decision::is_contended).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `deadline` | `100ms` | the timeout of a call |
/// | `ca` | the system's roots | for TLS, a PEM file with the certificates to trust |
/// | `sentinel-user`, `sentinel-password` | no login | the login for the sentinels |
///
/// Clones share one connection per server. It needs a tokio runtime with time and I/O, and can be created
/// outside of one.
///
/// | question | guide |
/// |---|---|
/// | URLs for clusters, sentinels, TLS and Unix sockets | [several processes](crate::guide::several_processes#redis-and-valkey) |
/// | the effect of each fault, and its duration | [outages](crate::guide::outages#redis-and-valkey) |
/// | the rights of its user | [operating](crate::guide::operating#redis-rights) |
/// | the memory of a client, `maxmemory-policy` | [operating](crate::guide::operating#redis-memory) |
/// | the keys on the server | [operating](crate::guide::operating#keys-on-redis) |
///
/// # Errors
///
/// Calls fail with [`RedisStorageError`] if the server fails, refuses the command, or does not answer
/// within the timeout. A command that was sent is not sent again, because the server may have executed it:
/// see [`may_have_counted`](RedisStorageError::may_have_counted).
#[derive(Clone)]
pub struct RedisStorage {
    link: Link,
    prefix: Arc<str>,
    deadline: Duration,
    scripts: Scripts,
    /// For strategies without a script.
    swapping: Cas<Swapping>,
    /// Where time is not the server's: in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStorage {
    /// Creates a storage on the servers that `url` names. It does not connect yet.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, or needs a feature that is not enabled. The error quotes
    /// the URL without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { place, access, prefix, deadline } = Target::parse(url)?;
        let (link, scripts, prefix) = (Link::new(place, &access), Scripts::default(), Arc::from(prefix));
        let swapping = swap::on(&link, &prefix, deadline, None);
        Ok(Self { link, prefix, deadline, scripts, swapping, clock: None })
    }

    /// The same, where what is compared and swapped knows of what was changed.
    fn with_swapping(self) -> Self {
        let swapping = swap::on(&self.link, &self.prefix, self.deadline, self.clock.clone());
        Self { swapping, ..self }
    }

    /// Sets the prefix of all keys, in place of the URL's. Defaults to `rl`. Use different prefixes for
    /// programs that share a server and must not share counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    /// [`try_prefix`](Self::try_prefix) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(self.try_prefix(prefix))
    }

    /// As [`prefix`](Self::prefix), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    pub fn try_prefix(self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        Ok(Self { prefix: prefix.into(), ..self }.with_swapping())
    }

    /// Sets the timeout of a call, in place of the URL's. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `deadline` is less than a millisecond or more than an hour.
    /// [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline), without panics.
    ///
    /// # Errors
    ///
    /// Returns an error if `deadline` is less than a millisecond or more than an hour.
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        Ok(Self { deadline, ..self }.with_swapping())
    }

    /// Sets the clock, in place of the server's; for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.with_swapping()
    }

    /// Waits until the servers can decide, in a cluster until every node that holds keys can. Call it
    /// before a program takes traffic.
    ///
    /// It runs every command of the scripts on a key under the [prefix](Self::prefix), and removes the key. So
    /// it finds a missing [right](crate::guide::operating#redis-rights), a renamed command, a replica and a
    /// server without memory. It tries again until `timeout` has passed. [`reset`](Self::reset) needs `SCAN`,
    /// which is not checked.
    ///
    /// # Errors
    ///
    /// Returns the last error when `timeout` has passed. The error of a command that the user may not run
    /// names the command.
    pub async fn ready(&self, timeout: Duration) -> Result<(), RedisStorageError> {
        until_ready(Instant::now() + timeout.min(FOREVER), |deadline| self.probe(deadline)).await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for RedisStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, prefix, deadline, .. } = self;
        f.debug_struct("RedisStorage").field("link", link).field("prefix", prefix).field("deadline", deadline).finish()
    }
}
