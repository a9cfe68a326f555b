//! Cancels the statement that a connection executes.
//!
//! A cancel request is a connection of its own. It needs no backend, and no state in the session,
//! which another program may use after this one.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::timeout;
use tokio_postgres::{CancelToken, NoTls};

use super::socket::{Address, Socket};
use super::tls::Security;

/// The time after which a connection that the server does not close counts as closed.
pub(super) const CLOSES_WITHIN: Duration = Duration::from_secs(30);

/// The right to send the next cancel request of a connection.
pub(super) type Turn = OwnedMutexGuard<()>;

/// Sends the cancel requests of one connection, one at a time.
pub(super) struct Canceller {
    token: CancelToken,
    address: Address,
    security: Security,
    turn: Arc<Mutex<()>>,
}

impl Canceller {
    pub(super) fn new(token: CancelToken, address: Address, security: Security) -> Arc<Self> {
        Arc::new(Self { token, address, security, turn: Arc::default() })
    }

    /// Waits until the server has handled the cancel request that is in flight, if there is one.
    pub(super) async fn turn(&self) -> Turn {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// Sends a cancel request in a background task.
    pub(super) fn cancel(self: &Arc<Self>, turn: Turn) {
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
                self.token.cancel_query_raw(socket.clone(), super::tls::connector(tls, name)?).await
            }
        };
        sent.map_err(io::Error::other)?;
        socket.closed().await;
        Ok(())
    }
}
