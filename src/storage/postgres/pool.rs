//! The connections of the program's pool.

use std::pin::{Pin, pin};

use deadpool_postgres::{ClientWrapper, Object, Pool, PoolError, Status};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::{CancelToken, NoTls};

use super::call::{Executed, cancel_at};
use super::cancel::CLOSES_WITHIN;
use super::error::{self, PRODUCT, PostgresCause};
use super::table::{Query, StatesTable};
use crate::storage::net::{CONNECT_WITHIN, Gauge};
use crate::storage::{StorageError, StorageErrorKind};

/// A pool that lends its connections to one statement at a time.
///
/// The server has at most one connection more than the pool's maximum: a statement that is not cancelled,
/// for example because the pool requires TLS, occupies its connection until the server replies. Those
/// that the server is about to close do not count: connections that have replied, and logins that were
/// given up.
#[derive(Clone)]
pub(super) struct Lender {
    pool: Pool,
    /// The connections that the pool opens although their callers have left.
    opening: Gauge,
    /// The connections that the pool may replace although the server still executes their statements.
    replaced: Gauge,
}

/// The request of a caller to the pool. The pool opens a connection in the future that asks for one, so
/// a caller that leaves gives the future to a background task: a login that takes longer than the
/// timeout of a call is not in vain.
struct Asking<'a> {
    lender: &'a Lender,
    /// `None` when the pool has replied.
    reply: Option<Pin<Box<PoolReply>>>,
}

type PoolReply = dyn Future<Output = Result<Object, PoolError>> + Send;

/// A connection of the pool with a statement in flight. If it is dropped without a reply, the
/// statement is cancelled, and the connection is removed from the pool, which would lend it to other
/// callers.
struct Lent<'a> {
    lender: &'a Lender,
    /// `None` after the reply.
    object: Option<Object>,
}

/// A connection whose statement was given up. The pool has no other one in its place until the server has
/// replied.
struct Abandoned(Option<Object>);

impl Lender {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, opening: Gauge::default(), replaced: Gauge::default() }
    }

    pub(super) fn status(&self) -> Status {
        self.pool.status()
    }

    async fn connection(&self, deadline: Instant) -> Result<Object, StorageError> {
        let pool = self.pool.clone();
        let mut asking = Asking { lender: self, reply: None };
        let reply = asking.reply.insert(Box::pin(async move { pool.get().await }));
        let Ok(replied) = timeout_at(deadline, reply).await else {
            let message =
                "no connection from the pool within the timeout: all are in use, or the server cannot be reached";
            return Err(StorageError::new(StorageErrorKind::Timeout, message).uncounted());
        };
        asking.reply = None;
        replied.map_err(of_pool)
    }

    /// Executes a statement, and returns its row.
    pub(super) async fn execute(
        &self,
        table: &StatesTable,
        query: &Query,
        deadline: Instant,
    ) -> Result<Executed, StorageError> {
        let mut lent = Lent { lender: self, object: Some(self.connection(deadline).await?) };
        let (result, is_idle) = lent.execute(table, query, deadline).await?;
        if is_idle {
            lent.object = None;
        }
        Ok(result)
    }

    /// Executes statements without a timeout.
    pub(super) async fn batch_execute(&self, sql: &str) -> Result<(), StorageError> {
        let mut lent = Lent { lender: self, object: None };
        let executed = lent.object.insert(self.pool.get().await.map_err(of_pool)?).batch_execute(sql).await;
        lent.object = None;
        executed.map_err(|error| error::of_statement(PRODUCT, error))
    }
}

impl Lent<'_> {
    /// Executes a statement. Returns its result, and `false` if a cancel request may arrive later.
    async fn execute(
        &self,
        table: &StatesTable,
        query: &Query,
        deadline: Instant,
    ) -> Result<(Executed, bool), StorageError> {
        let Some(object) = &self.object else { return Err(StorageError::timed_out(PRODUCT)) };
        let sql = table.sql(query.statement);
        let mut executed = pin!(async {
            let prepared = object.prepare_cached(&sql).await?;
            object.query_opt(&prepared, &query.params()).await
        });
        if let Ok(result) = timeout_at(cancel_at(deadline), &mut executed).await {
            return Ok((result, true));
        }
        let token = object.cancel_token();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(cancel(token));
        }
        let result = timeout_at(deadline, executed).await.map_err(|_| StorageError::timed_out(PRODUCT))?;
        let is_cancelled = result.as_ref().is_err_and(error::is_cancelled_by_request);
        Ok((result, is_cancelled))
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let Some(object) = self.object.take() else { return };
        let abandoned = Abandoned(Some(object));
        let Ok(runtime) = Handle::try_current() else { return };
        // The server may have died without closing its connections. So one of them is replaced at once.
        let replaced = self.lender.replaced.enter(1, 1);
        runtime.spawn(async move {
            if let Some(replaced) = replaced {
                let client = abandoned.take();
                if let Some(client) = &client {
                    end(client).await;
                }
                drop((client, replaced));
            } else if let Some(object) = &abandoned.0 {
                end(object).await;
            }
        });
    }
}

impl Abandoned {
    /// Removes the connection from the pool.
    fn take(mut self) -> Option<ClientWrapper> {
        self.0.take().map(Object::take)
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}

/// Cancels the statement of a connection, and waits until the server has replied to it.
async fn end(client: &tokio_postgres::Client) {
    let ended = async {
        cancel(client.cancel_token()).await;
        // The server replies in order.
        client.simple_query("").await
    };
    let _ = timeout(CLOSES_WITHIN, ended).await;
}

/// Sends a cancel request. It has no effect if the server requires TLS, because the pool's TLS settings
/// are unknown.
async fn cancel(token: CancelToken) {
    let _ = timeout(CLOSES_WITHIN, token.cancel_query(NoTls)).await;
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let (Some(reply), Ok(runtime)) = (self.reply.take(), Handle::try_current()) else { return };
        // If all connections are open, the caller has waited for one of them. Otherwise, those that
        // asked first are those for which the pool opens connections.
        let Status { size, max_size, .. } = self.lender.status();
        if size >= max_size {
            return;
        }
        let Some(counted) = self.lender.opening.enter(1, max_size) else { return };
        runtime.spawn(async move {
            let _ = timeout(CONNECT_WITHIN, reply).await;
            drop(counted);
        });
    }
}

fn of_pool(error: PoolError) -> StorageError {
    match error {
        PoolError::Backend(error) => StorageError::unreachable(PRODUCT, PostgresCause(error)),
        PoolError::Timeout(_) => {
            let message = "no connection from the pool within the pool's timeout";
            StorageError::new(StorageErrorKind::Timeout, message).uncounted()
        }
        other => StorageError::unreachable(PRODUCT, other),
    }
}
