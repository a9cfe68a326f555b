//! A storage on PostgreSQL.
//!
//! - The client is `tokio-postgres`, which pipelines and has few dependencies.
//! - The version of a text is the text, so no sequence or column is needed. A text that repeats is
//!   the same state, so a swap that succeeds on it is correct.
//! - A key that is not in `recent` is assumed to be missing. If it exists, the lost insert returns
//!   its text, so this costs no more than a load.
//! - Several keys are one statement, because a transaction of several statements would need a
//!   connection that no other call uses meanwhile, and locks that last for several round trips.
//! - Serialization failures and deadlocks of a swap count as lost swaps, because each statement is a
//!   transaction.
//! - A `SET statement_timeout` would cancel the statements of other programs behind a pooler, and
//!   `SET LOCAL` costs each hit a transaction of four statements. So the client cancels.
//! - Prepared statements take less than half of the server's processor time of unprepared ones.
//!   They are prepared at their first use, because preparing waits for locks on the table, and again
//!   each second, because the table grows.
//! - If a connection is not open, its calls use another one. If none is open, all wait for the
//!   first one: attempts for the others could take the server's last free connection and lose it
//!   again.

mod call;
mod cancel;
mod connection;
mod error;
mod link;
#[cfg(feature = "deadpool-postgres")]
mod pool;
mod prepared;
mod server_time;
mod socket;
mod store;
mod sweep;
mod table;

use std::str::FromStr;
use std::sync::Arc;

use tokio_postgres::Config;
#[cfg(unix)]
use tokio_postgres::config::Host;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use self::connection::{ConnectionSettings, IfMissing};
use self::link::Link;
use self::store::PostgresStore;
use self::table::StatesTable;
use crate::error::ConfigError;
#[cfg(feature = "testing")]
use crate::storage::Clock;
use crate::storage::StorageError;
#[cfg(feature = "postgres-rustls")]
use crate::storage::TlsConfig;
use crate::storage::cas::{ServerCas, forward_to_server_cas};
use crate::storage::tls::Tls;
use crate::storage::url::{self, CasOptions, Options, UrlParts, Wrong};

const EXAMPLES: &str = "write postgres://user:password@host/database or postgres://user@host/database";

/// The default number of connections.
const CONNECTIONS: usize = 4;

/// The values of an option that is on or off.
const YES_OR_NO: [(&str, bool); 2] = [("true", true), ("false", false)];

/// The options of libpq for files, and ours.
const LIBPQ: [(&str, &str); 3] = [("sslrootcert", "ca"), ("sslcert", "cert"), ("sslkey", "key")];

/// The options that have no effect without TLS.
const NEED_TLS: [&str; 4] = ["ca", "cert", "key", "sslnegotiation"];

