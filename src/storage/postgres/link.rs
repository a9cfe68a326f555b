//! The connections to the server: the storage's own, or those of the program's pool.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use super::call::Sent;
use super::connection::{ConnectionSettings, IfMissing, PostgresConnection};
use super::error::{self, PRODUCT};
#[cfg(feature = "deadpool-postgres")]
use super::pool::Lender;
use super::socket::BackendSlots;
use super::table::{Query, StatesTable};
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, Reconnecting, WithCalls};
#[cfg(feature = "postgres-rustls")]
use crate::storage::tls::Tls;

/// A connection that is opened on demand.
type Connection = Reconnecting<WithCalls<PostgresConnection>>;

/// A handle to the connections. Clones share them.
#[derive(Clone)]
pub(super) enum Link {
    Own(Own),
    #[cfg(feature = "deadpool-postgres")]
    Pool {
        pool: Lender,
        table: StatesTable,
    },
}

/// The storage's own connections.
#[derive(Clone)]
pub(super) struct Own {
    settings: ConnectionSettings,
    connections: Arc<[Arc<Connection>]>,
    /// The number of statements so far, which take turns on the connections.
    next: Arc<AtomicUsize>,
}

impl Link {
    /// Creates a link with `count` connections. It does not connect yet. One more connection can
    /// exist, for a migration, or while the server has not closed an earlier one.
    pub(super) fn own(settings: ConnectionSettings, count: usize) -> Self {
        let connections = (0..count).map(|_| Reconnecting::new(&settings.server)).collect();
        let settings = ConnectionSettings { slots: Arc::new(BackendSlots::new(count + 1)), ..settings };
        Self::Own(Own { settings, connections, next: Arc::default() })
    }

    /// Returns `None` for a pool.
    #[cfg_attr(not(feature = "deadpool-postgres"), allow(clippy::unnecessary_wraps, reason = "there is no pool"))]
    fn as_own(&self) -> Option<&Own> {
        match self {
            Self::Own(own) => Some(own),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { .. } => None,
        }
    }

    /// Returns a link with changed TLS settings, which opens new connections. Returns `None` for a
    /// pool, and for a URL without TLS.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn with_tls(&self, change: impl FnOnce(&Tls) -> Result<Tls, String>) -> Option<Result<Self, String>> {
        let Own { settings, connections, .. } = self.as_own()?;
        let changed = change(settings.tls.as_ref()?);
        Some(changed.map(|tls| Self::own(ConnectionSettings { tls: Some(tls), ..settings.clone() }, connections.len())))
    }

    pub(super) fn table(&self) -> &StatesTable {
        match self {
            Self::Own(own) => &own.settings.table,
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { table, .. } => table,
        }
    }

    pub(super) fn server(&self) -> &str {
        self.as_own().map_or(PRODUCT, |own| &own.settings.server)
    }

    /// Returns the number of connections, or the maximum size of the pool.
    pub(super) fn connections(&self) -> usize {
        match self {
            Self::Own(own) => own.connections.len(),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => pool.status().max_size,
        }
    }

    /// Returns an error if too many calls are in flight on every connection. Returns `None` for a
    /// pool, because its callers wait for a free connection.
    pub(super) fn overload(&self) -> Option<StorageError> {
        let mut error = None;
        for connection in self.as_own()?.connections.iter() {
            error = Some(connection.overload()?);
        }
        error
    }

    /// Executes a statement at most once, and cancels it shortly before the deadline. A statement that
    /// a late cancel request for an earlier one has cancelled is sent again. The
    /// future can be dropped at any time. The statement is then cancelled at the same time, unless
    /// the server has executed it by then.
    ///
    /// Returns the row, or `None` if the statement was rolled back because of another transaction.
    pub(super) async fn query(&self, query: Query, deadline: Instant) -> Result<Option<Row>, StorageError> {
        match self {
            Self::Own(own) => own.query(query, deadline).await,
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, table } => outcome(PRODUCT, pool.execute(table, &query, deadline).await?),
        }
    }

    /// Waits until the first attempt to connect has ended. Does not wait for a pool.
    pub(super) async fn first_connection(&self) {
        if let Some(own) = self.as_own() {
            // The call that follows returns the error.
            let _ = own.connection(Instant::now() + CONNECT_WITHIN).await;
        }
    }

    /// Creates the table, and its schema if one is set, unless they exist.
    pub(super) async fn migrate(&self) -> Result<(), StorageError> {
        let sql = self.table().migration();
        match self {
            Self::Own(Own { settings, .. }) => {
                let connection =
                    PostgresConnection::open(ConnectionSettings { if_missing: IfMissing::Ignore, ..settings.clone() })
                        .await?;
                let executed = connection.batch_execute(&sql).await;
                executed.map_err(|error| error::of_statement(self.server(), error))
            }
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => pool.batch_execute(&sql).await,
        }
    }
}

impl Own {
    async fn query(&self, query: Query, deadline: Instant) -> Result<Option<Row>, StorageError> {
        let (connection, open) = self.connection(deadline).await?;
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

    /// Returns the open connection with the fewest calls in flight. If the next one is not open, it is
    /// opened in the background, because the server may have no room for it.
    ///
    /// If none is open, waits until the first one of all is open. Others would compete with it for
    /// the last free connection of the server.
    async fn connection(
        &self,
        deadline: Instant,
    ) -> Result<(&Connection, Arc<WithCalls<PostgresConnection>>), StorageError> {
        let connections = &self.connections;
        let next = self.next.fetch_add(1, Ordering::Relaxed) % connections.len();
        let open = || {
            let settings = self.settings.clone();
            async { PostgresConnection::open(settings).await.map(WithCalls::new) }
        };
        let (before, after) = connections.split_at(next);
        // A statement that waits for a locked row delays those behind it on its connection.
        let open_ones =
            || after.iter().chain(before).filter_map(|connection| Some((&**connection, connection.value()?)));
        let find_open = || open_ones().min_by_key(|(_, open)| open.calls_in_flight());
        if let Some(found) = find_open() {
            let _ = connections[next].value_or_begin(open);
            return Ok(found);
        }
        match connections[0].get_for(&connections[next], deadline, open).await {
            Ok(value) => Ok((&*connections[0], value)),
            // An attempt for another connection may have succeeded in the meantime.
            Err(error) => find_open().ok_or(error),
        }
    }
}

/// Returns the row of a statement, or `None` if it was rolled back because of another transaction.
fn outcome(server: &str, result: Result<Option<Row>, tokio_postgres::Error>) -> Result<Option<Row>, StorageError> {
    match result {
        Ok(Some(row)) => Ok(Some(row)),
        Ok(None) => Err(StorageError::unexpected_reply(server, "the statement returned no row")),
        Err(error) if error::is_serialization_failure(&error) => Ok(None),
        Err(error) => Err(error::of_statement(server, error)),
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(own) => f.debug_list().entries(own.connections.iter()).finish(),
            #[cfg(feature = "deadpool-postgres")]
            Self::Pool { pool, .. } => f.debug_tuple("Pool").field(&pool.status()).finish(),
        }
    }
}
