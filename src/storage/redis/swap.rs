//! Compare and swap, for policies with a strategy that the server cannot run: the states are loaded, decided on here, and
//! stored if nobody else has stored meanwhile.

use std::time::Duration;

use redis::{Cmd, Value, cmd};

use crate::storage::text;
use crate::strategy::State;
use crate::{Policy, Timestamp};

/// How often it is tried before a hit is refused as contended.
pub(super) const ATTEMPTS: u32 = 24;

/// When a contended hit had better come back, in microseconds.
pub(super) const COME_BACK: u64 = 20_000;

/// Stores the second argument in place of the first, for as many milliseconds as the third says; without arguments it only
/// looks. Answers whether it has stored, the server's time, and what stands there otherwise.
const SCRIPT: &str = "\
local stored = redis.pcall('GET', KEYS[1])
if type(stored) ~= 'string' then stored = '' end
if ARGV[1] and stored == ARGV[1] then
  if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
  return { 1, 0, '' }
end
local time = redis.call('TIME')
return { 0, time[1] * 1000000 + time[2], stored }";

/// What stood there, and when.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) now: Timestamp,
    /// As it stands there, whatever it is: it is to be compared with.
    stored: Vec<u8>,
}

/// What became of an attempt to store.
#[derive(Debug)]
pub(super) enum Swapped {
    Stored,
    /// Somebody else has stored this.
    Lost(Loaded),
}

pub(super) fn load(key: &str) -> Cmd {
    let mut command = cmd("EVAL");
    command.arg(SCRIPT).arg(1).arg(key);
    command
}

impl Loaded {
    pub(super) fn states(&self, policy: &Policy) -> Vec<State> {
        text::read(policy, &String::from_utf8_lossy(&self.stored))
    }

    /// Stores these states in place of what was loaded; `None` when they are the same.
    pub(super) fn swap(&self, key: &str, policy: &Policy, states: &[State], now: Timestamp, grace: u32) -> Option<Cmd> {
        let (text, until) = text::write(policy, states, &String::from_utf8_lossy(&self.stored), now);
        if text.as_bytes() == self.stored {
            return None;
        }
        let keep = until.since(now).div_ceil(1_000) + u64::from(grace);
        let mut command = load(key);
        command.arg(&self.stored).arg(text).arg(keep);
        Some(command)
    }
}

/// What the script answered; given back when that cannot be.
pub(super) fn answer(value: Value) -> Result<Swapped, Value> {
    let Value::Array(values) = &value else { return Err(value) };
    match values.as_slice() {
        [Value::Int(1), ..] => Ok(Swapped::Stored),
        [Value::Int(0), Value::Int(now), Value::BulkString(text)] => {
            let now = Timestamp::from_micros(u64::try_from(*now).unwrap_or(0));
            Ok(Swapped::Lost(Loaded { now, stored: text.clone() }))
        }
        _ => Err(value),
    }
}

/// How long to wait before the next attempt: a little longer each time, and not as long as others do.
pub(super) fn pause(attempt: u32) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let most = 200_u64 << attempt.min(6);
    Duration::from_micros(RandomState::new().hash_one(attempt) % most)
}
