//! Opens streams to servers, and runs their I/O. Names the protocol of a server that answers in
//! another one, for example because of a wrong port.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_util::io::InspectReader;

use super::{CONNECT_WITHIN, open_tcp, too_slow};
use crate::storage::tls::Tls;
use crate::storage::url::Address;
use crate::storage::{StorageError, StorageErrorKind};

/// The timeout of a TLS handshake. The rest of the time to connect is for its error.
const HANDSHAKE_WITHIN: Duration = CONNECT_WITHIN.saturating_sub(Duration::from_millis(60));

/// The number of bytes that identify a protocol.
const LONGEST: usize = 16;

/// A stream to a server: TCP, TLS or a Unix socket.
pub(in crate::storage) trait ServerStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ServerStream for S {}

/// The first bytes that a server has sent on a connection.
#[derive(Debug, Default)]
pub(in crate::storage) struct FirstBytes(Arc<OnceLock<Box<[u8]>>>);

impl FirstBytes {
    /// Records the first bytes of this stream.
    fn of(&self, stream: impl ServerStream + 'static) -> Box<dyn ServerStream> {
        let first = Arc::clone(&self.0);
        let record = move |bytes: &[u8]| {
            if !bytes.is_empty() {
                first.get_or_init(|| bytes[..bytes.len().min(LONGEST)].into());
            }
        };
        Box::new(InspectReader::new(stream, record))
    }

    /// Returns the error of a server that speaks another protocol than `expected`, or `None` if the
    /// bytes do not show that.
    fn foreign(&self, server: &str, expected: &str) -> Option<StorageError> {
        let found = protocol(self.0.get()?).filter(|found| *found != expected)?;
        let message =
            format!("{server} speaks {found}, not {expected}: check the scheme, the host and the port in the URL");
        Some(StorageError::new(StorageErrorKind::Unreachable, message))
    }
}

/// Returns the protocol in which a server rejects a request that it cannot parse.
fn protocol(first: &[u8]) -> Option<&'static str> {
    let begins_with = |text: &str| first.starts_with(text.as_bytes());
    match first {
        [b'-', b'A'..=b'Z', ..] => Some("Redis"),
        _ if ["ERROR", "CLIENT_ERROR", "SERVER_ERROR"].into_iter().any(begins_with) => Some("memcached"),
        // Some servers omit the status line if they cannot parse the request.
        _ if ["HTTP/", "<!DOCTYPE", "<html"].into_iter().any(begins_with) => Some("HTTP"),
        // An alert.
        [0x15, 3, ..] => Some("TLS"),
        _ => None,
    }
}

/// Opens a stream to `address`, and records the first bytes of the server.
pub(in crate::storage) async fn open(
    address: &Address,
    tls: Option<&Tls>,
    first: &FirstBytes,
) -> io::Result<Box<dyn ServerStream>> {
    let host = match address {
        Address::Tcp(host) => host,
        #[cfg(unix)]
        Address::Unix(path) => return Ok(first.of(UnixStream::connect(path).await?)),
        #[cfg(not(unix))]
        Address::Unix(_) => return Err(io::ErrorKind::Unsupported.into()),
    };
    let stream = open_tcp((&*host.name, host.port)).await?;
    match tls {
        Some(tls) => {
            let handshake = timeout(HANDSHAKE_WITHIN, tls.over(stream, &host.name)).await;
            let done = handshake.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            Ok(first.of(done.map_err(without_tls)?))
        }
        None => Ok(first.of(stream)),
    }
}

/// Adds the probable cause to the error of a handshake with a server that does not speak TLS. Such a server
/// waits for the end of a line, or answers in its own protocol and closes the connection.
fn without_tls(error: io::Error) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, InvalidData, TimedOut, UnexpectedEof};
    let is_without_tls = match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof => true,
        // Other data is invalid because of a certificate, or because the server has rejected ours.
        InvalidData => error.to_string().starts_with("received corrupt message"),
        _ => false,
    };
    if !is_without_tls {
        return error;
    }
    io::Error::new(
        error.kind(),
        format!("no TLS handshake: {error}; check that this port speaks TLS, or write the scheme without TLS"),
    )
}

/// Awaits an attempt to connect to `server`, which speaks `protocol`.
///
/// # Errors
///
/// The error names the protocol of the server if it is another one. Otherwise it is that of the
/// attempt, or that of a timeout.
pub(in crate::storage) async fn connecting<T>(
    server: &str,
    protocol: &str,
    first: &FirstBytes,
    attempt: impl Future<Output = Result<T, StorageError>>,
) -> Result<T, StorageError> {
    let connected = timeout(CONNECT_WITHIN, attempt).await.unwrap_or_else(|_| Err(too_slow(server)));
    connected.map_err(|error| first.foreign(server, protocol).unwrap_or(error))
}

/// The task that does the I/O of a connection. It is aborted when this is dropped. A server that does
/// not reply would otherwise keep it alive.
#[derive(Debug)]
pub(in crate::storage) struct Driver(AbortHandle);

impl Driver {
    /// Spawns the task on the current runtime.
    pub(in crate::storage) fn spawn(io: impl Future<Output: Send> + Send + 'static) -> Self {
        Self(tokio::spawn(async move { drop(io.await) }).abort_handle())
    }

    /// Returns `true` if the connection was closed, or the runtime that opened it was shut down.
    pub(in crate::storage) fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}
