//! Detects a pooler such as PgBouncer between the storage and the server.
//!
//! In transaction mode, each statement may run on a different connection to the server. Other
//! programs use these connections too. A named prepared statement would then be missing, or be that
//! of another program.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::CancelToken;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

/// Returns the process ID that the peer has sent for cancel requests. A pooler sends one of its own,
/// which differs from that of the backend.
pub(super) async fn process_id(token: &CancelToken) -> Option<i32> {
    let mut request = Recorder(Vec::new());
    token.cancel_query_raw(&mut request, Plain).await.ok()?;
    // The request ends with the process ID and the secret key, of 4 bytes each.
    let id = request.0.len().checked_sub(8).and_then(|at| request.0.get(at..at + 4))?;
    id.try_into().ok().map(i32::from_be_bytes)
}

/// Records the bytes of a cancel request, because the client has no method for the process ID.
/// Replies as a server that accepts TLS.
struct Recorder(Vec<u8>);

/// Encrypts nothing, because the bytes are not sent.
struct Plain;

impl<'a> TlsConnect<&'a mut Recorder> for Plain {
    type Stream = Recorded<'a>;
    type Error = io::Error;
    type Future = Ready<io::Result<Recorded<'a>>>;

    fn connect(self, recorder: &'a mut Recorder) -> Self::Future {
        ready(Ok(Recorded(recorder)))
    }
}

struct Recorded<'a>(&'a mut Recorder);

impl TlsStream for Recorded<'_> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Recorder {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Recorder {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Recorded<'_> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Recorded<'_> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(cx)
    }
}
