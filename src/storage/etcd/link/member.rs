//! One member of the cluster.

use std::fmt;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::super::error::EtcdStorageError;
use super::super::url::Access;
use super::super::wire::Call;
use super::connection::Connection;
use crate::storage::link::{Renewed, Silences, Usable};
use crate::storage::url::Host;

pub(super) struct Member {
    host: Host,
    access: Arc<Access>,
    open: Arc<Renewed<Open, EtcdStorageError>>,
}

/// A connection in use.
struct Open {
    connection: Connection,
    silences: Silences,
}

impl Usable for Open {
    fn is_usable(&self) -> bool {
        !self.connection.is_closed()
    }
}

impl Member {
    pub(super) fn new(host: Host, access: Arc<Access>) -> Self {
        let open = Renewed::new(&host.to_string());
        Self { host, access, open }
    }

    pub(super) fn name(&self) -> &str {
        self.open.name()
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
            let asked_at = Instant::now();
            let by = if C::REPEATABLE { patience } else { deadline };
            let half = asked_at + by.saturating_duration_since(asked_at) / 2;
            let mut silence = Silence { of: self, open: &open, asked_at, half, over: false };
            let Ok(answer) = timeout_at(by, open.connection.ask(call)).await else {
                return Err(EtcdStorageError::silent(self.name()));
            };
            silence.over = true;
            let error = match answer {
                Ok(answer) => {
                    open.silences.end();
                    return Ok(answer);
                }
                Err(error) => error,
            };
            // The connection was closed before anything was sent on it, or its login is no more: another one will do.
            let again = first && (error.is_unsent() || error.is_of_the_login());
            if again || error.is_unsent() || error.is_lost() {
                self.open.give_up(&open, None);
            } else if error.is_of_the_login() {
                self.open.give_up(&open, Some(&error));
            } else {
                open.silences.end();
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
                Ok(Open { connection, silences: Silences::default() })
            }
        };
        self.open.get(deadline, connect).await
    }
}

/// A call without an answer, which counts when it is over: also when somebody else has looked at the clock, and dropped it.
struct Silence<'a> {
    of: &'a Member,
    open: &'a Arc<Open>,
    asked_at: Instant,
    half: Instant,
    /// Something was heard.
    over: bool,
}

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        // Who was told to wait for little only, or had hardly begun to, knows nothing of the member.
        if !self.over && Instant::now() >= self.half && self.open.silences.is_enough(self.asked_at) {
            self.of.open.give_up(self.open, None);
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.open).finish()
    }
}
