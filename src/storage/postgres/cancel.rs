//! Cancel requests. They cancel the statement of a connection, and show if there is a pooler.
//!
//! A cancel request is a connection of its own. It needs no backend, and no state in the session,
//! which another program may use after this one.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as SyncMutex};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::timeout;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::{CancelToken, NoTls};

use super::socket::{PeerAddress, Security, Socket};
use crate::sync::unpoisoned;

/// The time after which a connection that the server does not close counts as closed.
pub(super) const CLOSES_WITHIN: Duration = Duration::from_secs(30);

/// The right to send the next cancel request of a connection.
pub(super) type CancelTurn = OwnedMutexGuard<()>;

/// Sends the cancel requests of one connection, one at a time.
pub(super) struct Canceller {
    token: CancelToken,
    address: PeerAddress,
    security: Security,
    turn: Arc<Mutex<()>>,
    /// `true` while the connection executes statements without a timeout.
    is_executing: AtomicBool,
}

impl Canceller {
    pub(super) fn new(token: CancelToken, address: PeerAddress, security: Security) -> Arc<Self> {
        Arc::new(Self { token, address, security, turn: Arc::default(), is_executing: AtomicBool::new(false) })
    }

    pub(super) fn is_executing(&self) -> bool {
        self.is_executing.load(Ordering::Relaxed)
    }

    pub(super) fn set_executing(&self, is_executing: bool) {
        self.is_executing.store(is_executing, Ordering::Relaxed);
    }

    /// Waits until the server has handled the cancel request that is in flight, if there is one.
    pub(super) async fn turn(&self) -> CancelTurn {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// Sends a cancel request in a background task.
    pub(super) fn cancel(self: &Arc<Self>, turn: CancelTurn) {
        let canceller = Arc::clone(self);
        tokio::spawn(async move {
            // The error is ignored: a statement that was not cancelled has no reply at its deadline.
            let _ = timeout(CLOSES_WITHIN, canceller.send()).await;
            drop(turn);
        });
    }

    async fn send(&self) -> io::Result<()> {
        let mut socket = Socket::connect(&self.address).await?;
        let sent = match &self.security {
            Security::None => self.token.cancel_query_raw(socket.clone(), NoTls).await,
            #[cfg(feature = "postgres-rustls")]
            Security::Tls(tls, name) => {
                self.token.cancel_query_raw(socket.clone(), super::socket::connector(tls, name)?).await
            }
        };
        sent.map_err(io::Error::other)?;
        socket.closed().await;
        Ok(())
    }
}

/// Returns the process ID that the peer has sent for cancel requests. A pooler such as PgBouncer sends
/// one of its own, which differs from that of the backend.
///
/// In transaction mode, each statement may run on a different connection to the server. Other
/// programs use these connections too. A named prepared statement would then be missing, or be that
/// of another program.
pub(super) async fn process_id(token: &CancelToken) -> Option<i32> {
    let recorder = Recorder::default();
    token.cancel_query_raw(recorder.clone(), recorder.clone()).await.ok()?;
    let request = unpoisoned(recorder.0.lock());
    // The request ends with the process ID and the secret key, of 4 bytes each.
    let id = request.len().checked_sub(8).and_then(|at| request.get(at..at + 4))?;
    id.try_into().ok().map(i32::from_be_bytes)
}

/// Records the bytes of a cancel request, because the client has no method for the process ID.
/// Replies as a server that accepts TLS, and encrypts nothing, because the bytes are not sent.
#[derive(Clone, Default)]
struct Recorder(Arc<SyncMutex<Vec<u8>>>);

impl TlsConnect<Recorder> for Recorder {
    type Stream = Self;
    type Error = io::Error;
    type Future = Ready<io::Result<Self>>;

    fn connect(self, recorder: Self) -> Self::Future {
        ready(Ok(recorder))
    }
}

impl TlsStream for Recorder {
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
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        unpoisoned(self.0.lock()).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
