//! Operations for operators: readiness, the deletion of a prefix, and stored states as text.

use redis::{Value, cmd};
use tokio::time::Instant;

use super::link::Node;
use super::script::Scripts;
use super::{RedisStorage, key_names, record};
use crate::key::Key;
use crate::policy::Policy;
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
        Ok(())
    }
}

/// The approximate number of keys that one `SCAN` visits. The server runs other commands between
/// two scans.
const SCAN_COUNT: usize = 500;

impl RedisStorage {
    /// Deletes all keys with the prefix, and returns the number of deleted keys.
    pub(super) async fn delete_all(&self) -> Result<u64, StorageError> {
        let mut deleted = 0;
        match self.delete_each(&mut deleted).await {
            Ok(()) => Ok(deleted),
            Err(error) if deleted > 0 => Err(error.with_may_have_counted(true)),
            Err(error) => Err(error),
        }
    }

    /// Deletes all keys with the prefix, and adds their number to `deleted`, also if it fails.
    async fn delete_each(&self, deleted: &mut u64) -> Result<(), StorageError> {
        let pattern = format!("{}:{{*", key_names::escaped(&self.prefix));
        for node in self.link.nodes(Instant::now() + self.timeout).await? {
            let mut cursor = "0".to_owned();
            loop {
                let (next, names) = self.scan(&node, &cursor, &pattern, SCAN_COUNT).await?;
                for name in names {
                    // One key per command, because a command on several slots fails in a cluster.
                    let reply = node.run(cmd("UNLINK").arg(name), Instant::now() + self.timeout).await?;
                    *deleted += u64::from(reply == Value::Int(1));
                }
                cursor = next;
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Runs one `SCAN`, which visits about `count` keys. Returns the next cursor and the names of the keys
    /// found.
    pub(super) async fn scan(
        &self,
        node: &Node,
        cursor: &str,
        pattern: &str,
        count: usize,
    ) -> Result<(String, Vec<Vec<u8>>), StorageError> {
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(count);
        let reply = node.run(&command, Instant::now() + self.timeout).await?;
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

impl RedisStorage {
    /// Returns the stored states of a key as text, with one line per limit. Use it to inspect a key
    /// by hand.
    ///
    /// A line begins with the limit, as in `1.fixed-window/60000000`, and continues with numbers:
    ///
    /// - The limit is written as its position, its strategy, and its period in microseconds. A
    ///   limit that is not in `policy` is written as its digest in hexadecimal.
    /// - The first number is the instant at which the state expires, in microseconds of Unix time.
    ///   The state may have expired already.
    /// - The section [Keys](Self#keys) describes the other numbers.
    ///
    /// The result is empty if the server has no states of the key. If a strategy of `policy` has no
    /// [script](crate::strategy::Strategy::script), the states are stored under another key, and
    /// are not in the result.
    ///
    /// # Errors
    ///
    /// Returns an error if the server is unreachable, refuses `GET`, or does not reply within the
    /// [timeout](Self#options).
    pub async fn stored_states(&self, policy: &Policy, key: &Key) -> Result<Vec<String>, StorageError> {
        let mut command = cmd("GET");
        command.arg(key_names::states_key(&self.prefix, policy, key));
        match self.link.run(&command, Instant::now() + self.timeout).await.map_err(StorageError::uncounted)? {
            Value::Nil => Ok(Vec::new()),
            Value::BulkString(stored) => Ok(record::lines(policy, &Scripts::digests(policy), &stored)),
            other => Err(super::script::unexpected_reply(&other)),
        }
    }
}
