//! A fixed window in one statement, as a program without a library would write it.

use std::error::Error;
use std::str::FromStr;

use deadpool_postgres::tokio_postgres::{Config, NoTls};
use deadpool_postgres::{Manager, Pool};

/// The number of connections in the pool. The storage uses four connections with pipelining.
const CONNECTIONS: usize = 8;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS by_hand (
    key text PRIMARY KEY, hits int8 NOT NULL, until timestamptz NOT NULL
) WITH (fillfactor = 50)";

const STATEMENT: &str = "INSERT INTO by_hand VALUES ($1, 1, now() + interval '1 day')
    ON CONFLICT (key) DO UPDATE SET
        hits = CASE WHEN by_hand.until < now() THEN 1 ELSE by_hand.hits + 1 END,
        until = CASE WHEN by_hand.until < now() THEN now() + interval '1 day' ELSE by_hand.until END
    RETURNING hits, until::text";

#[derive(Clone)]
pub struct ByHand(Pool);

impl ByHand {
    pub async fn new(url: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let config = Config::from_str(url.split('?').next().unwrap_or(url))?;
        let pool = Pool::builder(Manager::new(config, NoTls)).max_size(CONNECTIONS).build()?;
        pool.get().await?.batch_execute(TABLE).await?;
        Ok(Self(pool))
    }

    pub async fn hit(&self, key: u64) -> Result<i64, Box<dyn Error + Send + Sync>> {
        let connection = self.0.get().await?;
        let statement = connection.prepare_cached(STATEMENT).await?;
        let row = connection.query_one(&statement, &[&key.to_string()]).await?;
        Ok(row.try_get(0)?)
    }
}
