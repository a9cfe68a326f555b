//! Names the protocol of a server that answers in another one, for example because of a wrong port.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::storage::{StorageError, StorageErrorKind};

/// The number of bytes that identify a protocol.
const LONGEST: usize = 16;

/// The first bytes that a server has sent on a connection.
#[derive(Debug, Default)]
pub(in crate::storage) struct FirstBytes(Arc<OnceLock<Box<[u8]>>>);

impl FirstBytes {
    /// Records the first bytes of this stream.
    pub(in crate::storage) fn of<S>(&self, stream: S) -> Recorded<S> {
        Recorded { stream, first: Arc::clone(&self.0) }
    }

    /// Returns the error of a server that speaks another protocol than `expected`, or `None` if the
    /// bytes do not show that.
    pub(in crate::storage) fn foreign(&self, server: &str, expected: &str) -> Option<StorageError> {
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

/// A stream whose first bytes are recorded.
pub(in crate::storage) struct Recorded<S> {
    stream: S,
    first: Arc<OnceLock<Box<[u8]>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Recorded<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let bytes = &buffer.filled()[before..];
        if !bytes.is_empty() && self.first.get().is_none() {
            let _ = self.first.set(bytes[..bytes.len().min(LONGEST)].into());
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Recorded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
