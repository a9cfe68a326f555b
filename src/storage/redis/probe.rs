//! Checks that every server that holds keys can run the scripts.

use redis::cmd;
use tokio::time::Instant;

use super::RedisStorage;
use super::combine::Combine;
use crate::storage::StorageError;

const SCRIPT: &str = include_str!("script/probe.lua");

impl RedisStorage {
    /// Runs the commands of the scripts on every server that holds keys, by `EVAL` and by `EVALSHA`.
    /// It uses a temporary key under the prefix.
    pub(super) async fn probe(&self, deadline: Instant) -> Result<(), StorageError> {
        self.link.ping(deadline).await?;
        let name = |number| format!("{}:{{ready {number}}}", self.prefix);
        let hash = redis::Script::new(SCRIPT).get_hash().to_owned();
        for key in self.link.key_on_each(deadline, name).await? {
            // `EVAL` caches the script, so `EVALSHA` finds it.
            for (command, script) in [("EVAL", SCRIPT), ("EVALSHA", &*hash)] {
                self.link.run(cmd(command).arg(script).arg(1).arg(&key), deadline).await?;
            }
        }
        if self.combine == Combine::OnSingleServer {
            self.link.prove_single_server(&self.prefix, deadline).await;
        }
        Ok(())
    }
}
