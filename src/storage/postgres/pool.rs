//! The connections of the program's pool.

use std::pin::{Pin, pin};

use deadpool_postgres::{Object, Pool, PoolError, Status};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::NoTls;

use super::call::{Executed, cancel_at};
use super::cancel::CLOSES_WITHIN;
use super::error::{self, PRODUCT, PostgresCause};
use super::table::{Query, StatesTable};
use crate::storage::net::{CONNECT_WITHIN, Gauge};
use crate::storage::{StorageError, StorageErrorKind};

/// A pool that lends its connections to one statement at a time.
#[derive(Clone)]
pub(super) struct Lender {
    pool: Pool,
    /// The connections that the pool opens although their callers have left.
    opening: Gauge,
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
struct Lent(Option<Object>);

impl Lender {
    pub(super) fn new(pool: Pool) -> Self {
        Self { pool, opening: Gauge::default() }
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
        let object = self.connection(deadline).await?;
        let mut lent = Lent(Some(object));
        let (result, is_idle) = lent.execute(table, query, deadline).await?;
        if is_idle {
            lent.0 = None;
        }
        Ok(result)
    }

    /// Executes statements without a timeout.
    pub(super) async fn batch_execute(&self, sql: &str) -> Result<(), StorageError> {
        let mut lent = Lent(None);
        let executed = lent.0.insert(self.pool.get().await.map_err(of_pool)?).batch_execute(sql).await;
        lent.0 = None;
        executed.map_err(|error| error::of_statement(PRODUCT, error))
    }
}

impl Lent {
    /// Executes a statement. Returns its result, and `false` if a cancel request may arrive later.
    async fn execute(
        &self,
        table: &StatesTable,
        query: &Query,
        deadline: Instant,
    ) -> Result<(Executed, bool), StorageError> {
        let Some(object) = &self.0 else { return Err(StorageError::timed_out(PRODUCT)) };
        let sql = table.sql(query.statement);
        let mut executed = pin!(async {
            let prepared = object.prepare_cached(&sql).await?;
            object.query_opt(&prepared, &query.params()).await
        });
        if let Ok(result) = timeout_at(cancel_at(deadline), &mut executed).await {
            return Ok((result, true));
        }
        cancel(object);
        let result = timeout_at(deadline, executed).await.map_err(|_| StorageError::timed_out(PRODUCT))?;
        let is_cancelled = result.as_ref().is_err_and(error::is_cancelled);
        Ok((result, is_cancelled))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            cancel(&object);
            drop(Object::take(object));
        }
    }
}

/// Sends a cancel request in a background task. It has no effect if the server requires TLS, because
/// the pool's TLS settings are unknown.
fn cancel(object: &tokio_postgres::Client) {
    let token = object.cancel_token();
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(async move {
            let _ = timeout(CLOSES_WITHIN, token.cancel_query(NoTls)).await;
        });
    }
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
