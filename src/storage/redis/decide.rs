//! What a storage is asked, done on the server: by a script in one trip, or by comparing and swapping.

use std::pin::Pin;

use redis::Value;
use tokio::time::Instant;

use super::script::{Call, Scripts};
use super::{RedisStorage, RedisStorageError, reply, size, swap};
use crate::storage::net::overloaded;
use crate::storage::{Storage, StorageRequest};
use crate::{ConfigError, Decision, Key, Policy, Timestamp};

type Later<T> = Pin<Box<dyn Future<Output = Result<T, RedisStorageError>> + Send>>;

impl Storage for RedisStorage {
    type Error = RedisStorageError;
    type DecideFuture = Later<Decision>;
    type UpdateFuture = Later<()>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        if let Err(error) = size::check(ask.policy) {
            return Box::pin(async { Err(RedisStorageError::undecided(error, false)) });
        }
        if let Some(error) = self.link.overload() {
            return Box::pin(overloaded(error, self.deadline));
        }
        let Some(call) = self.scripts.decide(&self.prefix, ask, self.now()) else {
            let decided = self.swapping.decide(ask);
            return Box::pin(async { decided.await.map_err(|error| swap::failed(&error)) });
        };
        let (storage, policy, key, op, cost) = (self.clone(), ask.policy.clone(), ask.key.clone(), ask.op, ask.cost);
        Box::pin(async move {
            let ask = StorageRequest::new(&policy, &key, op, cost);
            let answer = storage.call(&call, Instant::now() + storage.deadline).await?;
            reply::decision(ask, call.told(), &answer)
                .ok_or_else(|| RedisStorageError::unexpected("the server", format!("the script answered {answer:?}")))
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        let Some(call) = self.scripts.clear(&self.prefix, policy, key, self.now()) else {
            let done = self.swapping.clear(policy, key);
            return Box::pin(async { done.await.map_err(|error| swap::failed(&error)) });
        };
        let storage = self.clone();
        Box::pin(async move { storage.call(&call, Instant::now() + storage.deadline).await.map(drop) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        let Some(call) = self.scripts.refund(&self.prefix, policy, key, self.now(), decision) else {
            let done = self.swapping.refund(policy, key, decision);
            return Box::pin(async { done.await.map_err(|error| swap::failed(&error)) });
        };
        let (storage, takes_nothing) = (self.clone(), decision.is_refused() || decision.cost() == 0);
        Box::pin(async move {
            if takes_nothing {
                return Ok(());
            }
            storage.call(&call, Instant::now() + storage.deadline).await.map(drop)
        })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        size::check(policy)?;
        if Scripts::exist_for(policy) { Ok(()) } else { self.swapping.validate(policy) }
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
}
