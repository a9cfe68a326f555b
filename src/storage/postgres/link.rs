//! The connections to the server: the storage's own, or those of the program's pool.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::connection::{Connection, Settings, connect_in_time};
use super::error::{self, Cause};
use super::table::{Statement, Table};
use crate::storage::net::Reconnecting;
#[cfg(feature = "postgres-rustls")]
use crate::storage::tls::Tls;
use crate::storage::{StorageError, StorageErrorKind};

type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// The name of the server of a pool, for messages.
const POOL: &str = "PostgreSQL";

/// A handle to the connections. Clones share them.
#[derive(Clone)]
pub(super) enum Link {
    Own { settings: Settings, connections: Arc<[Arc<Reconnecting<Connection>>]>, next: Arc<AtomicUsize> },
    Pool { pool: Pool, table: Table },
}

/// The result of a statement that was sent.
pub(super) enum Sent {
    Row(Row),
    /// The statement was rolled back because of another transaction.
    Conflict,
}

impl Link {
    /// Creates a link with `count` connections. It does not connect yet.
    pub(super) fn own(settings: Settings, count: usize) -> Self {
        let connections = (0..count).map(|_| Reconnecting::new(&settings.server)).collect();
        Self::Own { settings, connections, next: Arc::default() }
    }

    /// Returns a link with another table. It opens new connections, unless they are those of a
    /// pool.
    pub(super) fn with_table(&self, table: Table) -> Self {
        match self {
            Self::Own { settings, connections, .. } => {
                Self::own(Settings { table, ..settings.clone() }, connections.len())
            }
            Self::Pool { pool, .. } => Self::Pool { pool: pool.clone(), table },
        }
    }

    /// Returns a link with changed TLS settings, which opens new connections. Returns `None` for a
    /// pool, and for a URL without TLS.
    #[cfg(feature = "postgres-rustls")]
    pub(super) fn with_tls(&self, change: impl FnOnce(&Tls) -> Result<Tls, String>) -> Option<Result<Self, String>> {
        let Self::Own { settings, connections, .. } = self else { return None };
        let changed = change(settings.tls.as_ref()?);
        Some(changed.map(|tls| Self::own(Settings { tls: Some(tls), ..settings.clone() }, connections.len())))
    }

    /// Returns a link with another statement timeout, which opens new connections. Has no effect on
    /// a pool, which sets the statement timeout itself.
    pub(super) fn with_deadline(&self, deadline: Duration) -> Self {
        match self {
            Self::Own { settings, connections, .. } => {
                Self::own(Settings { deadline, ..settings.clone() }, connections.len())
            }
            Self::Pool { .. } => self.clone(),
        }
    }

    pub(super) fn table(&self) -> &Table {
        match self {
            Self::Own { settings: Settings { table, .. }, .. } | Self::Pool { table, .. } => table,
        }
    }

    pub(super) fn server(&self) -> &str {
        match self {
            Self::Own { settings, .. } => &settings.server,
            Self::Pool { .. } => POOL,
        }
    }

    /// Returns the number of connections, or the maximum size of the pool.
    pub(super) fn connections(&self) -> usize {
        match self {
            Self::Own { connections, .. } => connections.len(),
            Self::Pool { pool, .. } => pool.status().max_size,
        }
    }

    /// Returns an error if too many calls are in flight on every connection. Returns `None` for a
    /// pool, because its callers wait for a free connection.
    pub(super) fn overload(&self) -> Option<StorageError> {
        let Self::Own { connections, .. } = self else { return None };
        let mut error = None;
        for connection in connections.iter() {
            error = Some(connection.overload()?);
        }
        error
    }

    /// Executes a statement once, without retries. The future can be dropped at any time, but the
    /// server may still execute the statement.
    pub(super) async fn query(
        &self,
        statement: Statement,
        params: Params<'_>,
        deadline: Instant,
    ) -> Result<Sent, StorageError> {
        match self {
            Self::Own { settings, connections, next } => {
                let at = next.fetch_add(1, Ordering::Relaxed) % connections.len();
                Self::query_own(settings, &connections[at], statement, params, deadline).await
            }
            Self::Pool { pool, table } => {
                let sql = table.sql(statement);
                let object = from_pool(pool, deadline).await?;
                let queried = async {
                    let prepared = object.prepare_cached(&sql).await?;
                    object.query_one(&prepared, params).await
                };
                let Ok(result) = timeout_at(deadline, queried).await else {
                    // The pool must not lend a connection whose server may hang.
                    drop(Object::take(object));
                    return Err(StorageError::timed_out(POOL));
                };
                result_of(POOL, result)
            }
        }
    }

    async fn query_own(
        settings: &Settings,
        connection: &Arc<Reconnecting<Connection>>,
        statement: Statement,
        params: Params<'_>,
        deadline: Instant,
    ) -> Result<Sent, StorageError> {
        let open = connection.get(deadline, || Connection::open(settings.clone())).await?;
        let call = connection.begin(&open, deadline).await?;
        let Ok(result) = timeout_at(deadline, open.client.query_one(open.statement(statement), params)).await else {
            return Err(StorageError::timed_out(connection.name()));
        };
        call.answered();
        let is_unusable = result.as_ref().is_err_and(error::needs_another_connection);
        let sent = result_of(connection.name(), result);
        if is_unusable {
            connection.give_up(&open, sent.as_ref().err());
        }
        sent
    }

    /// Creates the table, and its schema if one is set, unless they exist.
    pub(super) async fn migrate(&self) -> Result<(), StorageError> {
        let sql = self.table().migration();
        let executed = match self {
            Self::Own { settings, .. } => {
                let (client, driver) = connect_in_time(settings).await?;
                let executed = client.batch_execute(&sql).await;
                driver.abort();
                executed
            }
            Self::Pool { pool, .. } => {
                let object = pool.get().await.map_err(of_pool)?;
                object.batch_execute(&sql).await
            }
        };
        executed.map_err(|error| error::of_statement(self.server(), error))
    }
}

async fn from_pool(pool: &Pool, deadline: Instant) -> Result<Object, StorageError> {
    let Ok(object) = timeout_at(deadline, pool.get()).await else {
        let message =
            "no connection from the pool within the deadline: all are in use, or the server cannot be reached";
        return Err(StorageError::new(StorageErrorKind::Timeout, message).uncounted());
    };
    object.map_err(of_pool)
}

fn of_pool(error: PoolError) -> StorageError {
    match error {
        PoolError::Backend(error) => StorageError::unreachable(POOL, Cause(error)),
        PoolError::Timeout(_) => {
            let message = "no connection from the pool within the pool's timeout";
            StorageError::new(StorageErrorKind::Timeout, message).uncounted()
        }
        other => StorageError::unreachable(POOL, other),
    }
}

fn result_of(server: &str, result: Result<Row, tokio_postgres::Error>) -> Result<Sent, StorageError> {
    match result {
        Ok(row) => Ok(Sent::Row(row)),
        Err(error) if error::is_serialization_failure(&error) => Ok(Sent::Conflict),
        Err(error) => Err(error::of_statement(server, error)),
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { connections, .. } => f.debug_list().entries(connections.iter()).finish(),
            Self::Pool { pool, .. } => f.debug_tuple("Pool").field(&pool.status()).finish(),
        }
    }
}
