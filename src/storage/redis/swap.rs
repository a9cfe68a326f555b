//! Compare-and-swap, for policies with a strategy that has no script.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, Value, cmd};

use super::key_names;
use super::link::Link;
use super::script::unexpected_reply;
use crate::storage::{Cas, CasStorage, Clock, Loaded, StorageError, Swapped};
use crate::time::Timestamp;

/// Replaces the value of a key if it equals the first argument, and otherwise returns the value.
///
/// | argument | meaning |
/// |---|---|
/// | 1 | the expected value; without arguments, the script only returns the value |
/// | 2 | the new value, or empty to delete the key |
/// | 3 | the time to live in milliseconds |
///
/// The reply is `{ 1, 0, '' }` after a swap. Otherwise it is `{ 0, TIME, VALUE }`, with the
/// server's time in microseconds.
const SCRIPT: &str = concat!(
    include_str!("script/forgive.lua"),
    "\
local stored = forgive('GET', KEYS[1]) or ''
if ARGV[1] and stored == ARGV[1] then
  if ARGV[2] == '' then redis.call('UNLINK', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
  return { 1, 0, '' }
end
local time = redis.call('TIME')
return { 0, time[1] * 1000000 + time[2], stored }"
);

/// The longest string that Redis stores, in bytes.
const LONGEST_STRING: usize = 512 << 20;

/// A store for [`Cas`]. One value contains all states of a policy and key.
#[derive(Clone, Debug)]
pub(super) struct SwapStore {
    link: Link,
    prefix: Arc<str>,
}

/// Creates the compare-and-swap storage on these servers.
pub(super) fn cas(link: &Link, prefix: &Arc<str>, timeout: Duration, clock: Option<Arc<dyn Clock>>) -> Cas<SwapStore> {
    let store = SwapStore { link: link.clone(), prefix: Arc::clone(prefix) };
    let cas = Cas::new(store).metrics_label(super::LABEL).timeout(timeout);
    match clock {
        Some(clock) => cas.clock(clock),
        None => cas,
    }
}

impl CasStorage for SwapStore {
    type Error = StorageError;
    /// The value's bytes. They may have been written by another program, and need not be UTF-8.
    type Version = Vec<u8>;

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<Vec<u8>>, StorageError> {
        match self.run(&self.command(key), deadline).await.map_err(StorageError::uncounted)? {
            Swapped::Lost(Some(loaded)) => Ok(loaded),
            Swapped::Lost(None) | Swapped::Stored => Err(unexpected_reply(&Value::Int(1))),
        }
    }

    fn max_text_len(&self) -> Option<usize> {
        Some(LONGEST_STRING)
    }

    async fn swap(
        &self,
        key: &str,
        version: &Vec<u8>,
        text: &str,
        time_to_live: Duration,
        deadline: Instant,
    ) -> Result<Swapped<Vec<u8>>, StorageError> {
        let mut command = self.command(key);
        command.arg(version).arg(text).arg(u64::try_from(time_to_live.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX));
        self.run(&command, deadline).await
    }
}

impl SwapStore {
    fn command(&self, key: &str) -> Cmd {
        let mut command = cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg(key_names::cas_key(&format!("{}:{{{key}}}", self.prefix)));
        command
    }

    async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Swapped<Vec<u8>>, StorageError> {
        let value = self.link.run(command, deadline.into()).await?;
        let Value::Array(values) = &value else { return Err(unexpected_reply(&value)) };
        match values.as_slice() {
            [Value::Int(1), ..] => Ok(Swapped::Stored),
            [Value::Int(0), Value::Int(now), Value::BulkString(stored)] => {
                let now = Some(Timestamp::from_micros(u64::try_from(*now).unwrap_or(0)));
                let text = String::from_utf8_lossy(stored).into_owned();
                Ok(Swapped::Lost(Some(Loaded { text, version: stored.clone(), now })))
            }
            _ => Err(unexpected_reply(&value)),
        }
    }
}
