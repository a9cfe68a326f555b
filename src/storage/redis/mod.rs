//! A storage on Redis or Valkey.

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

use self::combine::{Combine, Combiner};
use self::link::Link;
use self::script::Scripts;
use self::swap::SwapStore;
use self::url::{Access, RedisUrl, Servers};
use crate::error::{ConfigError, or_panic};
use crate::storage::net::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, StorageError, settings};

/// Shares rate limit states between processes through Redis (6.2 or later) or Valkey (7.2 or later).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// let storage =
///     RedisStorage::new("redis://localhost/?prefix=shop")?.timeout(Duration::from_millis(50));
///
/// let error = RedisStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// One Lua script checks and updates all limits of a policy in one round trip, by the server's
/// clock. All processes together admit exactly as many hits as the limit allows.
///
/// Under load, up to 16 hits share a call to a single server: see [`combine`](Self::combine).
///
/// If a strategy of a policy has no [script](crate::strategy::Strategy::script), the storage uses
/// compare-and-swap for that policy, as [`Cas`] does. A hit then takes two round trips or more. If
/// other processes change the key before each swap, the hit is refused as
/// [contended](crate::Decision::is_contended).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `timeout` | `100ms` | the timeout of a call |
/// | `combine` | `true` | `true` lets several hits share a call to a single server, `always` to any server |
/// | `ca` | the system's roots | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
/// | `sentinel-user`, `sentinel-password` | no login | the login for the sentinels |
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime. It connects on first use, and reconnects after
/// a failure.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server is unreachable, refuses the command, sends an
/// unexpected reply, or does not reply within the timeout. They also fail if too many calls are in
/// flight, or if the storage does not support the policy. The [kind](StorageError::kind) of the
/// error names the cause.
///
/// A call that the server may have executed is not retried: see
/// [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct RedisStorage {
    link: Link,
    /// The settings of `link`, to create another one with other logins or certificates.
    target: Arc<(Servers, Access)>,
    prefix: Arc<str>,
    deadline: Duration,
    combine: Combine,
    scripts: Scripts,
    combiner: Arc<Combiner>,
    /// Decides policies with a strategy that has no script.
    cas: Cas<SwapStore>,
    /// Replaces the server's clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStorage {
    /// Creates a storage for the servers in `url`. The guide lists the
    /// [forms of the URL](Self#urls).
    ///
    /// This does not connect. With TLS, it loads the certificates and the private key.
    ///
    /// # Errors
    ///
    /// Returns an error in these cases. The error quotes the URL without its login.
    ///
    /// - The URL cannot be parsed.
    /// - The URL needs a feature of this crate that is not enabled, or Unix sockets on a system
    ///   without them.
    /// - A certificate or the private key cannot be loaded.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let RedisUrl { servers, access, prefix, deadline, combine } = RedisUrl::parse(url)?;
        let (link, target) = (Link::new(servers.clone(), &access), Arc::new((servers, access)));
        let (scripts, prefix) = (Scripts::default(), Arc::from(prefix));
        let cas = swap::cas(&link, &prefix, deadline, None);
        let combiner = Combiner::new(combine, Arc::clone(&prefix));
        Ok(Self { link, target, prefix, deadline, combine, scripts, combiner, cas, clock: None })
    }

    /// Creates the compare-and-swap storage and the combiner again, with the current settings.
    fn with_new_cas(self) -> Self {
        let cas = swap::cas(&self.link, &self.prefix, self.deadline, self.clock.clone());
        let combiner = Combiner::new(self.combine, Arc::clone(&self.prefix));
        Self { cas, combiner, ..self }
    }

    /// Sets the prefix of all keys on the server. Overrides the option `prefix` of the URL.
    /// Defaults to `rl`.
    ///
    /// Programs with the same prefix on the same server share their counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 printable ASCII characters, or contains a space, `{` or
    /// `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        Self { prefix: prefix.into(), ..self }.with_new_cas()
    }

    /// Sets the timeout of a call. Overrides the option `timeout` of the URL. Defaults to 100
    /// milliseconds.
    ///
    /// [`ready`](Self::ready) has its own timeout. [`clear_all`](crate::Storage::clear_all) applies
    /// this timeout to each of its steps.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(self, timeout: Duration) -> Self {
        or_panic(settings::checked_timeout(timeout));
        Self { deadline: timeout, ..self }.with_new_cas()
    }

    /// Sets whether concurrent hits can be combined into one call, which saves work on the server
    /// and in the client. Overrides the option `combine` of the URL. Defaults to `true`.
    ///
    /// While at least four hits are in flight, further hits wait for a moment and then share a
    /// call, up to 16 of them. Each hit keeps its own timeout, result and error. Hits share a call
    /// only if their policies have the same strategies, at most eight limits, and no
    /// [`MovingWindow`](crate::MovingWindow). Peeks, charges, settlements and clears are never
    /// combined.
    ///
    /// Hits are combined only on a connection that has proved to lead to a single server. Under
    /// load, the storage makes this proof once per connection, in the background, and
    /// [`ready`](Self::ready) makes it too. A proxy that distributes keys to several servers, such
    /// as Envoy or twemproxy, fails the proof, and so does a single server that belongs to a
    /// cluster. Each hit is then a call of its own.
    ///
    /// The option `combine=always` of the URL skips the proof. Such a proxy would send a call with
    /// several keys to the server of its first key, and more hits than the limit would be admitted.
    ///
    /// With the URL of a cluster, hits never share a call.
    #[must_use]
    pub fn combine(self, combine: bool) -> Self {
        let combine = if combine { Combine::OnSingleServer } else { Combine::Never };
        Self { combine, ..self }.with_new_cas()
    }

    /// Sets a clock for decisions, for tests. Requires the feature `testing`. Defaults to the
    /// server's clock, by which keys still expire.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.with_new_cas()
    }

    /// Waits until the server is ready. In a cluster, waits for every node that holds keys.
    ///
    /// Call this method before the program accepts traffic. It repeats a check until the check
    /// succeeds, or until `timeout` has passed. One check takes at most a second.
    ///
    /// The check runs every command of the scripts on a temporary key under the
    /// [prefix](Self::prefix). So it detects a missing
    /// [right](Self#rights), a renamed command, a read-only replica and a
    /// server without memory. It does not run `SCAN`, which only
    /// [`clear_all`](crate::Storage::clear_all) needs.
    ///
    /// # Errors
    ///
    /// When `timeout` has passed, returns the error of the last check that did not time out. If all
    /// checks timed out, returns that timeout. If the user has no right to run a command, the error
    /// names the command.
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
        f.debug_struct("RedisStorage").field("link", link).field("prefix", prefix).field("timeout", deadline).finish()
    }
}
