//! A statement in flight, which is cancelled in time, even if its caller leaves.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_postgres::{Error, Row};

use super::connection::PostgresConnection;
use super::error::is_cancelled;
use super::table::Query;
use crate::storage::net::{WithCalls, before};

/// The shortest time between two cancel requests of a statement.
const SHORTEST_PATIENCE: Duration = Duration::from_millis(1);

/// The result of a statement. A statement without a result has no row.
pub(super) type Executed = Result<Option<Row>, Error>;

/// Returns the time at which a statement is cancelled. A fifth of its time is left for the reply to
/// the cancel request.
pub(super) fn cancel_at(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + deadline.saturating_duration_since(now) * 4 / 5
}

/// A statement that was sent. If it is dropped before the reply, it continues in a background task
/// until the server has replied or the connection is closed.
pub(super) struct Sent(Option<Pin<Box<dyn Future<Output = Executed> + Send>>>);

impl Sent {
    pub(super) fn new(connection: Arc<WithCalls<PostgresConnection>>, query: Query, deadline: Instant) -> Self {
        let patience = deadline.saturating_duration_since(Instant::now()) / 20;
        Self(Some(Box::pin(execute(connection, query, cancel_at(deadline), patience))))
    }
}

impl Future for Sent {
    type Output = Executed;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Executed> {
        let Some(future) = &mut self.0 else { return Poll::Pending };
        let result = future.as_mut().poll(cx);
        if result.is_ready() {
            self.0 = None;
        }
        result
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

async fn execute(
    connection: Arc<WithCalls<PostgresConnection>>,
    query: Query,
    cancel_at: Instant,
    patience: Duration,
) -> Executed {
    let result = execute_once(&connection, &query, cancel_at, patience).await;
    if result.as_ref().is_err_and(is_cancelled) && Instant::now() < cancel_at {
        // The cancel request was for an earlier statement on the connection.
        return execute_once(&connection, &query, cancel_at, patience).await;
    }
    result
}

/// Executes a statement. From `cancel_at` on, sends cancel requests whenever the connection has had no
/// reply for `patience`. A busy server that replies to other statements is not blocked, and cancel
/// requests would only add to its work.
async fn execute_once(
    connection: &WithCalls<PostgresConnection>,
    query: &Query,
    cancel_at: Instant,
    patience: Duration,
) -> Executed {
    let mut executed = pin!(connection.execute(query));
    if let Ok(result) = timeout_at(cancel_at, &mut executed).await {
        return result;
    }
    loop {
        let cancelled = async {
            let turn = connection.canceller.turn().await;
            if connection.silence() >= patience {
                connection.canceller.cancel(turn);
            } else {
                drop(turn);
            }
            // The server ignores a request that arrives between two statements.
            sleep(patience.max(SHORTEST_PATIENCE)).await;
        };
        if let Some(result) = before(&mut executed, cancelled).await {
            connection.record_sign_of_life();
            return result;
        }
    }
}
