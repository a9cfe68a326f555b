//! A connection of our own, with the prepared statements.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::{Client, Config, NoTls};

use super::error::{Cause, is_missing_table};
use super::table::{Statement, Table};
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, Calls, Connected, Usable};

/// An open connection, and the task that does its I/O. Dropping it aborts the task, because a
/// server that hangs would keep it alive.
pub(super) struct Connection {
    pub(super) client: Client,
    statements: Vec<tokio_postgres::Statement>,
    calls: Calls,
    driver: AbortHandle,
}

/// The settings of a connection.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) config: Arc<Config>,
    /// The addresses, for messages.
    pub(super) server: Arc<str>,
    pub(super) table: Table,
    /// Creates the table if it does not exist.
    pub(super) migrates: bool,
    pub(super) deadline: Duration,
}

impl Connection {
    /// Connects, creates the table if necessary, and prepares the statements.
    pub(super) async fn open(settings: Settings) -> Result<Self, StorageError> {
        let server = &settings.server;
        let opened = async {
            let (client, driver) = connect(&settings.config).await?;
            let mut connection = Self { client, statements: Vec::new(), calls: Calls::default(), driver };
            match connection.prepare(&settings.table).await {
                Err(error) if is_missing_table(&error) && settings.migrates => {
                    connection.client.batch_execute(&settings.table.migration()).await?;
                    connection.prepare(&settings.table).await?;
                }
                prepared => prepared?,
            }
            // The server cancels a statement when nobody waits for it any more.
            let timeout = format!("SET statement_timeout = {}", settings.deadline.as_millis());
            connection.client.batch_execute(&timeout).await?;
            Ok(connection)
        };
        match timeout(CONNECT_WITHIN, opened).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) if is_missing_table(&error) => Err(super::error::of_statement(server, error)),
            Ok(Err(error)) => Err(StorageError::unreachable(server, Cause(error))),
            Err(_) => Err(StorageError::unreachable(server, format!("connecting took longer than {CONNECT_WITHIN:?}"))),
        }
    }

    async fn prepare(&mut self, table: &Table) -> Result<(), tokio_postgres::Error> {
        let prepared = Statement::ALL.map(|statement| {
            let sql = table.sql(statement);
            let client = &self.client;
            async move { client.prepare(&sql).await }
        });
        self.statements.clear();
        for statement in prepared {
            self.statements.push(statement.await?);
        }
        Ok(())
    }

    pub(super) fn statement(&self, statement: Statement) -> &tokio_postgres::Statement {
        &self.statements[statement as usize]
    }
}

/// Opens a connection without statements.
pub(super) async fn connect(config: &Config) -> Result<(Client, AbortHandle), tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    let driver = tokio::spawn(async move { drop(connection.await) }).abort_handle();
    Ok((client, driver))
}

impl Usable for Connection {
    fn is_usable(&self) -> bool {
        !self.client.is_closed() && !self.driver.is_finished()
    }
}

impl Connected for Connection {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
