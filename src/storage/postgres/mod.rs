mod connection;
mod decide;
mod error;
mod link;
mod recent;
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
use self::store::Store;
use self::sweep::Sweep;
use self::table::Table;
use self::url::Target;
use crate::error::or_panic;
#[cfg(feature = "testing")]
use crate::storage::Clock;
#[cfg(feature = "postgres-rustls")]
use crate::storage::TlsConfig;
use crate::storage::cas::skew::MAX_SKEW;
use crate::storage::deadline::DEADLINE;
use crate::storage::net::until_ready;
use crate::storage::url::{PREFIX, checked_prefix};
use crate::storage::{Cas, StorageError, deadline, names};
use crate::{ConfigError, Timestamp};

/// The label `storage` of the metrics.
const LABEL: &str = "postgres";

/// Shares rate limit states between processes on PostgreSQL (14 or later).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::PostgresStorage;
///
/// let url = "postgres://app:secret@localhost/app?prefix=shop";
/// let storage = PostgresStorage::new(url)?.deadline(Duration::from_millis(50));
///
/// let error = PostgresStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Decisions
///
/// A hit is a statement that stores the new state if no other process has stored one meanwhile. The
/// process remembers the states of the keys that it used last, and the server's time. So a hit or a
/// peek takes one round trip. A hit takes another one if it is the first of the process, or if the
/// stored state is not the remembered one. All processes together never admit more than the limit.
/// A hit that loses every race is refused as [contended](crate::Decision::is_contended). [`Cas`]
/// has the details.
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
/// | `deadline` | `100ms` | the timeout of a call, and of its statement on the server |
/// | `schema` | the first of the search path | the schema of the table |
/// | `table` | `tower_ratelimit` | the name of the table |
/// | `migrate` | `true` | creates the table if a new connection does not find it |
/// | `unlogged` | `false` | creates the table [unlogged](Self::unlogged) |
/// | `connections` | `4` | the number of connections, which all callers share |
/// | `max-skew` | `5s` | the largest clock skew, as [`max_skew`](Self::max_skew) |
/// | `long-logs` | `refuse` | `allow` has the effect of [`allow_long_logs`](Self::allow_long_logs) |
/// | `sslmode` | `disable` | `require` or `verify-full` connects over TLS (feature `postgres-rustls`) |
/// | `ca` | the system's certificates | the PEM file of the certificates to trust |
/// | `cert`, `key` | none | the PEM files of a client certificate and its private key |
///
/// The other options are those of the crate `tokio-postgres`. Some are useful here:
///
/// - `host=/var/run/postgresql` connects to a Unix socket.
/// - `options=-c%20synchronous_commit%3Doff` makes the server reply before it has written to its
///   disk. A crash of the server loses the hits of at most the last second.
/// - With several hosts, the storage connects to the one that accepts writes.
///
/// With TLS, the server's certificate and its host name are verified in both modes. `prefer` is
/// rejected, because an attacker on the network can make it connect without TLS.
///
/// # The table
///
/// The storage creates this table when it connects, unless `migrate` is `false`. On your own pool,
/// call [`migrate`](Self::migrate). [`definition`](Self::definition) returns the statement, for
/// programs that run their own migrations:
///
/// ```sql
/// CREATE TABLE IF NOT EXISTS "tower_ratelimit" (
///     key text COLLATE "C" PRIMARY KEY,
///     state text NOT NULL,
///     expires_at timestamptz NOT NULL
/// ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
/// ```
///
/// The user needs the rights to select, insert, update and delete rows. Every eighth write of a
/// process deletes the expired rows on the next four pages of the table, without an index. So if
/// the table has N pages of 8 kB, an expired row is deleted within 2 N writes of a process.
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server is unreachable, rejects the statement, or does
/// not reply within the timeout. A statement that was sent is not retried, because the server may
/// have executed it: see [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct PostgresStorage {
    store: Store,
    cas: Cas<Store>,
}

