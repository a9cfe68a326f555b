mod connection;
mod lease;
mod members;
mod store;
mod wire;

use self::connection::EtcdAccess;
use self::members::Members;
use self::store::EtcdStore;
use crate::error::{BoxError, ConfigError};
#[cfg(feature = "testing")]
use crate::storage::Clock;
#[cfg(feature = "etcd-rustls")]
use crate::storage::TlsConfig;
use crate::storage::cas::{ServerCas, forward_to_server_cas};
use crate::storage::credentials::{Credentials, LoginSource};
use crate::storage::tls::Tls;
use crate::storage::url::{self, Address, Authority, CasOptions, Options, UrlParts, Wrong};

const EXAMPLES: &str = "write etcd://host:2379, etcd://host:2379,host:2379 or etcds://host:2379";
const PORT: u16 = 2_379;

/// The protocol for ALPN, which etcd requires with TLS.
const HTTP2: Option<&'static [u8]> = Some(b"h2");

/// Shares rate limit states between processes through etcd (3.4 or later).
///
/// A majority of the members stores each write on disk, so the storage tolerates the loss of a
/// minority. Use it for limits that must survive the loss of a server, at up to a few hundred hits
/// per second. For thousands of hits per second, use `RedisStorage`.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::EtcdStorage;
///
/// let storage = EtcdStorage::new("etcd://localhost/?prefix=shop&timeout=50ms")?;
///
/// let error = EtcdStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit is a transaction that stores the new state if no other process has stored one meanwhile, and
/// loads the newer state otherwise. To decide before the round trip, each process caches the states of
/// up to 16,384 keys that it used in the last 10 seconds. States of more than 512 bytes are not cached.
///
/// | call | round trips |
/// |---|---|
/// | a peek, or a hit that changes no state, such as most refused hits | 1 |
/// | an admitted hit on a key whose cached state is current | 1 |
/// | any other admitted hit, and the next 8 after another process has changed the key | 2 |
/// | each race that a hit loses to another process | 1 or 2 more |
///
/// All processes together never admit more than the limit. A hit that loses every race is refused as
/// [contended](crate::Decision::is_contended). [`Cas`](crate::storage::Cas) has the details.
///
/// While four transactions of a process are in flight, further hits on different keys wait for at
/// most a quarter of their timeout. Hits that wait share one transaction, which stores or rejects
/// each of them separately.
///
/// A hit of [several keys](crate::RateLimitLayer::and) stores all new states or none in one
/// transaction. So it takes as many round trips as a hit of one key. Concurrent hits of several
/// keys share transactions of up to 64 keys. So the option `--max-txn-ops` of the members must be
/// at least 64. It defaults to 128.
///
/// Each process decides by the clock of its own machine. The guide has the bounds for [different
/// clocks](crate::guide::several_processes#clocks).
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built, unless [long logs](crate::guide::several_processes#long-logs) are allowed. Each
/// admitted hit loads and stores the whole log, and etcd keeps old versions until it compacts them.
/// In a test, `moving-window 5000/day` filled 256 MB in 11,400 hits. A policy that can keep more
/// than 1.5 MB per key, about 75,000 entries, is always rejected.
///
/// [`clear_all`](crate::Storage::clear_all) deletes all keys with the prefix in one call. If that
/// times out, the keys may have been deleted.
///
/// # Options
///
/// The URL has the scheme `etcd`, or `etcds` for TLS (feature `etcd-rustls`).
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix on the same cluster share their counts |
/// | `timeout` | `100ms` | the timeout of a call, from `1ms` to `3600s` |
/// | `max-skew` | `5s` | the longest time by which the newest decision on a key may be ahead of this machine's clock, up to `86400s`; if it is further ahead, the process corrects the clock and logs a warning, see [`Cas::max_skew`](crate::storage::Cas::max_skew) |
/// | `long-logs` | `refuse` | `allow` accepts policies that can keep more than 1,000 log entries per key |
/// | `ca` | the system's certificates | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
///
/// # Connections
///
/// Clones share one connection per member. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`](crate::storage::StorageError) if no member is reachable, if
/// etcd rejects the call, or if it does not reply within the timeout. They also fail if 1,024 calls
/// are in flight on the connection to a member, or fewer while calls time out. A write that etcd
/// may have executed is not retried: see
/// [`may_have_counted`](crate::storage::StorageError::may_have_counted).
#[derive(Clone)]
pub struct EtcdStorage(ServerCas<EtcdStore>);

forward_to_server_cas!(EtcdStorage);

impl EtcdStorage {
    /// Creates a storage for the members in `url`. It connects on first use, but with TLS it loads
    /// the certificates and the private key immediately.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, if it needs a feature that is not enabled, or
    /// if a certificate or the private key cannot be loaded. The error quotes the URL without its
    /// login and its options.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let (members, options) = url::read(url, EXAMPLES, read)?;
        Ok(Self(ServerCas::new(EtcdStore::new(members), &options)))
    }

    /// Sets a provider of credentials, which the storage calls for each new connection. Overrides
    /// the user and the password in the URL.
    ///
    /// Use it for passwords that rotate. etcd revokes the tokens of a user whose password changes.
    /// The storage then reconnects with new credentials. If the provider fails, the attempt to
    /// connect fails too. Later calls retry it after a backoff of up to 200 ms.
    ///
    /// An attempt to connect takes at most one second, including the call of the provider. It
    /// begins with one try. While no try has ended, another one starts every 250 ms, up to four in
    /// total. Each try calls the provider, so up to four calls can run at once. The guide on
    /// [deploying](crate::guide::deploying#logins-that-rotate) has more details.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// ```
    /// use tower_ratelimit::storage::{Credentials, EtcdStorage};
    ///
    /// let storage = EtcdStorage::new("etcd://one,two,three")?.credentials(|| async {
    ///     let password = std::fs::read_to_string("/run/secrets/etcd-password")?;
    ///     Ok(Credentials::new("ratelimit", password.trim_end()))
    /// });
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    #[must_use]
    pub fn credentials<F, Fut>(self, provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        let access = EtcdAccess { login: LoginSource::provider(provider), ..self.0.store().members.access().clone() };
        self.with_access(access)
    }

    /// Sets the certificates for TLS. Replaces the options `ca`, `cert` and `key` of the URL,
    /// including those that `config` does not set.
    ///
    /// With `--client-cert-auth`, etcd takes the user from the common name of the client
    /// certificate, unless the storage has a login.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// # Errors
    ///
    /// Returns an error if
    ///
    /// - a certificate or the private key is malformed, or they do not match,
    /// - `config` has no certificates to trust, and the system has none,
    /// - `config` was created by [`from_rustls`](crate::storage::TlsConfig::from_rustls), and also has
    ///   certificates of its own,
    /// - the scheme of the URL is `etcd`, which has no TLS.
    #[cfg(feature = "etcd-rustls")]
    pub fn try_tls(self, config: &TlsConfig) -> Result<Self, ConfigError> {
        let access = self.0.store().members.access().clone();
        let Some(tls) = &access.tls else {
            return Err(ConfigError::new("the URL has no TLS: write etcds:// instead of etcd://"));
        };
        let tls = Some(tls.with(config).map_err(ConfigError::new)?);
        Ok(self.with_access(EtcdAccess { tls, ..access }))
    }

    fn with_access(self, access: EtcdAccess) -> Self {
        let members = self.0.store().members.with_access(access);
        Self(self.0.with_store(EtcdStore::new(members)))
    }

    /// Sets the clock for decisions, for tests (feature `testing`). Defaults to this machine's clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self(self.0.clock(clock))
    }
}

