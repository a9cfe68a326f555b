mod call;
mod cancel;
mod connection;
mod decide;
mod error;
mod hosts;
mod link;
mod pool;
mod pooler;
mod query;
mod recent;
mod slots;
mod socket;
mod store;
mod sweep;
mod table;
mod tls;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio::time::Instant;

use self::connection::Settings;
use self::link::Link;
use self::pool::Lender;
use self::store::Store;
use self::sweep::Sweep;
use self::table::Table;
use self::url::PostgresUrl;
use crate::error::{ConfigError, or_panic};
#[cfg(feature = "testing")]
use crate::storage::Clock;
#[cfg(feature = "postgres-rustls")]
use crate::storage::TlsConfig;
use crate::storage::cas::skew::MAX_SKEW;
use crate::storage::deadline::DEADLINE;
use crate::storage::net::until_ready;
use crate::storage::url::{PREFIX, checked_prefix};
use crate::storage::{Cas, StorageError, deadline, names};
use crate::time::Timestamp;

/// The label `storage` of the metrics.
const LABEL: &str = "postgres";

/// Shares rate limit states between processes through PostgreSQL (14 or later).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::PostgresStorage;
///
/// let url = "postgres://app:secret@localhost/app?prefix=shop";
/// let storage = PostgresStorage::new(url)?.timeout(Duration::from_millis(50));
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
///
/// All processes together never admit more than the limit. A hit that loses every race is refused
/// as [contended](crate::Decision::is_contended). [`Cas`] has the details.
///
/// Concurrent hits of a process on the same key share one statement. Each statement is a separate
/// transaction.
///
/// A policy that can keep more than 1,000 log entries per key is rejected when the limiter or layer
/// is built: see [long logs](crate::guide::several_processes#long-logs).
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys |
/// | `timeout` | `100ms` | the timeout of a call, as [`timeout`](Self::timeout) |
/// | `schema` | the first of the search path | the schema of the table |
/// | `table` | `tower_ratelimit` | the name of the table |
/// | `migrate` | `true` | creates the table if a new connection does not find it |
/// | `unlogged` | `false` | creates the table [unlogged](Self::unlogged) |
/// | `connections` | `4` | the number of connections, from 1 to 64, which all callers share |
/// | `max-skew` | `5s` | the largest clock skew, as [`max_skew`](Self::max_skew) |
/// | `long-logs` | `refuse` | `allow` has the effect of [`allow_long_logs`](Self::allow_long_logs) |
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
/// The storage has at most `connections` + 1 connections to each server. A [migration](Self::migrate)
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
/// its timeout.
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
/// Updates are heap-only: they change no index, and the next update of a page reuses their space, so
/// autovacuum has little to do. The column `n_tup_hot_upd` of `pg_stat_user_tables` counts them.
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
pub struct PostgresStorage {
    store: Store,
    cas: Cas<Store>,
}

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
        let PostgresUrl { config, tls, server, table, connections, migrates, prefix, deadline, long_logs, max_skew } =
            PostgresUrl::parse(url)?;
        let (config, slots) = (Arc::new(config), Arc::default());
        let settings = Settings { config, tls, server: server.into(), table, migrates, slots };
        Ok(Self::over(Link::own(settings, connections), &prefix, deadline, long_logs, max_skew))
    }

    /// Creates a storage on a pool of the crate `deadpool-postgres` 0.14. The pool sets the server,
    /// the number of connections, and TLS. All other settings have their defaults.
    ///
    /// - Call [`migrate`](Self::migrate) before the first hit, or create the table.
    /// - The storage [cancels](Self#timeouts-and-locks) statements on the pool's connections, too. If
    ///   the pool requires TLS, it cannot, because the pool keeps its TLS settings to itself. Then set
    ///   `options` to `-c statement_timeout=75` in the connection settings of the pool, where 75 is
    ///   three quarters of the [`timeout`](Self::timeout) in milliseconds. The setting applies to
    ///   all statements on these connections.
    /// - The storage removes a connection from the pool if it does not reply within the timeout.
    /// - The storage prepares its statements. So the pool must not connect through PgBouncer in
    ///   transaction mode, unless that supports prepared statements (`max_prepared_statements`).
    pub fn from_pool(pool: Pool) -> Self {
        Self::over(Link::Pool { pool: Lender(pool), table: Table::default() }, PREFIX, DEADLINE, false, MAX_SKEW)
    }

    fn over(link: Link, prefix: &str, deadline: Duration, long_logs: bool, max_skew: Duration) -> Self {
        let first_page = Timestamp::wall_clock().as_micros() % 1_000_003;
        let sweep = Arc::new(Sweep::new(i64::try_from(first_page).unwrap_or(0)));
        let store = Store { link, prefix: names::prefix(prefix), deadline, recent: Arc::default(), sweep };
        let cas = Cas::new(store.clone()).metrics_label(LABEL).timeout(deadline).max_skew(max_skew);
        Self { store, cas: cas.long_logs(long_logs) }
    }

    fn with_changed_store(self) -> Self {
        Self { cas: self.cas.with_store(self.store.clone()), ..self }
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Programs with the same prefix and the same table share their counts. The returned storage
    /// shares the connections of this one.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 printable ASCII characters, or contains a space, `{` or
    /// `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(mut self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        self.store.prefix = names::prefix(prefix);
        self.with_changed_store()
    }

    /// Sets the timeout of a call. Overrides the URL. Defaults to 100 milliseconds.
    ///
    /// The server gets a [cancel request](Self#timeouts-and-locks) after three quarters of it. The
    /// returned storage shares the connections of this one.
    ///
    /// # Panics
    ///
    /// Panics if `timeout` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        or_panic(deadline::checked(timeout));
        self.store.deadline = timeout;
        self.cas = self.cas.timeout(timeout);
        self.with_changed_store()
    }

    /// Sets the schema of the table. Overrides the URL. Defaults to the first schema of the user's
    /// search path. The returned storage opens new connections, unless it uses your own pool.
    ///
    /// # Panics
    ///
    /// Panics if `schema` is not 1 to 63 of the characters `a` to `z`, `0` to `9` and `_`, or
    /// begins with a digit.
    #[must_use]
    #[track_caller]
    pub fn schema(self, schema: &str) -> Self {
        let table = or_panic(self.store.link.table().with_schema(schema));
        self.with_table(table)
    }

    /// Sets the name of the table, without a schema. Overrides the URL. Defaults to
    /// `tower_ratelimit`. The returned storage opens new connections, unless it uses your own pool.
    ///
    /// # Panics
    ///
    /// Panics if `table` is not 1 to 63 of the characters `a` to `z`, `0` to `9` and `_`, or begins
    /// with a digit.
    #[must_use]
    #[track_caller]
    pub fn table(self, table: &str) -> Self {
        let table = or_panic(self.store.link.table().with_name(table));
        self.with_table(table)
    }

    /// Makes the table unlogged if the storage creates it. A table that exists is not changed.
    /// Overrides the URL. By default, the table is logged.
    ///
    /// An unlogged table is faster, because PostgreSQL does not write it to its write-ahead log.
    /// The table is empty after a crash of the server, and on a replica that was promoted.
    ///
    /// The returned storage opens new connections, unless it uses your own pool.
    #[must_use]
    pub fn unlogged(self) -> Self {
        let table = self.store.link.table().with_unlogged(true);
        self.with_table(table)
    }

    fn with_table(mut self, table: Table) -> Self {
        self.store.link = self.store.link.with_table(table);
        self.store.recent = Arc::default();
        self.with_changed_store()
    }

    /// Sets the certificates for [TLS](Self#tls). Replaces the options `ca`, `cert` and `key` of
    /// the URL, including those that `config` does not set.
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
    /// - the URL has neither `sslmode=require` nor `sslmode=verify-full`,
    /// - the storage uses your own pool, which has its own TLS settings.
    #[cfg(feature = "postgres-rustls")]
    pub fn try_tls(mut self, config: &TlsConfig) -> Result<Self, ConfigError> {
        let changed = self.store.link.with_tls(|tls| tls.with(config));
        let changed = changed.ok_or_else(|| ConfigError::new("the URL has no TLS: add sslmode=require"))?;
        self.store.link = changed.map_err(ConfigError::new)?;
        Ok(self.with_changed_store())
    }

    /// Allows policies that can keep more than 1,000 log entries per key. Overrides the URL. By
    /// default, such policies are rejected. A policy that can keep more than 1 MB per key, about
    /// 50,000 entries, is always rejected.
    ///
    /// Of the built-in strategies, only the moving window keeps a log. Each admitted hit sends the
    /// old and the new log: 5,000 entries are 190 kB. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { cas: self.cas.long_logs(true), ..self }
    }

    /// Sets the time by which the newest decision on a key may be ahead of the server's clock, for
    /// example after a failover. Overrides the URL. Defaults to 5 seconds.
    ///
    /// If the decision is further ahead, the storage corrects the server's clock and logs a
    /// warning (feature `tracing`). [`Cas::max_skew`] has the details, also for zero. The guide
    /// explains [clock skew](crate::guide::several_processes#clocks).
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        Self { cas: self.cas.max_skew(max_skew), ..self }
    }

    /// Decides by `clock` instead of the server's clock. Use it in tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { cas: self.cas.clock(clock), ..self }
    }

    /// Returns the SQL statement that creates the table if it does not exist, for programs that run
    /// their own migrations. It does not create the [schema](Self::schema).
    pub fn definition(&self) -> String {
        self.store.link.table().definition()
    }

    /// Creates the table, and the [schema](Self::schema) if one is set, unless they exist.
    ///
    /// Several processes can call this method at the same time. It works with `migrate=false` too.
    /// The [`timeout`](Self::timeout) does not apply, so the future may wait for locks without a
    /// limit. If the future is dropped, the storage cancels the migration. The automatic creation of
    /// the table waits for at most a second, and is tried again by later calls.
    ///
    /// # Errors
    ///
    /// Returns an error if the server is unreachable, or if the user has no right to create the
    /// table or the schema.
    pub async fn migrate(&self) -> Result<(), StorageError> {
        self.store.link.migrate().await
    }

    /// Waits until the server replies and the table can be read, for at most `timeout`. Call this
    /// method before the program accepts traffic.
    ///
    /// # Errors
    ///
    /// Returns the last error if the server does not reply, or the table cannot be read, within
    /// `timeout`.
    pub async fn ready(&self, timeout: Duration) -> Result<(), StorageError> {
        until_ready(Instant::now() + timeout.min(LONGEST_WAIT), |deadline| self.store.ping(deadline)).await
    }
}

/// The longest timeout of `ready`. An instant in the far future can overflow on some systems.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for PostgresStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Store { link, prefix, deadline, .. } = &self.store;
        f.debug_struct("PostgresStorage")
            .field("connections", link)
            .field("table", link.table())
            .field("prefix", prefix)
            .field("timeout", deadline)
            .finish_non_exhaustive()
    }
}
