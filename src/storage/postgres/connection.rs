//! A connection that the storage opens itself.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::tls::TlsConnect;
use tokio_postgres::{Client, Config, Error, NoTls, Row, SimpleQueryMessage};

use super::cancel::{CLOSES_WITHIN, Canceller, process_id};
use super::error;
use super::prepared::Prepared;
use super::socket::{BackendSlot, BackendSlots, PeerAddress, Security, Server, Socket, resolve};
use super::table::{Query, Statement, StatesTable};
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, Usable, before, too_slow};
use crate::storage::tls::Tls;
use crate::time::micros;

/// The time that the server has to close a connection before the first cancel request. It doubles
/// after each request, up to [`MAX_CANCEL_AFTER`].
const CANCEL_AFTER: Duration = Duration::from_millis(50);
const MAX_CANCEL_AFTER: Duration = Duration::from_secs(1);

/// An open connection. A background task does its I/O.
pub(super) struct PostgresConnection {
    pub(super) client: Client,
    pub(super) canceller: Arc<Canceller>,
    table: StatesTable,
    /// `true` if a pooler may execute each statement on another connection to the server.
    is_pooled: bool,
    statements: [Prepared; Statement::COUNT],
    closing: Arc<Notify>,
    opened: Instant,
    /// The time of the last reply, in microseconds since `opened`.
    last_reply: AtomicU64,
}

/// The settings of a connection.
#[derive(Clone)]
pub(super) struct ConnectionSettings {
    pub(super) config: Arc<Config>,
    /// `None` without TLS, and always without the feature `postgres-rustls`.
    pub(super) tls: Option<Tls>,
    /// The addresses of the server, for error messages.
    pub(super) server: Arc<str>,
    pub(super) table: StatesTable,
    pub(super) if_missing: IfMissing,
    /// Set by `Link::own`.
    pub(super) slots: Arc<BackendSlots>,
}

/// The action of a new connection if the table does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfMissing {
    Create,
    Fail,
    Ignore,
}

impl PostgresConnection {
    /// Connects to the first server that accepts the connection, and looks for the table.
    pub(super) async fn open(settings: ConnectionSettings) -> Result<Self, StorageError> {
        let deadline = Instant::now() + CONNECT_WITHIN;
        let late = || too_slow(&settings.server);
        let servers = timeout_at(deadline, resolve(&settings.config, &settings.server)).await;
        let servers = servers.map_err(|_| late())??;
        let mut last = None;
        for (at, server) in servers.iter().enumerate() {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let until = Instant::now() + remaining / u32::try_from(servers.len() - at).unwrap_or(u32::MAX);
            let Ok(slot) = timeout_at(until, settings.slots.take(&server.address)).await else {
                let message = "the server has not closed earlier connections yet";
                last.get_or_insert_with(|| StorageError::unreachable(&settings.server, message));
                continue;
            };
            match timeout_at(until, Self::open_on(&settings, server, slot)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => last = Some(error),
                Err(_) => last = last.or_else(|| Some(late())),
            }
        }
        Err(last.unwrap_or_else(late))
    }

    async fn open_on(settings: &ConnectionSettings, server: &Server, slot: BackendSlot) -> Result<Self, StorageError> {
        let socket = Socket::connect(&server.address).await;
        let socket = socket.map_err(|error| StorageError::unreachable(&settings.server, error))?;
        let end = End { socket, canceller: None, slot: Some(slot) };
        let address = server.address.clone();
        let connection = match &settings.tls {
            #[cfg(feature = "postgres-rustls")]
            Some(tls) => {
                let connector = super::socket::connector(tls, &server.name);
                let connector = connector.map_err(|error| StorageError::unreachable(&settings.server, error))?;
                let security = Security::Tls(tls.clone(), server.name.as_str().into());
                Self::login(settings, end, connector, address, security).await
            }
            _ => Self::login(settings, end, NoTls, address, Security::None).await,
        };
        let mut connection = connection.map_err(|error| error::at_login(&settings.server, error))?;
        let is_missing = connection.check(settings).await?;
        if is_missing && settings.if_missing == IfMissing::Fail {
            return Err(error::missing_table(&settings.server));
        }
        if is_missing {
            let created = connection.batch_execute(&settings.table.migration()).await;
            created.map_err(|error| error::at_table(&settings.server, error))?;
        }
        Ok(connection)
    }

    async fn login<T>(
        settings: &ConnectionSettings,
        mut end: End,
        tls: T,
        address: PeerAddress,
        security: Security,
    ) -> Result<Self, Error>
    where
        T: TlsConnect<Socket, Stream: Send + 'static>,
    {
        let (client, connection) = settings.config.connect_raw(end.socket.clone(), tls).await?;
        let canceller = Canceller::new(client.cancel_token(), address, security);
        end.canceller = Some(Arc::clone(&canceller));
        let closing = Arc::new(Notify::new());
        let closed = Arc::clone(&closing);
        tokio::spawn(async move {
            {
                // As a future, `connection` would log each notice of the server at INFO.
                let mut connection = connection;
                let mut ended = poll_fn(move |cx| {
                    while let Some(Ok(_)) = ready!(connection.poll_message(cx)) {}
                    Poll::Ready(())
                });
                before(&mut ended, closed.notified()).await;
            }
            drop(end);
        });
        Ok(Self {
            client,
            canceller,
            table: settings.table.clone(),
            is_pooled: true,
            statements: Default::default(),
            closing,
            opened: Instant::now(),
            last_reply: AtomicU64::new(0),
        })
    }

