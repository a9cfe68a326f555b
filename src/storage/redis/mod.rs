mod access;
mod combine;
mod decide;
mod delete_all;
mod error;
mod inspect;
mod keys;
mod link;
mod probe;
mod quote;
mod record;
mod reply;
mod script;
mod size;
mod swap;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::combine::Combiner;
use self::link::Link;
use self::script::Scripts;
use self::swap::SwapStore;
use self::url::{Access, Servers, Target};
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::net::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, StorageError, deadline};

/// Shares rate limit states between processes on Redis (6.2 or later) or Valkey (7.2 or later).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// let storage =
///     RedisStorage::new("redis://localhost/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = RedisStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// One Lua script checks and updates all limits of a policy in one round trip. It uses the server's
/// clock. All processes together admit exactly as many hits as the limit allows.
///
/// Under load, up to 16 hits that wait at the same time share a call, if their policies have the
/// same strategies, without a [`MovingWindow`](crate::MovingWindow). Each hit keeps its own
/// timeout, result and error. In a cluster, each hit has a call of its own. Turn sharing off with
/// [`combine`](Self::combine) behind a proxy that selects the server by the first key of a call,
/// such as Envoy or twemproxy.
///
/// A strategy without a [script](crate::strategy::Strategy::script) uses compare-and-swap. That
/// takes two round trips or more, and a hit that loses every race is refused as
/// [contended](crate::Decision::is_contended).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `deadline` | `100ms` | the timeout of a call |
/// | `combine` | `true` | `false` sends each hit in a call of its own |
/// | `ca` | the system's roots | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
/// | `sentinel-user`, `sentinel-password` | no login | the login for the sentinels |
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
/// | question | guide |
/// |---|---|
/// | passwords that rotate | [operating](crate::guide::operating#logins-that-rotate) |
/// | URLs for clusters, sentinels, TLS and Unix sockets | [several processes](crate::guide::several_processes#redis-and-valkey) |
/// | the effect of each fault, and its duration | [outages](crate::guide::outages#redis-and-valkey) |
/// | the rights that the user needs | [operating](crate::guide::operating#redis-rights) |
/// | memory per client, and `maxmemory-policy` | [operating](crate::guide::operating#redis-memory) |
/// | the keys on the server | [operating](crate::guide::operating#keys-on-redis) |
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server is unreachable, refuses the command, or does
/// not reply within the timeout. A call that the server may have executed is not retried: see
/// [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct RedisStorage {
    link: Link,
    /// The settings of `link`, to create another one with other logins or certificates.
    target: Arc<(Servers, Access)>,
    prefix: Arc<str>,
    deadline: Duration,
    combine: bool,
    scripts: Scripts,
    combiner: Arc<Combiner>,
    /// Decides policies with a strategy that has no script.
    cas: Cas<SwapStore>,
    /// Replaces the server's clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStorage {
    /// Creates a storage for the servers in `url`. It connects on first use, but with TLS it loads
    /// the certificates and the private key immediately.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, if it needs a feature that is not enabled or
    /// that the system lacks, or if a certificate or the private key cannot be loaded. The error
    /// quotes the URL without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { servers, access, prefix, deadline, combine } = Target::parse(url)?;
        let (link, target) = (Link::new(servers.clone(), &access), Arc::new((servers, access)));
        let (scripts, prefix) = (Scripts::default(), Arc::from(prefix));
        let cas = swap::cas(&link, &prefix, deadline, None);
        let combiner = Combiner::new(combine);
        Ok(Self { link, target, prefix, deadline, combine, scripts, combiner, cas, clock: None })
    }

    /// Rebuilds compare-and-swap and the combiner, with the current prefix, timeout and clock.
    fn with_new_cas(self) -> Self {
        let cas = swap::cas(&self.link, &self.prefix, self.deadline, self.clock.clone());
        Self { cas, combiner: Combiner::new(self.combine), ..self }
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Use a different prefix for each program that shares a server and must not share counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        Self { prefix: prefix.into(), ..self }.with_new_cas()
    }

    /// Sets the timeout of a call. Overrides the URL. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `deadline` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(deadline::checked(deadline));
        Self { deadline, ..self }.with_new_cas()
    }

    /// Enables or disables calls that several waiting hits share. Overrides the URL. Defaults to
    /// `true`.
    ///
    /// Set it to `false` behind a proxy that distributes keys to several servers, such as Envoy or
    /// twemproxy. A call with several hits has several keys. Such a proxy sends the call to the
    /// server of the first key. So hits of the other keys count on the wrong server, and more hits
    /// than the limit are admitted.
    ///
    /// With a cluster URL, hits never share a call. With the URL of a single server that belongs to
    /// a cluster, the server refuses a call whose keys are in several slots. From then on, the
    /// storage sends each hit in a call of its own.
    #[must_use]
    pub fn combine(self, combine: bool) -> Self {
        Self { combine, ..self }.with_new_cas()
    }

    /// Replaces the server's clock in tests. Requires the feature `testing`.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.with_new_cas()
    }

    /// Waits until the server is ready. In a cluster, waits for every node that holds keys.
    ///
    /// Call it before the program accepts traffic. It retries until `timeout` has passed.
    ///
    /// It runs every command of the scripts on a temporary key under the [prefix](Self::prefix).
    /// This detects a missing [right](crate::guide::operating#redis-rights), a renamed command, a
    /// read-only replica and a server without memory. It does not check `SCAN`, which only
    /// [`clear_all`](crate::Storage::clear_all) needs.
    ///
    /// # Errors
    ///
    /// Returns the last error when `timeout` has passed. An attempt that timed out does not replace
    /// an earlier error. If the user has no right to run a command, the error names the command.
    pub async fn ready(&self, timeout: Duration) -> Result<(), StorageError> {
        until_ready(Instant::now() + timeout.min(LONGEST_WAIT), |deadline| self.probe(deadline)).await
    }
}

/// The value of the metrics label `storage`.
const LABEL: &str = "redis";

/// The maximum timeout of `ready`. An `Instant` in a more distant future can overflow on some
/// systems.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for RedisStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, prefix, deadline, .. } = self;
        f.debug_struct("RedisStorage").field("link", link).field("prefix", prefix).field("deadline", deadline).finish()
    }
}
