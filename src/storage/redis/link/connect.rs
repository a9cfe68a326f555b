//! One connection: opened, let in, and known to answer.

#[cfg(not(unix))]
use std::io;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisConnectionInfo, RedisError, ServerErrorKind, Value};
use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::super::error::RedisStorageError;
use super::super::url::Access;
use crate::storage::net::{CONNECT_WITHIN, socket};
use crate::storage::url::Address;

/// A connection, and the task that writes and reads for all who use it. It ends with its last user: a stopped server would
/// keep it for ever.
#[derive(Debug)]
pub(super) struct Connection {
    commands: MultiplexedConnection,
    driver: AbortHandle,
}

impl Connection {
    /// Connects to `address`, and hands over what it answers to `hello`: any server would let anybody connect, also one that
    /// wants a password, is loading its data or is none.
    pub(super) async fn open(
        address: &Address,
        access: &Access,
        hello: &Cmd,
    ) -> Result<(Self, Value), RedisStorageError> {
        let server = address.to_string();
        let wrong =
            |error: RedisError| harmless(RedisStorageError::answered(&server, error).while_connecting(), access);
        let connected = async {
            let mut connection = Self::connect(address, access).await.map_err(wrong)?;
            let answer = connection.commands.send_packed_command(hello).await;
            match answer.and_then(Value::extract_error) {
                // Who may say little else may still count.
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
                    Ok((connection, Value::Nil))
                }
                Err(error) => Err(wrong(error)),
                Ok(answer) => Ok((connection, answer)),
            }
        };
        let late = || RedisStorageError::unreached(&server, format!("connecting took longer than {CONNECT_WITHIN:?}"));
        timeout(CONNECT_WITHIN, connected).await.unwrap_or_else(|_| Err(late()))
    }

    async fn connect(address: &Address, access: &Access) -> Result<Self, RedisError> {
        let host = match address {
            Address::Tcp(host) => host,
            #[cfg(unix)]
            Address::Unix(path) => return Self::over(UnixStream::connect(path).await?, access).await,
            #[cfg(not(unix))]
            Address::Unix(_) => return Err(io::Error::from(io::ErrorKind::Unsupported).into()),
        };
        let stream = socket::open(host).await?;
        match &access.tls {
            Some(tls) => Self::over(tls.over(stream, &host.name).await?, access).await,
            None => Self::over(stream, access).await,
        }
    }

    async fn over<S>(stream: S, access: &Access) -> Result<Self, RedisError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut info = RedisConnectionInfo::default().set_db(access.db.into()).set_skip_set_lib_name();
        if let Some(user) = &access.login.user {
            info = info.set_username(user);
        }
        if let Some(password) = &access.login.password {
            info = info.set_password(password);
        }
        // Deadlines are the callers'.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let (commands, driver) = MultiplexedConnection::new_with_config(&info, stream, config).await?;
        Ok(Self { commands, driver: tokio::spawn(driver).abort_handle() })
    }

    /// Where to send commands.
    pub(super) fn commands(&self) -> MultiplexedConnection {
        self.commands.clone()
    }

    /// Whether the other side has closed it, or the runtime on which it was opened has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_finished()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// A server that knows no `AUTH` repeats its arguments in its error.
fn harmless(error: RedisStorageError, access: &Access) -> RedisStorageError {
    match &access.login.password {
        Some(password) if error.to_string().contains(&**password) => error.without_its_cause(),
        _ => error,
    }
}
