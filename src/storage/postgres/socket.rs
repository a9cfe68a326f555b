//! A socket to the server that can be half-closed, so that the end of the backend can be awaited.

use std::future::poll_fn;
use std::io;
use std::net::{Shutdown, SocketAddr};
#[cfg(unix)]
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

use crate::storage::net::race::{race, tries};
use crate::storage::net::socket;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(PathBuf),
}

/// A connected socket. Clones share it. It is closed when the last one is dropped.
#[derive(Clone)]
pub(super) struct Socket(Arc<Stream>);

enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Evaluates an expression on the stream of either kind.
macro_rules! on_stream {
    ($socket:expr, $stream:ident => $result:expr) => {
        match &*$socket.0 {
            Stream::Tcp($stream) => $result,
            #[cfg(unix)]
            Stream::Unix($stream) => $result,
        }
    };
}

impl Socket {
    /// Connects to `address`. Sends several SYN packets if there is no reply. The caller sets the
    /// timeout.
    pub(super) async fn connect(address: &Address) -> io::Result<Self> {
        let stream = match address {
            Address::Tcp(address) => Stream::Tcp(race(tries(|| socket::open(*address))).await?),
            #[cfg(unix)]
            Address::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
        };
        Ok(Self(Arc::new(stream)))
    }

    /// Sends the end of the stream (FIN). The server then ends the backend.
    pub(super) fn finish(&self) {
        // An error means that the connection is closed already.
        let _ = on_stream!(self, stream => SockRef::from(stream).shutdown(Shutdown::Write));
    }

    /// Waits until the server has closed the connection. Discards all bytes that it still sends.
    pub(super) async fn closed(&mut self) {
        let mut bytes = [0; 4_096];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            let read = poll_fn(|cx| Pin::new(&mut *self).poll_read(cx, &mut buffer)).await;
            if read.is_err() || buffer.filled().is_empty() {
                return;
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(on_stream!(self, stream => stream.poll_read_ready(cx)))?;
            match on_stream!(self, stream => stream.try_read(buffer.initialize_unfilled())) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(on_stream!(self, stream => stream.poll_write_ready(cx)))?;
            match on_stream!(self, stream => stream.try_write(bytes)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing, because PgBouncer drops the cancel request of a client that sends a FIN before
    /// the request was forwarded.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
