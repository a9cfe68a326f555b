//! What a storage is asked, done on the server: by a script in one trip, or by comparing and swapping.

use std::pin::Pin;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::script::{Call, GRACE};
use super::swap::{self, Loaded, Swapped};
use super::{RedisStorage, RedisStorageError, keys, reply};
use crate::storage::{Ask, Storage};
use crate::strategy::State;
use crate::{Decision, Key, Op, Policy, Timestamp};

type Later<T> = Pin<Box<dyn Future<Output = Result<T, RedisStorageError>> + Send>>;

impl Storage for RedisStorage {
    type Error = RedisStorageError;
    type Decided = Later<Decision>;
    type Done = Later<()>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        let call = self.scripts.decide(&self.prefix, ask, self.now());
        let (storage, policy, key, op, cost) = (self.clone(), ask.policy.clone(), ask.key.clone(), ask.op, ask.cost);
        Box::pin(async move {
            let ask = Ask::new(&policy, &key, op, cost);
            let deadline = Instant::now() + storage.deadline;
            match call {
                Some(call) => {
                    let answer = storage.call(&call, deadline).await?;
                    reply::decision(ask, &answer).ok_or_else(|| unexpected(&answer))
                }
                None => storage.decide_by_swapping(ask, deadline).await,
            }
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let call = self.scripts.clear(&self.prefix, policy, key, self.now());
        let (storage, policy, key) = (self.clone(), policy.clone(), key.clone());
        Box::pin(async move {
            let deadline = Instant::now() + storage.deadline;
            if let Some(call) = call {
                return storage.call(&call, deadline).await.map(drop);
            }
            let clear = |states: &mut [State], _| states.fill(State::Fresh);
            let (done, _) = storage.swap(&policy, &key, deadline, clear).await?;
            done.ok_or_else(|| {
                RedisStorageError::unexpected("the server", "others changed the key all the time: it is not forgotten")
            })
        })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        let call = self.scripts.refund(&self.prefix, policy, key, self.now(), decision);
        let (storage, policy, key, decision) = (self.clone(), policy.clone(), key.clone(), decision.clone());
        Box::pin(async move {
            let deadline = Instant::now() + storage.deadline;
            if decision.is_refused() || decision.cost() == 0 {
                return Ok(());
            }
            if let Some(call) = call {
                return storage.call(&call, deadline).await.map(drop);
            }
            let refund = |states: &mut [State], now| policy.refund(states, now, &decision);
            let (done, _) = storage.swap(&policy, &key, deadline, refund).await?;
            done.ok_or_else(|| {
                RedisStorageError::unexpected(
                    "the server",
                    "others changed the key all the time: the hit is not given back",
                )
            })
        })
    }
}

impl RedisStorage {
    /// The time, where it is not the server's.
    fn now(&self) -> Option<Timestamp> {
        self.clock.as_ref().map(|clock| clock.now())
    }

    /// Runs the script, which the server may not know yet. What it does not know it has not run.
    async fn call(&self, call: &Call, deadline: Instant) -> Result<Value, RedisStorageError> {
        match self.link.run(&call.by_hash(), deadline).await {
            Err(error) if error.is_no_script() => self.link.run(&call.whole(), deadline).await,
            other => other,
        }
    }

    async fn decide_by_swapping(&self, ask: Ask<'_>, deadline: Instant) -> Result<Decision, RedisStorageError> {
        let Ask { policy, key, op, cost, .. } = ask;
        let decide = |states: &mut [State], now| policy.decide(states, now, op, cost);
        if op == Op::Peek {
            let loaded = self.load(&self.swapped(policy, key), deadline).await?;
            return Ok(decide(&mut loaded.states(policy), self.at(&loaded)));
        }
        let (decided, now) = self.swap(policy, key, deadline, decide).await?;
        Ok(decided.unwrap_or_else(|| policy.refuse(now, cost, swap::COME_BACK).contended()))
    }

    /// Changes the states of a key, if nobody else does so all the time, or until shortly before the deadline; what `change`
    /// answered, and when.
    async fn swap<T>(
        &self,
        policy: &Policy,
        key: &Key,
        deadline: Instant,
        mut change: impl FnMut(&mut [State], Timestamp) -> T,
    ) -> Result<(Option<T>, Timestamp), RedisStorageError> {
        let name = self.swapped(policy, key);
        let mut loaded = self.load(&name, deadline).await?;
        let mut slowest = Duration::ZERO;
        for attempt in 0..swap::ATTEMPTS {
            let now = self.at(&loaded);
            let mut states = loaded.states(policy);
            let answer = change(&mut states, now);
            let Some(command) = loaded.swap(&name, policy, &states, now, GRACE) else { return Ok((Some(answer), now)) };
            let asked_at = Instant::now();
            let value = self.link.run(&command, deadline).await?;
            slowest = slowest.max(asked_at.elapsed());
            match swap::answer(value) {
                Ok(Swapped::Stored) => return Ok((Some(answer), now)),
                Ok(Swapped::Lost(newer)) => loaded = newer,
                Err(value) => return Err(unexpected(&value)),
            }
            let pause = swap::pause(attempt);
            // The server has answered, so that there is no time for another attempt is contention too, and no failure of its.
            if Instant::now() + pause + 2 * slowest >= deadline {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        Ok((None, self.at(&loaded)))
    }

    async fn load(&self, name: &str, deadline: Instant) -> Result<Loaded, RedisStorageError> {
        match swap::answer(self.link.run(&swap::load(name), deadline).await?) {
            Ok(Swapped::Lost(loaded)) => Ok(loaded),
            Ok(Swapped::Stored) => Err(unexpected(&Value::Int(1))),
            Err(value) => Err(unexpected(&value)),
        }
    }

    fn at(&self, loaded: &Loaded) -> Timestamp {
        self.now().unwrap_or(loaded.now)
    }

    fn swapped(&self, policy: &Policy, key: &Key) -> String {
        keys::swapped(&keys::states(&self.prefix, policy, key))
    }
}

fn unexpected(answer: &Value) -> RedisStorageError {
    RedisStorageError::unexpected("the server", format!("the script answered {answer:?}"))
}
