//! Deletes all keys of a prefix.

use redis::{Value, cmd};
use tokio::time::Instant;

use super::RedisStorage;
use super::link::Node;
use crate::storage::StorageError;

/// The approximate number of keys that one `SCAN` visits. The server runs other commands between
/// two scans.
const SCAN_COUNT: u32 = 500;

impl RedisStorage {
    /// Deletes all keys with the prefix, and returns the number of deleted keys.
    pub(super) async fn delete_all(&self) -> Result<u64, StorageError> {
        let mut deleted = 0;
        for node in self.link.nodes(Instant::now() + self.deadline).await? {
            let mut cursor = "0".to_owned();
            loop {
                let (next, names) = self.scan(&node, &cursor).await?;
                for name in names {
                    // One key per command, because a command on several slots fails in a cluster.
                    let reply = node.run(cmd("UNLINK").arg(name), Instant::now() + self.deadline).await?;
                    deleted += u64::from(reply == Value::Int(1));
                }
                cursor = next;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(deleted)
    }

    /// Runs one `SCAN`. Returns the next cursor and the names of the keys found.
    async fn scan(&self, node: &Node, cursor: &str) -> Result<(String, Vec<Vec<u8>>), StorageError> {
        // Escapes the characters of the prefix that have a meaning in patterns.
        let prefix = self.prefix.chars().fold(String::new(), |mut text, c| {
            if matches!(c, '*' | '?' | '[' | ']' | '\\') {
                text.push('\\');
            }
            text.push(c);
            text
        });
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(format!("{prefix}:{{*")).arg("COUNT").arg(SCAN_COUNT);
        let reply = node.run(&command, Instant::now() + self.deadline).await?;
        let unexpected = || StorageError::unexpected_reply(node.name(), "SCAN did not return a cursor and keys");
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
