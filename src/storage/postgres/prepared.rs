//! The prepared statement of one kind on a connection.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::{Client, Error, Statement};

use crate::sync::unpoisoned;

/// The time after which a statement is prepared again.
///
/// After five executions, the server keeps one plan, made for the size of the table at that moment. For
/// a table of a few rows the plan reads the whole table, and it stays until the table is analyzed, about
/// once a minute. Meanwhile a flood of new keys makes each hit read all rows.
const PLANNED_FOR: Duration = Duration::from_secs(1);

/// A statement that is prepared when it is first used, because that waits for locks on the table.
#[derive(Default)]
pub(super) struct Prepared(Mutex<Option<(Statement, Instant)>>);

impl Prepared {
    /// Returns the statement. Prepares it if the last preparation is [`PLANNED_FOR`] ago.
    pub(super) async fn get(&self, client: &Client, sql: impl FnOnce() -> String) -> Result<Statement, Error> {
        if let Some(statement) = self.recent(Instant::now()) {
            return Ok(statement);
        }
        let statement = client.prepare(&sql()).await?;
        *unpoisoned(self.0.lock()) = Some((statement.clone(), Instant::now()));
        Ok(statement)
    }

    /// Returns the statement if its plan is recent. If it is not, one caller gets nothing, and the
    /// others use the statement meanwhile.
    fn recent(&self, now: Instant) -> Option<Statement> {
        let mut prepared = unpoisoned(self.0.lock());
        let (statement, since) = prepared.as_mut()?;
        if now.saturating_duration_since(*since) < PLANNED_FOR {
            return Some(statement.clone());
        }
        *since = now;
        None
    }
}
