//! Opens one connection, logs in, and waits for a first reply.
//!
//! A connection is usable once it has replied to `PING`, or to `ROLE` if sentinels named the
//! server: without a password or a database to select, the client crate accepts any open port as a
//! server. It is dropped after an I/O error or a malformed reply, when the server replies
//! `READONLY` or asks for another login, and when it stops replying.

#[cfg(not(unix))]
use std::io;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisConnectionInfo, RedisError, ServerErrorKind, Value};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::super::error::while_connecting;
use super::super::url::Access;
use crate::storage::StorageError;
use crate::storage::net::{CONNECT_WITHIN, FirstBytes, open_tcp};
use crate::storage::url::{Address, Login};

/// A connection, and the task that does its I/O.
///
/// Dropping it aborts the task. A server that does not reply would otherwise keep the task alive.
#[derive(Debug)]
pub(super) struct RedisConnection {
    commands: MultiplexedConnection,
    driver: AbortHandle,
}

impl RedisConnection {
    /// Connects to `address`, sends `hello`, and returns the connection and the reply.
    ///
    /// The reply proves that the server can run commands. A server that only accepts the connection
    /// may need a password, may still load its data, or may not speak the protocol.
    pub(super) async fn open(address: &Address, access: &Access, hello: &Cmd) -> Result<(Self, Value), StorageError> {
        let (server, first) = (address.to_string(), FirstBytes::default());
        let connected = async {
            let login = access.login.get().await.map_err(|error| StorageError::cannot_log_in(&server, error))?;
            let failed = |error: RedisError| {
                let converted = || while_connecting(&server, hide_password(error, &login));
                first.foreign(&server, "Redis").unwrap_or_else(converted)
            };
            let mut connection = Self::connect(address, access, &login, &first).await.map_err(failed)?;
            let reply = connection.commands.send_packed_command(hello).await;
            match reply.and_then(Value::extract_error) {
                // A user without the right to run `hello` may have the rights to run the scripts.
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                    Ok((connection, Value::Nil))
                }
                Err(error) => Err(failed(error)),
                Ok(reply) => Ok((connection, reply)),
            }
        };
        let late = || StorageError::unreachable(&server, format!("connecting took longer than {CONNECT_WITHIN:?}"));
        timeout(CONNECT_WITHIN, connected).await.unwrap_or_else(|_| Err(late()))
    }

    async fn connect(
        address: &Address,
        access: &Access,
        login: &Login,
        first: &FirstBytes,
    ) -> Result<Self, RedisError> {
        let host = match address {
            Address::Tcp(host) => host,
            #[cfg(unix)]
            Address::Unix(path) => {
                return Self::over(first.of(UnixStream::connect(path).await?), access.db, login).await;
            }
            #[cfg(not(unix))]
            Address::Unix(_) => return Err(io::Error::from(io::ErrorKind::Unsupported).into()),
        };
        let stream = open_tcp((&*host.name, host.port)).await?;
        match &access.tls {
            Some(tls) => Self::over(first.of(tls.over(stream, &host.name).await?), access.db, login).await,
            None => Self::over(first.of(stream), access.db, login).await,
        }
    }

    /// Logs in on an open stream, and selects the database.
    async fn over<S>(stream: S, db: u32, login: &Login) -> Result<Self, RedisError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut info = RedisConnectionInfo::default().set_db(db.into()).set_skip_set_lib_name();
        if let Some(user) = &login.user {
            info = info.set_username(user);
        }
        if let Some(password) = &login.password {
            info = info.set_password(password);
        }
        // Callers apply their own timeouts.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let (commands, driver) = MultiplexedConnection::new_with_config(&info, stream, config).await?;
        Ok(Self { commands, driver: tokio::spawn(driver).abort_handle() })
    }

    /// Returns a handle to send commands.
    pub(super) fn commands(&self) -> MultiplexedConnection {
        self.commands.clone()
    }

    /// Returns `true` if the server closed the connection, or the runtime that opened it has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_finished()
    }
}

impl Drop for RedisConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Replaces an error whose message contains the password. A server without the `AUTH` command
/// quotes the arguments of the unknown command.
fn hide_password(error: RedisError, login: &Login) -> RedisError {
    match &login.password {
        Some(password) if error.to_string().contains(&**password) => {
            (error.kind(), "the server's message is hidden, because it contains the password").into()
        }
        _ => error,
    }
}
