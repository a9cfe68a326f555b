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
use common::servers::storage::RUNTIME;
use tower_ratelimit::storage::PostgresStorage;

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// Returns a storage that is connected. On a busy machine, an attempt to connect may take longer
/// than its second, and the next one succeeds.
fn connected(server: &Postgres) -> PostgresStorage {
    let storage = storage(server);
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    storage
}

fn storage(server: &Postgres) -> PostgresStorage {
    PostgresStorage::new(&server.url()).unwrap_or_else(|error| panic!("{error}")).timeout(LONG)
}
