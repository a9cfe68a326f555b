//! PostgreSQL: decisions, the table, pools, and faults of the server.

mod backends;
mod decisions;
mod faults;
mod first_connection;
mod locked_row;
mod pgbouncer;
mod plans;
mod pool;
mod table;
mod tls;

use std::time::Duration;

use common::servers::storage::RUNTIME;
use common::servers::{Postgres, with_timeout};
use common::time::{EVENTUALLY, Stopwatch};
use tower_ratelimit::Storage;
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

/// Creates the table. On a busy machine, an attempt to connect may take longer than its second.
async fn migrate(storage: &PostgresStorage) {
    let watch = Stopwatch::start();
    while let Err(error) = storage.migrate().await {
        assert!(format!("{error:#}").contains("took longer") && watch.wall() < EVENTUALLY, "{error:#}");
    }
}

fn storage(server: &Postgres) -> PostgresStorage {
    within(server, LONG)
}

/// A storage with this timeout.
fn within(server: &Postgres, timeout: Duration) -> PostgresStorage {
    PostgresStorage::new(&with_timeout(&server.url(), timeout)).unwrap_or_else(|error| panic!("{error}"))
}

/// A storage with these options.
fn with_options(server: &Postgres, options: &str) -> PostgresStorage {
    PostgresStorage::new(&format!("{}?{options}&timeout={LONG:?}", server.url())).unwrap()
}
