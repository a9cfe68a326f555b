//! One member of the cluster.

use std::fmt;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::super::error::EtcdStorageError;
use super::super::url::Access;
use super::super::wire::Call;
use super::connection::Connection;
use crate::storage::net::{Calls, Connected, Reconnecting, Usable};
use crate::storage::url::Host;

pub(super) struct Member {
    host: Host,
    access: Arc<Access>,
    open: Arc<Reconnecting<Open, EtcdStorageError>>,
}

/// A connection in use.
struct Open {
    connection: Connection,
    calls: Calls,
}

impl Usable for Open {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Connected for Open {
    fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl Member {
    pub(super) fn new(host: Host, access: Arc<Access>) -> Self {
        let open = Reconnecting::new(&host.to_string());
        Self { host, access, open }
    }

    pub(super) fn name(&self) -> &str {
        self.open.name()
    }

    /// Returns the error of a call that does not fit at the moment.
    pub(super) fn overload(&self) -> Option<EtcdStorageError> {
        self.open.overload()
    }

    /// The answer to a call, which waits for a connection until `patience`, and for the answer until `deadline`, or no longer than
    /// `patience` either if it may be repeated.
    ///
    /// It is sent once, unless the member says that it has not executed it since it does not know us any more.
    pub(super) async fn ask<C: Call>(
        &self,
        call: &C,
        patience: Instant,
        deadline: Instant,
    ) -> Result<C::Answer, EtcdStorageError> {
        let mut first = true;
        loop {
            let open = self.open(patience).await?;
            let by = if C::REPEATABLE { patience } else { deadline };
            let call_in_flight = self.open.begin(&open, by).await?;
            let Ok(answer) = timeout_at(by, open.connection.ask(call)).await else {
                return Err(EtcdStorageError::silent(self.name()));
            };
            call_in_flight.answered();
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // The connection was closed before anything was sent on it, or its login is no more: another one will do.
            let again = first && (error.is_unsent() || error.is_of_the_login());
            if again || error.is_unsent() || error.is_lost() {
                self.open.give_up(&open, None);
            } else if error.is_of_the_login() {
                self.open.give_up(&open, Some(&error));
            }
            if !again {
                return Err(error);
            }
            first = false;
        }
    }

    async fn open(&self, deadline: Instant) -> Result<Arc<Open>, EtcdStorageError> {
        let connect = || {
            let (host, access) = (self.host.clone(), Arc::clone(&self.access));
            async move {
                let connection = Connection::open(&host, &access).await?;
                Ok(Open { connection, calls: Calls::default() })
            }
        };
        self.open.get(deadline, connect).await
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.open).finish()
    }
}