impl PostgresStorage {
    /// Creates a storage on the server in `url`. It connects on first use.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL cannot be parsed, or if a certificate cannot be read. The error
    /// quotes the URL without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { config, tls, server, table, connections, migrates, prefix, deadline, long_logs, max_skew } =
            Target::parse(url)?;
        let settings = Settings { config: Arc::new(config), tls, server: server.into(), table, migrates, deadline };
        Ok(Self::over(Link::own(settings, connections), &prefix, deadline, long_logs, max_skew))
    }

    /// Creates a storage on a pool of the crate `deadpool-postgres`.
    ///
    /// - Call [`migrate`](Self::migrate) before the first hit, or create the table.
    /// - In the connection settings of the pool, set `options` to `-c statement_timeout=100`, where
    ///   100 is the [`deadline`](Self::deadline) in milliseconds. The server then cancels
    ///   statements whose callers no longer wait for them.
    /// - The storage removes a connection from the pool if it does not reply within the deadline.
    pub fn from_pool(pool: Pool) -> Self {
        Self::over(Link::Pool { pool, table: Table::default() }, PREFIX, DEADLINE, false, MAX_SKEW)
    }

    fn over(link: Link, prefix: &str, deadline: Duration, long_logs: bool, max_skew: Duration) -> Self {
        let first_page = Timestamp::wall_clock().as_micros() % 1_000_003;
        let sweep = Arc::new(Sweep::new(i64::try_from(first_page).unwrap_or(0)));
        let store = Store { link, prefix: names::prefix(prefix), deadline, recent: Arc::default(), sweep };
        let cas = Cas::new(store.clone()).metrics_label(LABEL).deadline(deadline).max_skew(max_skew);
        Self { store, cas: cas.long_logs(long_logs) }
    }

    fn with_changed_store(self) -> Self {
        Self { cas: self.cas.with_store(self.store.clone()), ..self }
    }

    /// Sets the prefix of all keys. Overrides the URL. Defaults to `rl`.
    ///
    /// Programs with the same prefix and the same table share their counts.
    ///
    /// # Panics
    ///
    /// Panics if `prefix` is not 1 to 64 ASCII characters, or contains white space, `{` or `}`.
    #[must_use]
    #[track_caller]
    pub fn prefix(mut self, prefix: &str) -> Self {
        or_panic(checked_prefix(prefix));
        self.store.prefix = names::prefix(prefix);
        self.with_changed_store()
    }

    /// Sets the timeout of a call. Overrides the URL. Defaults to 100 milliseconds.
    ///
    /// # Panics
    ///
    /// Panics if `deadline` is less than a millisecond or more than an hour.
    #[must_use]
    #[track_caller]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        or_panic(deadline::checked(deadline));
        self.store.deadline = deadline;
        self.store.link = self.store.link.with_deadline(deadline);
        self.store.recent = Arc::default();
        self.cas = self.cas.deadline(deadline);
        self.with_changed_store()
    }

    /// Sets the schema of the table. Overrides the URL. Defaults to the first schema of the user's
    /// search path.
    ///
    /// # Panics
    ///
    /// Panics if `schema` is not 1 to 63 of the characters a-z, 0-9 and _, or begins with a digit.
    #[must_use]
    #[track_caller]
    pub fn schema(self, schema: &str) -> Self {
        let table = or_panic(self.store.link.table().with_schema(schema));
        self.with_table(table)
    }

    /// Sets the name of the table. Overrides the URL. Defaults to `tower_ratelimit`.
    ///
    /// # Panics
    ///
    /// Panics if `table` is not 1 to 63 of the characters a-z, 0-9 and _, or begins with a digit.
    #[must_use]
    #[track_caller]
    pub fn table(self, table: &str) -> Self {
        let table = or_panic(self.store.link.table().with_name(table));
        self.with_table(table)
    }

    /// Creates the table unlogged. Overrides the URL. By default, the table is logged.
    ///
    /// An unlogged table is faster, because PostgreSQL does not write it to its write-ahead log. It
    /// is empty after a crash of the server, and on a replica that was promoted. This setting does
    /// not change a table that exists.
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

    /// Sets the certificates for TLS. Overrides the options `ca`, `cert` and `key` of the URL.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// # Errors
    ///
    /// Returns an error if a part of `config` is malformed, or if the URL has no `sslmode=require`.
    #[cfg(feature = "postgres-rustls")]
    pub fn try_tls(mut self, config: &TlsConfig) -> Result<Self, ConfigError> {
        let changed = self.store.link.with_tls(|tls| tls.with(config));
        let changed = changed.ok_or_else(|| ConfigError::new("the URL has no TLS: add sslmode=require"))?;
        self.store.link = changed.map_err(ConfigError::new)?;
        Ok(self.with_changed_store())
    }

    /// Allows policies that can keep more than 1,000 log entries per key. Overrides the URL. By
    /// default, such policies are rejected.
    ///
    /// Of the built-in strategies, only the moving window keeps a log. Each hit sends the old and
    /// the new log: 5,000 entries are 190 kB. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { cas: self.cas.long_logs(true), ..self }
    }

    /// Sets the time by which the newest decision on a key may be ahead of the server's clock, for
    /// example after a failover. If the decision is further ahead, the storage decides by the
    /// server's clock and logs a warning. Overrides the URL. Defaults to 5 seconds.
    ///
    /// The guide explains [clock skew](crate::guide::several_processes#clocks).
    ///
    /// # Panics
    ///
    /// Panics if `max_skew` is more than a day.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        Self { cas: self.cas.max_skew(max_skew), ..self }
    }

    /// Replaces the server's clock, for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { cas: self.cas.clock(clock), ..self }
    }

    /// Returns the statement that creates the table, for programs that run their own migrations.
    /// The statement does not create the [schema](Self#options).
    pub fn definition(&self) -> String {
        self.store.link.table().definition()
    }

    /// Creates the table, and its schema if one is set, unless they exist. Several processes can
    /// call this at the same time. The [`deadline`](Self::deadline) does not apply.
    ///
    /// # Errors
    ///
    /// Returns an error if the server is unreachable, or if the user has no right to create them.
    pub async fn migrate(&self) -> Result<(), StorageError> {
        self.store.link.migrate().await
    }

    /// Waits until the server replies and the table can be read, for at most `timeout`. Call this
    /// before the program accepts traffic.
    ///
    /// # Errors
    ///
    /// Returns the last error if that is not the case within `timeout`.
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
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}