/// Shares rate limit states between processes through PostgreSQL (14 or later).
///
/// # Examples
///
/// ```
/// use tower_ratelimit::storage::PostgresStorage;
///
/// let storage = PostgresStorage::new("postgres://app:secret@localhost/app?prefix=shop&timeout=50ms")?;
///
/// let error = PostgresStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit is one statement. The statement stores the new state if no other process has stored one
/// meanwhile. To decide before the round trip, each process caches the server's time, and the
/// states of up to 16,384 keys that it used last. States of more than 512 bytes are not cached.
///
/// | call | round trips |
/// |---|---|
/// | a peek, or a hit that changes no state, such as most refused hits | 1 |
/// | an admitted hit on a new key, or on a key whose cached state is current | 1 |
/// | any other admitted hit, and the first hit after 10 seconds without a call | 2 |
/// | each race that a hit loses to another process | 1 or 2 more |
/// | a hit of [several keys](crate::RateLimitLayer::and) | as above, and 1 more if two or more of the keys are new |
///
/// All processes together never admit more than the limit. A hit that loses every race is refused
/// as [contended](crate::Decision::is_contended). [`Cas`](crate::storage::Cas) has the details.
///
/// Concurrent hits of a process on the same key share one statement. While a statement is in flight
/// on each connection, further hits on different keys wait for at most a quarter of their timeout.
/// Hits that wait share one statement, which stores or rejects each of them separately. Each
/// statement is a separate transaction.
///
/// The statement of a hit of several keys stores all new states, or none. It locks the rows in the
/// order of their keys, so hits that name the same keys in different orders do not deadlock.
/// Concurrent hits of several keys share a statement for up to 64 keys.
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built, unless [long logs](crate::guide::several_processes#long-logs) are allowed. Each
/// admitted hit sends the old and the new log: 5,000 entries are 190 kB. A policy that can keep more
/// than 1 MB per key, about 50,000 entries, is always rejected.
///
/// [`clear_all`](crate::Storage::clear_all) deletes all keys with the prefix in one statement. If
/// that times out, either all of the keys were deleted or none.
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix and the same table share their counts |
/// | `timeout` | `100ms` | the [timeout](Self#timeouts-and-locks) of a call, from `1ms` to `3600s` |
/// | `schema` | the first of the search path | the schema of the table: 1 to 63 of the characters `a` to `z`, `0` to `9` and `_`, not beginning with a digit |
/// | `table` | `tower_ratelimit` | the name of the table without a schema, of the same characters |
/// | `migrate` | `true` | creates the table if a new connection does not find it |
/// | `unlogged` | `false` | creates the table unlogged, which is faster, because PostgreSQL does not write it to its write-ahead log; it is empty after a crash of the server, and on a replica that was promoted |
/// | `connections` | `4` | the number of connections, from 1 to 64, which all callers share |
/// | `max-skew` | `5s` | the longest time by which the newest decision on a key may be ahead of the server's clock, for example after a failover, up to `86400s`; if it is further ahead, the storage corrects the clock and logs a warning, see [`Cas::max_skew`](crate::storage::Cas::max_skew) |
/// | `long-logs` | `refuse` | `allow` accepts policies that can keep more than 1,000 log entries per key |
/// | `sslmode` | `disable` | `require` and `verify-full` connect over [TLS](Self#tls) |
/// | `ca` | the system's certificates | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
///
/// The crate `tokio-postgres` parses all other options. Some are useful here:
///
/// - `host=/var/run/postgresql` connects to a Unix socket.
/// - `options=-c%20synchronous_commit%3Doff` makes the server reply before it has written to its
///   disk. A crash of the server loses the hits of at most the last second.
/// - `target_session_attrs` defaults to `read-write` if the URL has several hosts. The storage then
///   connects to the first host that accepts writes.
///
/// The options `connect_timeout`, `tcp_user_timeout` and `keepalives` have no effect.
///
/// The user is required. The database defaults to the name of the user. The file `.pgpass`, and
/// environment variables such as `PGHOST` and `PGSSLMODE`, are not read.
///
/// # TLS
///
/// TLS needs the feature `postgres-rustls`, and `sslmode=require` or `sslmode=verify-full` in the
/// URL. The two modes are equal: both verify the server's certificate and its host name. Some
/// settings differ from those of `libpq`, the client library of PostgreSQL:
///
/// | setting | in `libpq` | here |
/// |---|---|---|
/// | no `sslmode` | `prefer` | `disable` |
/// | `sslmode=require` | does not verify the host name | same as `verify-full` |
/// | `sslmode=allow`, `prefer`, `verify-ca` | supported | rejected: an attacker on the network can make the first two connect without TLS |
/// | certificates to trust | `sslrootcert`, else `~/.postgresql/root.crt` | `ca`, else the certificates of the system |
/// | client certificate and private key | `sslcert`, `sslkey` | `cert`, `key` |
///
/// These are rejected: `sslrootcert`, `sslcert` and `sslkey`; `ca`, `cert`, `key` and
/// `sslnegotiation` without TLS; and a Unix socket with TLS, because PostgreSQL has none there. The
/// method `try_tls` takes certificates that are not in files.
///
/// # Connections
///
/// Clones share the connections. Calls need a tokio runtime with time and I/O enabled. The storage
/// can be created outside of a runtime.
///
/// The storage has at most `connections` + 1 connections to each server: the addresses of a name are
/// different servers, except for those of this machine. A [migration](Self::migrate)
/// needs the additional one, and so does a connection that replaces one without replies. A connection
/// counts until the server has closed it, but at most 30 seconds longer than the storage uses it. If
/// the server has no room for all connections, calls use those that are open.
///
/// # Timeouts and locks
///
/// If the server has not replied after three quarters of the timeout, for example because another
/// transaction has locked the row or the table, the storage asks the server to cancel the statement.
/// If the server confirms this in the last quarter, the error is definite:
/// [`may_have_counted`](StorageError::may_have_counted) is `false`. A call never takes longer than
/// its timeout, with one exception: a hit or a peek waits up to a second longer until the first
/// attempt to connect has ended. Without compiler optimizations, a login with a password takes 0.14
/// seconds of processor time, which is more than the default timeout.
///
/// A cancel request is a short connection, which the server does not count. At most one is in flight
/// per connection. The storage changes no setting of its sessions, such as `statement_timeout`.
///
/// # PgBouncer
///
/// PgBouncer works in all versions, in session mode and in transaction mode. In transaction mode, a
/// connection of PgBouncer to the server executes statements of several programs. So the storage
/// leaves nothing on it. If the storage detects a pooler, it sends its statements unprepared, and the
/// server needs about twice the processor time for each.
///
/// PgBouncer rejects the option `options` of the URL, unless its own setting
/// `ignore_startup_parameters` contains it.
///
/// # The table
///
/// Unless `migrate` is `false`, a new connection creates this table, and the `schema`, if they do
/// not exist. On your own pool, call [`migrate`](Self::migrate). For programs that run their own
/// migrations, [`definition`](Self::definition) returns the statement:
///
/// ```sql
/// CREATE TABLE IF NOT EXISTS "tower_ratelimit" (
///     key text COLLATE "C" PRIMARY KEY,
///     state text NOT NULL,
///     expires_at timestamptz NOT NULL
/// ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
/// ```
///
/// The user needs the rights to select, insert, update and delete rows, and to create the table if
/// it does not exist.
///
/// The column `key` contains, for example, `rl:free|t:alice`, and `state` the same text as on
/// [memcached](crate::storage::MemcachedStorage#keys). After `expires_at`, a row can be deleted.
///
/// Every eighth write of a process deletes the expired rows on the next four pages of the table. So
/// if the table has N pages of 8 kB, an expired row is deleted after about 2 N writes of a process.
/// Updates are heap-only: they change no index, and the next update of a page reuses their space,
/// so autovacuum has little to do. The column `n_tup_hot_upd` of `pg_stat_user_tables` counts them.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server is unreachable, rejects the statement, or does
/// not reply within the timeout. They also fail if 1,024 calls per connection are in flight, or
/// fewer while calls time out. A statement that the server may have executed is not retried: see
/// [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct PostgresStorage(ServerCas<PostgresStore>);

forward_to_server_cas!(PostgresStorage);

impl PostgresStorage {
    /// Creates a storage on the server in `url`. It connects on first use, but with TLS it loads
    /// the certificates and the private key immediately.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, if it needs the feature `postgres-rustls` and
    /// that is not enabled, or if a certificate or the private key cannot be loaded. The error
    /// quotes the URL without its login and its options.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let (link, options) = url::read(url, EXAMPLES, read)?;
        Ok(Self::over(link, &options))
    }

    /// Creates a storage on a pool of the crate `deadpool-postgres` 0.14 (feature
    /// `deadpool-postgres`). A new major version of that crate is a breaking change of the feature.
    ///
    /// The pool sets the server, the number of connections, and TLS. `options` has the form of the
    /// query of a URL, such as `"schema=limits&timeout=200ms"` or `""`. It can contain the
    /// [options](Self#options) `prefix`, `timeout`, `schema`, `table`, `unlogged`, `max-skew` and
    /// `long-logs`.
    ///
    /// - Call [`migrate`](Self::migrate) before the first hit, or create the table.
    /// - The storage [cancels](Self#timeouts-and-locks) statements on the pool's connections, too. If
    ///   the pool requires TLS, it cannot, because the pool keeps its TLS settings to itself. Then set
    ///   `options` to `-c statement_timeout=75` in the connection settings of the pool, where 75 is
    ///   three quarters of the timeout in milliseconds. The setting applies to all statements on
    ///   these connections.
    /// - The storage removes a connection from the pool if it does not reply within the timeout: one
    ///   immediately, and others when they have replied or after 30 seconds. So the server has at most
    ///   one connection more than the pool's maximum, apart from those that it is about to close.
    /// - A login that takes longer than the timeout of its call is continued for at most a second, so
    ///   that later calls have the connection. Then it is given up, and the server closes it.
    /// - The pool keeps prepared statements. If the table was analyzed when it had a few rows and then
    ///   grows, their plans read the whole table until it is analyzed again, which autovacuum does about
    ///   once a minute. A storage on a URL plans its statements anew each second.
    /// - The storage prepares its statements. So the pool must not connect through PgBouncer in
    ///   transaction mode, unless that supports prepared statements (`max_prepared_statements`).
    ///
    /// # Errors
    ///
    /// Returns an error if an option is unknown or invalid.
    #[cfg(feature = "deadpool-postgres")]
    pub fn from_pool(pool: deadpool_postgres::Pool, options: &str) -> Result<Self, ConfigError> {
        let (table, options) = url::read_options(options, |options, wrong| {
            let common = options.cas()?;
            Ok((StatesTable::from_options(options, wrong)?, common))
        })?;
        Ok(Self::over(Link::Pool { pool: pool::Lender::new(pool), table }, &options))
    }

    fn over(link: Link, options: &CasOptions) -> Self {
        Self(ServerCas::new(PostgresStore::new(link), options))
    }

    /// Sets the certificates and the private key for [TLS](Self#tls). Overrides the options `ca`,
    /// `cert` and `key` of the URL. Those that `config` does not set return to their defaults.
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
    /// - the URL has neither `sslmode=require` nor `sslmode=verify-full`,
    /// - the storage uses your own pool, which has its own TLS settings.
    #[cfg(feature = "postgres-rustls")]
    pub fn try_tls(self, config: &TlsConfig) -> Result<Self, ConfigError> {
        let changed = self.0.store().link.with_tls(|tls| tls.with(config));
        let changed = changed.ok_or_else(|| ConfigError::new("the URL has no TLS: add sslmode=require"))?;
        let store = self.0.store().with_link(changed.map_err(ConfigError::new)?);
        Ok(Self(self.0.with_store(store)))
    }

    /// Sets the clock for decisions, for tests (feature `testing`). Defaults to the server's clock.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self(self.0.clock(clock))
    }

    /// Returns the SQL statement that creates the table if it does not exist, for programs that run
    /// their own migrations. It does not create the schema.
    pub fn definition(&self) -> String {
        self.0.store().link.table().definition()
    }

    /// Creates the table, and the schema if one is set, unless they exist.
    ///
    /// Several processes can call this method at the same time. It works with `migrate=false` too.
    /// The timeout does not apply, so the future may wait for locks without a limit. If the future
    /// is dropped, the storage cancels the migration. The automatic creation of the table waits for
    /// at most a second, and later calls retry it.
    ///
    /// # Errors
    ///
    /// Returns an error if the server is unreachable, or if the user has no right to create the
    /// table or a missing schema. PostgreSQL requires the right to create the table even if the
    /// table exists. A user without this right can use an existing table, and does not need this
    /// method.
    pub async fn migrate(&self) -> Result<(), StorageError> {
        self.0.store().link.migrate().await
    }
}

