//! PostgreSQL: decisions, the table, pools, and faults of the server.

mod backends;
mod decisions;
mod faults;
mod locked_row;
mod pgbouncer;
mod pool;
mod table;
mod tls;

use std::time::Duration;

use common::servers::Postgres;
use tower_ratelimit::storage::PostgresStorage;

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(20);

fn storage(server: &Postgres) -> PostgresStorage {
    PostgresStorage::new(&server.url()).unwrap_or_else(|error| panic!("{error}")).deadline(LONG)
}
