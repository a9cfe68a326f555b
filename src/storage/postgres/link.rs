//! The connections to the server: the storage's own, or those of the program's pool.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use super::call::Sent;
use super::connection::{IfMissing, PostgresConnection, Settings};
use super::error;
#[cfg(feature = "deadpool-postgres")]
use super::pool::{Lender, POOL};
use super::socket::Slots;
use super::table::{Query, Table};
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, Open, Reconnecting};
#[cfg(feature = "postgres-rustls")]
use crate::storage::tls::Tls;

/// A handle to the connections. Clones share them.
#[derive(Clone)]
pub(super) enum Link {
    Own {
        settings: Settings,
        connections: Arc<[Arc<Reconnecting<Open<PostgresConnection>>>]>,
        next: Arc<AtomicUsize>,
    },
    #[cfg(feature = "deadpool-postgres")]
    Pool {
        pool: Lender,
        table: Table,
    },
}

/// The result of a statement that was sent.
pub(super) enum Outcome {
    Row(Row),
    /// The statement was rolled back because of another transaction.
    Conflict,
}

impl Link {
    /// Creates a link with `count` connections. It does not connect yet. One more connection can
    /// exist, for a migration, or while the server has not closed an earlier one.
    pub(super) fn own(settings: Settings, count: usize) -> Self {
        let connections = (0..count).map(|_| Reconnecting::new(&settings.server)).collect();
        let settings = Settings { slots: Arc::new(Slots::new(count + 1)), ..settings };
        Self::Own { settings, connections, next: Arc::default() }
    }

    /// Returns a link with changed TLS settings, which opens new connections. Returns `None` for a
    /// pool, and for a URL without TLS.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn with_tls(&self, change: impl FnOnce(&Tls) -> Result<Tls, String>) -> Option<Result<Self, String>> {
        match self {
            Self::Own { settings, connections, .. } => {
                let changed = change(settings.tls.as_ref()?);
                Some(changed.map(|tls| Self::own(Settings { tls: Some(tls), ..settings.clone() }, connections.len())))
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => None,
        }
    }

    pub(super) fn table(&self) -> &Table {
        match self {
            Self::Own { settings, .. } => &settings.table,
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { table, .. } => table,
        }
    }

    pub(super) fn server(&self) -> &str {
        match self {
            Self::Own { settings, .. } => &settings.server,
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => POOL,
        }
    }

    /// Returns the number of connections, or the maximum size of the pool.
    pub(super) fn connections(&self) -> usize {
        match self {
            Self::Own { connections, .. } => connections.len(),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => pool.0.status().max_size,
        }
    }

    /// Returns an error if too many calls are in flight on every connection. Returns `None` for a
    /// pool, because its callers wait for a free connection.
    pub(super) fn overload(&self) -> Option<StorageError> {
        match self {
            Self::Own { connections, .. } => {
                let mut error = None;
                for connection in connections.iter() {
                    error = Some(connection.overload()?);
                }
                error
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => None,
        }
    }

    /// Executes a statement at most once, and cancels it shortly before the deadline. A statement that
    /// a late cancel request for an earlier one has cancelled is sent again. The
    /// future can be dropped at any time. The statement is then cancelled at the same time, unless
    /// the server has executed it by then.
    pub(super) async fn query(&self, query: Query, deadline: Instant) -> Result<Outcome, StorageError> {
        match self {
            Self::Own { settings, connections, next } => {
                let first = next.fetch_add(1, Ordering::Relaxed) % connections.len();
                Self::query_own(settings, connections, first, query, deadline).await
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, table } => outcome(POOL, pool.execute(table, &query, deadline).await?),
        }
    }

    /// Returns `true` until the first attempt to connect has ended. Returns `false` for a pool.
    pub(super) fn is_new(&self) -> bool {
        match self {
            Self::Own { connections, .. } => connections[0].is_new(),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => false,
        }
    }

    /// Waits until the first attempt to connect has ended.
    pub(super) async fn first_connection(&self) {
        match self {
            Self::Own { settings, connections, next } => {
                let first = next.fetch_add(1, Ordering::Relaxed) % connections.len();
                // The call that follows returns the error.
                let _ = Self::connection(settings, connections, first, Instant::now() + CONNECT_WITHIN).await;
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => {}
        }
    }

    async fn query_own(
        settings: &Settings,
        connections: &[Arc<Reconnecting<Open<PostgresConnection>>>],
        first: usize,
        query: Query,
        deadline: Instant,
    ) -> Result<Outcome, StorageError> {
        let (connection, open) = Self::connection(settings, connections, first, deadline).await?;
        let call = connection.begin(&open, deadline).await?;
        let mut sent = Sent::new(Arc::clone(&open), query, deadline);
        let Ok(result) = timeout_at(deadline, &mut sent).await else {
            return Err(StorageError::timed_out(connection.name()));
        };
        call.answered();
        let is_unusable = result.as_ref().is_err_and(error::needs_another_connection);
        let outcome = outcome(connection.name(), result);
        if is_unusable {
            connection.give_up(&open, outcome.as_ref().err());
        }
        outcome
    }

    /// Returns the connection `first` if it is open, or else another open one. The connection `first`
    /// is then opened in the background, because the server may have no room for it.
    ///
    /// If none is open, waits until the first one of all is open. Others would compete with it for
    /// the last free connection of the server.
    async fn connection<'a>(
        settings: &Settings,
        connections: &'a [Arc<Reconnecting<Open<PostgresConnection>>>],
        first: usize,
        deadline: Instant,
    ) -> Result<(&'a Reconnecting<Open<PostgresConnection>>, Arc<Open<PostgresConnection>>), StorageError> {
        let open = || {
            let settings = settings.clone();
            async { PostgresConnection::open(settings).await.map(Open::new) }
        };
        let is_open =
            |connection: &'a Arc<Reconnecting<Open<PostgresConnection>>>| Some((&**connection, connection.value()?));
        if let Some(found) = is_open(&connections[first]) {
            return Ok(found);
        }
        let (before, after) = connections.split_at(first);
        if let Some(found) = after.iter().chain(before).find_map(is_open) {
            let _ = connections[first].value_or_begin(open);
            return Ok(found);
        }
        match connections[0].get_for(&connections[first], deadline, open).await {
            Ok(value) => Ok((&*connections[0], value)),
            // An attempt for another connection may have succeeded in the meantime.
            Err(error) => connections.iter().find_map(is_open).ok_or(error),
        }
    }

    /// Creates the table, and its schema if one is set, unless they exist.
    pub(super) async fn migrate(&self) -> Result<(), StorageError> {
        let sql = self.table().migration();
        match self {
            Self::Own { settings, .. } => {
                let connection =
                    PostgresConnection::open(Settings { if_missing: IfMissing::Ignore, ..settings.clone() }).await?;
                let executed = connection.client.batch_execute(&sql).await;
                executed.map_err(|error| error::of_statement(self.server(), error))
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => pool.batch_execute(&sql).await,
        }
    }
}

fn outcome(server: &str, result: Result<Option<Row>, tokio_postgres::Error>) -> Result<Outcome, StorageError> {
    match result {
        Ok(Some(row)) => Ok(Outcome::Row(row)),
        Ok(None) => Err(StorageError::unexpected_reply(server, "the statement returned no row")),
        Err(error) if error::is_serialization_failure(&error) => Ok(Outcome::Conflict),
        Err(error) => Err(error::of_statement(server, error)),
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { connections, .. } => f.debug_list().entries(connections.iter()).finish(),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => f.debug_tuple("Pool").field(&pool.0.status()).finish(),
        }
    }
}
