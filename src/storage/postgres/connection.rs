//! A connection that the storage opens itself, with its prepared statements.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, NoTls, Socket};
#[cfg(feature = "postgres-rustls")]
use tokio_postgres_rustls::MakeRustlsConnect;

use super::error::{Cause, is_missing_table};
use super::table::{Statement, Table};
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, Calls, Connected, Usable};
use crate::storage::tls::Tls;

/// An open connection, and the task that does its I/O. Dropping it aborts the task, because a
/// server that hangs would keep the task alive.
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
    /// `None` without TLS, and always without the feature `postgres-rustls`.
    pub(super) tls: Option<Tls>,
    /// The addresses of the server, for error messages.
    pub(super) server: Arc<str>,
    pub(super) table: Table,
    /// `true` if [`Connection::open`] creates a missing table.
    pub(super) migrates: bool,
    pub(super) deadline: Duration,
}

impl Connection {
    /// Connects, and prepares the statements. Creates the table if it is missing and
    /// [`migrates`](Settings::migrates) is set.
    pub(super) async fn open(settings: Settings) -> Result<Self, StorageError> {
        let server = &settings.server;
        let opened = async {
            let (client, driver) = connect(&settings).await?;
            let mut connection = Self { client, statements: Vec::new(), calls: Calls::default(), driver };
            match connection.prepare(&settings).await {
                Err(error) if is_missing_table(&error) && settings.migrates => {
                    connection.client.batch_execute("SET statement_timeout = 0").await?;
                    connection.client.batch_execute(&settings.table.migration()).await?;
                    connection.prepare(&settings).await?;
                }
                prepared => prepared?,
            }
            Ok(connection)
        };
        match timeout(CONNECT_WITHIN, opened).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) if is_missing_table(&error) => Err(super::error::of_statement(server, error)),
            Ok(Err(error)) => Err(StorageError::unreachable(server, Cause(error))),
            Err(_) => Err(connecting_took_too_long(server)),
        }
    }

    /// Prepares the statements and sets their timeout, in one round trip.
    async fn prepare(&mut self, settings: &Settings) -> Result<(), tokio_postgres::Error> {
        let client = &self.client;
        let prepared = Statement::ALL.map(|statement| {
            let sql = settings.table.sql(statement);
            Box::pin(async move { client.prepare(&sql).await.map(Some) }) as Preparing<'_>
        });
        // With this timeout, the server cancels statements whose callers no longer wait for them.
        let timeout = format!("SET statement_timeout = {}", settings.deadline.as_millis());
        let timeout = Box::pin(async move { client.batch_execute(&timeout).await.map(|()| None) }) as Preparing<'_>;
        let prepared = join(prepared.into_iter().chain([timeout]).collect()).await?;
        self.statements = prepared.into_iter().flatten().collect();
        Ok(())
    }

    pub(super) fn statement(&self, statement: Statement) -> &tokio_postgres::Statement {
        &self.statements[statement as usize]
    }
}

type Prepared<T> = Result<T, tokio_postgres::Error>;

type Preparing<'a> = Pin<Box<dyn Future<Output = Prepared<Option<tokio_postgres::Statement>>> + Send + 'a>>;

/// Polls all futures together, so that their requests are pipelined. Returns the results in order.
async fn join(mut futures: Vec<Preparing<'_>>) -> Prepared<Vec<Option<tokio_postgres::Statement>>> {
    let mut results: Vec<Option<_>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, result) in futures.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
            if let Poll::Ready(ready) = future.as_mut().poll(cx) {
                match ready {
                    Ok(ready) => *result = Some(ready),
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await?;
    Ok(results.into_iter().flatten().collect())
}

/// Opens a connection, without prepared statements, or fails after [`CONNECT_WITHIN`].
pub(super) async fn connect_in_time(settings: &Settings) -> Result<(Client, AbortHandle), StorageError> {
    match timeout(CONNECT_WITHIN, connect(settings)).await {
        Ok(connected) => connected.map_err(|error| StorageError::unreachable(&settings.server, Cause(error))),
        Err(_) => Err(connecting_took_too_long(&settings.server)),
    }
}

fn connecting_took_too_long(server: &str) -> StorageError {
    StorageError::unreachable(server, format!("connecting took longer than {CONNECT_WITHIN:?}"))
}

async fn connect(settings: &Settings) -> Result<(Client, AbortHandle), tokio_postgres::Error> {
    match &settings.tls {
        #[cfg(feature = "postgres-rustls")]
        Some(tls) => connect_over(&settings.config, MakeRustlsConnect::new(tls.rustls())).await,
        _ => connect_over(&settings.config, NoTls).await,
    }
}

async fn connect_over<T>(config: &Config, tls: T) -> Result<(Client, AbortHandle), tokio_postgres::Error>
where
    T: MakeTlsConnect<Socket, Stream: Send + 'static>,
{
    let (client, connection) = config.connect(tls).await?;
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