/// Parses a URL: our own options, and those of `tokio-postgres`.
fn read(parts: &UrlParts<'_>, wrong: &Wrong<'_>) -> Result<(Link, CasOptions), ConfigError> {
    let &UrlParts { scheme, authority, path, query } = parts;
    if !matches!(scheme, "postgres" | "postgresql") {
        return Err(wrong(format!("unknown scheme {scheme:?}: {EXAMPLES}")));
    }
    let mut options = Options::parse(query, wrong)?;
    let common = options.cas()?;
    let table = StatesTable::from_options(&mut options, wrong)?;
    let if_missing =
        options.choice("migrate", IfMissing::Create, &[("true", IfMissing::Create), ("false", IfMissing::Fail)])?;
    let connections = match options.take("connections") {
        None => CONNECTIONS,
        Some(text) => text.parse().ok().filter(|count| (1..=64).contains(count)).ok_or_else(|| {
            wrong(format!("invalid connections {text:?}; write a number from 1 to 64, for example connections=4"))
        })?,
    };
    let tls = tls_from_options(&mut options, wrong)?;
    // `tokio-postgres` parses the other options: host, options, target_session_attrs and so on.
    let meant = options.meant();
    let config = Config::from_str(&format!("postgres://{authority}{path}?{}", options.into_rest()));
    let mut config = config.map_err(|error| {
        // It names an option or a part of the URL. It does not quote a password.
        let cause = self::error::PostgresCause(error).to_string();
        match meant {
            Some((name, help)) if cause.contains(&format!("`{name}`")) => wrong(help),
            _ => wrong(format!("{cause}: {EXAMPLES}")),
        }
    })?;
    #[cfg(unix)]
    if tls.is_some() && config.get_hosts().iter().any(|host| matches!(host, Host::Unix(_))) {
        return Err(wrong("a Unix socket has no TLS: remove sslmode".to_owned()));
    }
    config.ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable });
    if config.get_user().is_none() {
        return Err(wrong(format!("the user is missing: {EXAMPLES}")));
    }
    if config.get_hosts().is_empty() {
        return Err(wrong(format!("the host is missing: {EXAMPLES}")));
    }
    // A replica rejects writes, so with several hosts each new connection checks for this. With
    // one host, the check is omitted to save its round trip. The first write to a replica fails
    // then.
    if config.get_target_session_attrs() == TargetSessionAttrs::Any && config.get_hosts().len() > 1 {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    if config.get_application_name().is_none() {
        config.application_name("tower-ratelimit");
    }
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
    let server = if hosts.is_empty() { self::error::PRODUCT } else { hosts }.to_owned();
    let settings = ConnectionSettings {
        config: Arc::new(config),
        tls,
        server: server.into(),
        table,
        if_missing,
        slots: Arc::default(),
    };
    Ok((Link::own(settings, connections), common))
}

