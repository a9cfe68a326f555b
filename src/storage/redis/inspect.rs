//! Returns the stored states of a key as text, for operators.

use redis::{Value, cmd};
use tokio::time::Instant;

use super::script::Scripts;
use super::{RedisStorage, keys, record};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::StorageError;

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
    /// - The [guide] describes the other numbers.
    ///
    /// The result is empty if the server has no states of the key. If a strategy of `policy` has no
    /// [script](crate::strategy::Strategy::script), the states are stored under another key, and
    /// are not in the result.
    ///
    /// # Errors
    ///
    /// Returns an error if the server is unreachable, refuses `GET`, or does not reply within the
    /// [timeout](Self::timeout).
    ///
    /// [guide]: Self#keys
    pub async fn stored_states(&self, policy: &Policy, key: &Key) -> Result<Vec<String>, StorageError> {
        let mut command = cmd("GET");
        command.arg(keys::states(&self.prefix, policy, key));
        match self.link.run(&command, Instant::now() + self.deadline).await.map_err(StorageError::uncounted)? {
            Value::Nil => Ok(Vec::new()),
            Value::BulkString(stored) => Ok(record::lines(policy, &Scripts::digests(policy), &stored)),
            other => Err(super::error::unexpected_script_reply(&other)),
        }
    }
}