    /// Checks the server, and detects a pooler. Returns `true` if the table is missing, unless that
    /// is ignored. Takes no lock on the table.
    async fn check(&mut self, settings: &ConnectionSettings) -> Result<bool, StorageError> {
        let is_ignored = settings.if_missing == IfMissing::Ignore;
        let is_missing = if is_ignored { "false".to_owned() } else { settings.table.is_missing() };
        let sql = format!("SELECT pg_backend_pid(), {is_missing}, current_setting('transaction_read_only')");
        let rows = self.client.simple_query(&sql).await;
        let rows = rows.map_err(|error| error::at_table(&settings.server, error))?;
        let row = rows.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some([row.get(0)?, row.get(1)?, row.get(2)?]),
            _ => None,
        });
        let Some([backend, is_missing, read_only]) = row else {
            return Err(StorageError::unreachable(&settings.server, "unexpected reply to the check of the server"));
        };
        let wrong = match settings.config.get_target_session_attrs() {
            TargetSessionAttrs::ReadWrite if read_only == "on" => Some("the server does not accept writes"),
            TargetSessionAttrs::ReadOnly if read_only == "off" => Some("the server is not read-only"),
            _ => None,
        };
        if let Some(wrong) = wrong {
            return Err(StorageError::unreachable(&settings.server, wrong));
        }
        self.is_pooled = process_id(&self.client.cancel_token()).await != backend.parse().ok();
        Ok(is_missing == "t")
    }

    /// Returns the time since the last reply to a statement.
    pub(super) fn silence(&self) -> Duration {
        let last = Duration::from_micros(self.last_reply.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(last)
    }

    /// Executes a statement, and returns its row.
    pub(super) async fn execute(&self, query: &Query) -> Result<Option<Row>, Error> {
        let result = self.send(query).await;
        self.last_reply.store(micros(self.opened.elapsed()), Ordering::Relaxed);
        result
    }

    /// Executes statements without a timeout. If the future is dropped, they are cancelled when the
    /// connection is closed.
    pub(super) async fn batch_execute(&self, sql: &str) -> Result<(), Error> {
        self.canceller.set_executing(true);
        let executed = self.client.batch_execute(sql).await;
        self.canceller.set_executing(false);
        executed
    }

    async fn send(&self, query: &Query) -> Result<Option<Row>, Error> {
        let sql = || self.table.sql(query.statement);
        if self.is_pooled {
            return Ok(self.client.query_typed(&sql(), &query.typed_params()).await?.pop());
        }
        let statement = self.statements[query.statement as usize].get(&self.client, sql).await?;
        self.client.query_opt(&statement, &query.params()).await
    }
}

impl Usable for PostgresConnection {
    fn is_usable(&self) -> bool {
        !self.client.is_closed()
    }

    fn close(&self) {
        self.closing.notify_one();
    }
}

impl Drop for PostgresConnection {
    fn drop(&mut self) {
        self.close();
    }
}

/// The end of a connection. When it is dropped, the slot is taken until the server has closed the
/// connection, because the server may be executing statements, or may not have read the login yet.
struct End {
    socket: Socket,
    /// `None` before the login.
    canceller: Option<Arc<Canceller>>,
    slot: Option<BackendSlot>,
}

impl Drop for End {
    fn drop(&mut self) {
        let (mut socket, canceller, slot) = (self.socket.clone(), self.canceller.take(), self.slot.take());
        let Ok(runtime) = Handle::try_current() else { return socket.finish() };
        runtime.spawn(async move {
            let (until, mut wait) = (Instant::now() + CLOSES_WITHIN, CANCEL_AFTER);
            // PgBouncer does not cancel the statement of a client that has left, and ignores its cancel
            // requests.
            if let Some(canceller) = canceller.as_ref().filter(|canceller| canceller.is_executing())
                && let Ok(turn) = timeout_at(until, canceller.turn()).await
            {
                canceller.cancel(turn);
                let _ = timeout_at(until, canceller.turn()).await;
            }
            socket.finish();
            while timeout(wait, socket.closed()).await.is_err() && Instant::now() < until {
                if let Some(canceller) = &canceller
                    && let Ok(turn) = timeout_at(until, canceller.turn()).await
                {
                    canceller.cancel(turn);
                }
                wait = (wait * 2).min(MAX_CANCEL_AFTER);
            }
            drop(slot);
        });
    }
}
