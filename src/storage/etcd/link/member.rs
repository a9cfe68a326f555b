//! The connection to one member of the cluster.

use std::fmt;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::super::error::{is_unauthenticated, is_unsent};
use super::super::url::Access;
use super::super::wire::Call;
use super::connection::EtcdConnection;
use crate::storage::net::{Calls, Connected, Reconnecting, Usable};
use crate::storage::url::Host;
use crate::storage::{StorageError, StorageErrorKind};

/// A member of the cluster.
pub(super) struct Member {
    host: Host,
    access: Arc<Access>,
    connection: Arc<Reconnecting<OpenConnection>>,
}

/// An open connection.
struct OpenConnection {
    connection: EtcdConnection,
    calls: Calls,
}

impl Usable for OpenConnection {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Connected for OpenConnection {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Member {
    pub(super) fn new(host: Host, access: Arc<Access>) -> Self {
        let connection = Reconnecting::new(&host.to_string());
        Self { host, access, connection }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    pub(super) fn name(&self) -> &str {
        self.connection.name()
    }

    /// Returns an error if too many calls are in flight.
    pub(super) fn overload(&self) -> Option<StorageError> {
        self.connection.overload()
    }

    /// Sends a call, and returns the response.
    ///
    /// - Waits for a connection until `failover_at`.
    /// - Waits for the response until `deadline`. If the call is idempotent, waits only until
    ///   `failover_at`, so that the caller can try another member.
    ///
    /// The call is retried once on a new connection if it was not sent, or if the member rejected
    /// the token. In both cases the member has not executed it.
    pub(super) async fn call<C: Call>(
        &self,
        call: &C,
        failover_at: Instant,
        deadline: Instant,
    ) -> Result<C::Response, StorageError> {
        let mut is_first = true;
        loop {
            let open = self.open(failover_at).await?;
            let call_deadline = if C::IDEMPOTENT { failover_at } else { deadline };
            let call_in_flight = self.connection.begin(&open, call_deadline).await?;
            let Ok(response) = timeout_at(call_deadline, open.connection.call(call)).await else {
                return Err(StorageError::timed_out(self.name()));
            };
            call_in_flight.answered();
            let error = match response {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            // The connection was closed, or its token is invalid. In both cases the member has not
            // executed the call, so a retry is safe.
            let retries = is_first && (is_unsent(&error) || is_unauthenticated(&error));
            if retries || is_unsent(&error) || error.kind() == StorageErrorKind::ConnectionLost {
                self.connection.give_up(&open, None);
            } else if is_unauthenticated(&error) {
                self.connection.give_up(&open, Some(&error));
            }
            if !retries {
                return Err(error);
            }
            is_first = false;
        }
    }

    /// Returns an open connection. Waits for one until `deadline`.
    async fn open(&self, deadline: Instant) -> Result<Arc<OpenConnection>, StorageError> {
        let connect = || {
            let (host, access) = (self.host.clone(), Arc::clone(&self.access));
            async move {
                let connection = EtcdConnection::open(&host, &access).await?;
                Ok(OpenConnection { connection, calls: Calls::default() })
            }
        };
        self.connection.get(deadline, connect).await
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.connection).finish()
    }
}
