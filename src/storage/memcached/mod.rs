mod client;
mod connection;
mod meta;
mod node;
mod ring;
mod server_time;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::client::Client;
use self::server_time::MachineClock;
use crate::error::ConfigError;
use crate::storage::Clock;
use crate::storage::cas::{ServerCas, forward_to_server_cas};
use crate::storage::url::{self, Address, Authority, CasOptions, Options, UrlParts, Wrong};

/// The valid forms of a URL.
const EXAMPLES: &str =
    "write memcached://host:11211, memcached://host:11211,host:11211 or memcached+unix:///path/to.sock";

const PORT: u16 = 11_211;

/// Shares rate limit states between processes through memcached (1.6.10 or later).
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// let storage = MemcachedStorage::new("memcached://one,two/?prefix=shop&timeout=50ms")?;
///
/// let error = MemcachedStorage::new("http://one").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://one\": unknown scheme \"http\": write memcached://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit loads the state of its key, decides, and stores the new state by compare-and-swap. That
/// takes two round trips, or one if the state does not change, as after most refusals. All
/// processes together never admit more than the limit. A hit that loses every race is refused as
/// [contended](crate::Decision::is_contended). [`Cas`](crate::storage::Cas) has the details.
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built, unless [long logs](crate::guide::several_processes#long-logs) are allowed. Each
/// admitted hit loads and stores the whole log: 5,000 entries are 95 kB in each direction. A policy
/// that can keep more than 1 MB per key, about 55,000 entries, is always rejected.
///
/// [`clear_all`](crate::Storage::clear_all) fails, because memcached cannot list its keys.
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix on the same servers share their counts |
/// | `timeout` | `100ms` | the timeout of a call, from `1ms` to `3600s` |
/// | `max-skew` | `5s` | the longest time by which the newest decision on a key may be ahead of this process's estimate of the server's time, up to `86400s`; if it is further ahead, the process corrects its estimate and logs a warning, see [`Cas::max_skew`](crate::storage::Cas::max_skew) |
/// | `long-logs` | `refuse` | `allow` accepts policies that can keep more than 1,000 log entries per key |
///
/// # Connections
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`](crate::storage::StorageError) if the server of the key is unreachable, fails, or does not
/// reply within the timeout. They also fail if 1,024 calls are in flight on its connection, or
/// fewer while calls time out. A write that was sent is not retried, because the server may have
/// executed it: see [`may_have_counted`](crate::storage::StorageError::may_have_counted).
#[derive(Clone)]
pub struct MemcachedStorage(ServerCas<Client>);

forward_to_server_cas!(MemcachedStorage);

impl MemcachedStorage {
    /// Creates a storage on the servers in `url`. It connects to each server on first use.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let (servers, options) = url::read(url, EXAMPLES, read)?;
        let machine: Arc<dyn Clock> = Arc::new(MachineClock);
        Ok(Self(ServerCas::new(Client::new(servers, &machine), &options)))
    }

    /// Sets the clock for decisions, for tests (feature `testing`). Defaults to the servers' time.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self(self.0.clock(clock))
    }

    /// Replaces this machine's clock. Use it in tests of clock skew (feature `testing`).
    ///
    /// The storage corrects `machine` by the time that the servers report. It does not correct the
    /// clock that [`clock`](Self::clock) sets. The returned storage opens new connections.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn machine_clock(self, machine: impl Clock) -> Self {
        let machine: Arc<dyn Clock> = Arc::new(machine);
        let client = self.0.store().reconnected(&machine);
        Self(self.0.with_store(client))
    }
}

/// Parses the servers, at least one, and the options of a URL.
fn read(parts: &UrlParts<'_>, wrong: &Wrong<'_>) -> Result<(Vec<Address>, CasOptions), ConfigError> {
    let unix = match parts.scheme {
        "memcached" => false,
        "memcached+unix" => true,
        other => return Err(wrong(format!("unknown scheme {other:?}: {EXAMPLES}"))),
    };
    let Authority { login, hosts } = Authority::parse(parts.authority, PORT, wrong)?;
    if login.password.is_some() {
        return Err(wrong("memcached URLs have no user and password; leave out the text before @".to_owned()));
    }
    let path = parts.decoded_path(wrong)?;
    let servers = if unix {
        if !cfg!(unix) {
            return Err(wrong("this system has no Unix sockets; write memcached://host:11211".to_owned()));
        }
        if !hosts.is_empty() || path.len() < 2 {
            return Err(wrong("write a path from the root, for example memcached+unix:///path/to.sock".to_owned()));
        }
        vec![Address::Unix(path.into())]
    } else {
        if hosts.is_empty() {
            return Err(wrong(format!("the host is missing: {EXAMPLES}")));
        }
        if path.len() > 1 {
            return Err(wrong(format!("memcached has no databases, but the path is {path:?}; leave it out")));
        }
        if let Some((_, twice)) = hosts.iter().enumerate().find(|(at, host)| hosts[..*at].contains(host)) {
            return Err(wrong(format!("the host {twice} occurs twice; write it once")));
        }
        hosts.into_iter().map(Address::Tcp).collect()
    };
    let mut options = Options::parse(parts.query, wrong)?;
    let common = options.cas()?;
    options.end()?;
    Ok((servers, common))
}