/// Reads `sslmode` and the certificates. Returns `None` if connections have no TLS.
///
/// The mode `prefer` of `tokio-postgres` is rejected, because an attacker on the network can turn off
/// TLS in this mode.
fn tls_from_options(options: &mut Options<'_>, wrong: &Wrong<'_>) -> Result<Option<Tls>, ConfigError> {
    for (theirs, ours) in LIBPQ {
        if options.take(theirs).is_some() {
            return Err(wrong(format!("unknown option {theirs:?}: write {ours}=/path/to/{ours}.pem")));
        }
    }
    match options.take("sslmode").as_deref() {
        None | Some("disable") => match NEED_TLS.into_iter().find(|name| options.take(name).is_some()) {
            Some(name) => Err(wrong(format!("{name} needs TLS: add sslmode=require"))),
            None => Ok(None),
        },
        Some("require" | "verify-full") if !cfg!(feature = "postgres-rustls") => {
            Err(wrong("TLS needs the feature \"postgres-rustls\" of tower-ratelimit".to_owned()))
        }
        Some("require" | "verify-full") => Tls::from_options(options, Some(b"postgresql"), wrong).map(Some),
        Some(other) => {
            Err(wrong(format!("invalid sslmode {other:?}; write sslmode=require for TLS, or sslmode=disable")))
        }
    }
}