/// Parses the members, their login and TLS, and the options of a URL.
fn read(parts: &UrlParts<'_>, wrong: &Wrong<'_>) -> Result<(Members, CasOptions), ConfigError> {
    let &UrlParts { scheme, authority, path, query } = parts;
    let is_tls = match scheme {
        "etcd" => false,
        "etcds" | "etcd+tls" => true,
        _ => return Err(wrong(format!("unknown scheme {scheme:?}: {EXAMPLES}"))),
    };
    if is_tls && !cfg!(feature = "etcd-rustls") {
        return Err(wrong(format!("{scheme}:// needs the feature \"etcd-rustls\" of tower-ratelimit")));
    }
    let Authority { login, hosts } = Authority::parse(authority, PORT, wrong)?;
    if hosts.is_empty() {
        return Err(wrong(format!("the host is missing: {EXAMPLES}")));
    }
    if login.password.is_some() && login.user.is_none() {
        return Err(wrong("the password has no user: write user:password@".to_owned()));
    }
    if !matches!(path, "" | "/") {
        return Err(wrong(format!(
            "unexpected path {path:?}: leave it out, or write ?prefix=... to set the prefix of all keys"
        )));
    }
    let mut options = Options::parse(query, wrong)?;
    let tls = if is_tls { Some(Tls::from_options(&mut options, HTTP2, wrong)?) } else { None };
    let common = options.cas()?;
    options.end()?;
    let access = EtcdAccess { login: LoginSource::Fixed(login), tls };
    Ok((Members::new(hosts.into_iter().map(Address::Tcp).collect(), access), common))
}
