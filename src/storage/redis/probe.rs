//! Finds out before traffic does whether the scripts may run, on every server that holds keys.

use redis::cmd;
use tokio::time::Instant;

use super::{RedisStorage, RedisStorageError};

const SCRIPT: &str = include_str!("script/probe.lua");

impl RedisStorage {
    /// Runs each command of the scripts once on every server, on a key under the prefix that is removed again.
    pub(super) async fn probe(&self, deadline: Instant) -> Result<(), RedisStorageError> {
        self.link.look(deadline).await?;
        let name = |number| format!("{}:{{ready {number}}}", self.prefix);
        let hash = redis::Script::new(SCRIPT).get_hash().to_owned();
        for key in self.link.name_on_each(deadline, name).await? {
            // The first one brings the script along, for the second one.
            for (command, script) in [("EVAL", SCRIPT), ("EVALSHA", &*hash)] {
                self.link.run(cmd(command).arg(script).arg(1).arg(&key), deadline).await?;
            }
        }
        Ok(())
    }
}
