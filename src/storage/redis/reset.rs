//! Forgetting all keys of a prefix.

use redis::{Value, cmd};
use tokio::time::Instant;

use super::link::Node;
use super::{RedisStorage, RedisStorageError};

/// How many keys the server looks at in one go: it serves others in between.
const AT_ONCE: u32 = 500;

impl RedisStorage {
    /// Deletes all keys of the prefix: of all policies, and of other processes that use it. Returns the
    /// number of keys that were deleted.
    ///
    /// It scans all keys of the server (`SCAN`) in steps, so it is for operators and tests, not for requests.
    /// Each step has a [timeout](Self::deadline) of its own. Hits during the scan can survive.
    ///
    /// # Errors
    ///
    /// Returns an error if a server does not answer in time. Keys that were deleted before stay deleted.
    pub async fn reset(&self) -> Result<u64, RedisStorageError> {
        let mut forgotten = 0;
        for node in self.link.nodes(Instant::now() + self.deadline).await? {
            let mut cursor = "0".to_owned();
            loop {
                let (next, names) = self.scan(&node, &cursor).await?;
                for name in names {
                    // One by one: in a cluster they may be of several slots.
                    let reply = node.run(cmd("UNLINK").arg(name), Instant::now() + self.deadline).await?;
                    forgotten += u64::from(reply == Value::Int(1));
                }
                cursor = next;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(forgotten)
    }

    /// The next place to look at, and the names found at this one.
    async fn scan(&self, node: &Node, cursor: &str) -> Result<(String, Vec<Vec<u8>>), RedisStorageError> {
        // What would be a pattern in the prefix stands for itself.
        let prefix = self.prefix.chars().fold(String::new(), |mut text, c| {
            if matches!(c, '*' | '?' | '[' | ']' | '\\') {
                text.push('\\');
            }
            text.push(c);
            text
        });
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(format!("{prefix}:{{*")).arg("COUNT").arg(AT_ONCE);
        let reply = node.run(&command, Instant::now() + self.deadline).await?;
        let unexpected = || RedisStorageError::unexpected(node.name(), "SCAN answered something else than names");
        let Value::Array(parts) = reply else { return Err(unexpected()) };
        match <[Value; 2]>::try_from(parts) {
            Ok([Value::BulkString(next), Value::Array(names)]) => {
                let name = |value| if let Value::BulkString(name) = value { Some(name) } else { None };
                Ok((String::from_utf8_lossy(&next).into_owned(), names.into_iter().filter_map(name).collect()))
            }
            _ => Err(unexpected()),
        }
    }
}
