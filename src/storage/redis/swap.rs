//! Compare and swap, for policies with a strategy that the server cannot run.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::time::Instant;

use super::link::Link;
use super::{RedisStorageError, keys, size};
use crate::Timestamp;
use crate::storage::{Cas, CasError, CasStorage, Clock, Loaded, Swapped};

/// Stores the second argument in place of the first, for as many milliseconds as the third says; without arguments it only
/// looks. Answers whether it has stored, the server's time, and what stands there otherwise.
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

/// Where all states of a policy stand in one text.
#[derive(Clone, Debug)]
pub(super) struct Swapping {
    link: Link,
    prefix: Arc<str>,
    deadline: Duration,
}

/// The storage that swaps on these servers.
pub(super) fn on(link: &Link, prefix: &Arc<str>, deadline: Duration, clock: Option<Arc<dyn Clock>>) -> Cas<Swapping> {
    // A little sooner than who waits gives up: then the link hears of the silence, and tells whose it was.
    let store = Swapping { link: link.clone(), prefix: Arc::clone(prefix), deadline: deadline * 15 / 16 };
    let cas = Cas::new(store).deadline(deadline);
    match clock {
        Some(clock) => cas.clock(clock),
        None => cas,
    }
}

impl CasStorage for Swapping {
    type Error = RedisStorageError;
    /// What stands there, as it is: it need not be text of ours, nor text.
    type Version = Vec<u8>;

    async fn load(&self, key: &str) -> Result<Loaded<Vec<u8>>, RedisStorageError> {
        match self.run(&self.command(key)).await.map_err(RedisStorageError::of_a_look)? {
            Swapped::Lost(Some(loaded)) => Ok(loaded),
            Swapped::Lost(None) | Swapped::Stored => Err(unexpected(&Value::Int(1))),
        }
    }

    fn longest(&self) -> Option<usize> {
        Some(size::LONGEST_STRING)
    }

    async fn swap(
        &self,
        key: &str,
        version: &Vec<u8>,
        text: &str,
        keep: Duration,
    ) -> Result<Swapped<Vec<u8>>, RedisStorageError> {
        let mut command = self.command(key);
        command.arg(version).arg(text).arg(u64::try_from(keep.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX));
        self.run(&command).await
    }
}

impl Swapping {
    fn command(&self, key: &str) -> Cmd {
        let mut command = cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg(keys::swapped(&format!("{}:{{{key}}}", self.prefix)));
        command
    }

    async fn run(&self, command: &Cmd) -> Result<Swapped<Vec<u8>>, RedisStorageError> {
        let value = self.link.run(command, Instant::now() + self.deadline).await?;
        let Value::Array(values) = &value else { return Err(unexpected(&value)) };
        match values.as_slice() {
            [Value::Int(1), ..] => Ok(Swapped::Stored),
            [Value::Int(0), Value::Int(now), Value::BulkString(stored)] => {
                let now = Some(Timestamp::from_micros(u64::try_from(*now).unwrap_or(0)));
                let text = String::from_utf8_lossy(stored).into_owned();
                Ok(Swapped::Lost(Some(Loaded { text, version: stored.clone(), now })))
            }
            _ => Err(unexpected(&value)),
        }
    }
}

fn unexpected(answer: &Value) -> RedisStorageError {
    RedisStorageError::unexpected("the server", format!("the script answered {answer:?}"))
}

/// What swapping failed with, in the words of this storage.
pub(super) fn failed(error: &CasError) -> RedisStorageError {
    use std::error::Error;
    if let Some(servers) = error.source().and_then(<dyn Error>::downcast_ref::<RedisStorageError>) {
        return servers.clone();
    }
    if error.is_timeout() {
        return RedisStorageError::late("the server", error.may_have_counted());
    }
    RedisStorageError::undecided(error.clone(), error.may_have_counted())
}
