//! The slots of requests in flight. One script applies a claim to the ledger of a key.

use std::sync::LazyLock;

use redis::{Cmd, Value, cmd};
use tokio::time::Instant;

use super::script::unexpected_reply;
use super::{LABEL, RedisStorage, key_names};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::metrics::measured;
use crate::storage::{Claim, Clock, Granted, LONGEST_TIME_TO_LIVE, SlotStore, StorageError, StorageFuture};
use crate::time::micros;

const SCRIPT: &str = concat!(include_str!("script/forgive.lua"), include_str!("../slots/ledger.lua"));

static HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(SCRIPT).get_hash().to_owned());

// As on other servers, a claim is not refused in advance while the server is overloaded.
impl SlotStore for RedisStorage {
    fn claim(&self, policy: &Policy, key: &Key, claim: Claim) -> StorageFuture<Granted> {
        let (storage, name) = (self.clone(), key_names::ledger_key(&self.prefix, policy, key));
        StorageFuture::new(measured(LABEL, async move { storage.run_claim(&name, &claim).await }))
    }
}

impl RedisStorage {
    async fn run_claim(&self, name: &str, claim: &Claim) -> Result<Granted, StorageError> {
        let deadline = Instant::now() + self.timeout;
        let command = |command: &str, script: &str| self.claim_command(command, script, name, claim);
        let reply = self.link.run_script(&command("EVALSHA", &HASH), || command("EVAL", SCRIPT), deadline).await?;
        granted(&reply).ok_or_else(|| unexpected_reply(&reply))
    }

    fn claim_command(&self, command: &str, script: &str, name: &str, claim: &Claim) -> Cmd {
        let &Claim { process, sequence, least, first, most, slots, time_to_live } = claim;
        let mut command = cmd(command);
        command.arg(script).arg(1).arg(name).arg(format!("{process:x}")).arg(sequence);
        command.arg(&[least, first, most, slots]).arg(&[micros(time_to_live), micros(LONGEST_TIME_TO_LIVE)]);
        if let Some(clock) = &self.clock {
            command.arg(clock.now().as_micros());
        }
        command
    }
}

fn granted(reply: &Value) -> Option<Granted> {
    let Value::Array(numbers) = reply else { return None };
    let number = |value: &Value| if let Value::Int(number) = value { u32::try_from(*number).ok() } else { None };
    let [count, usable, free] = numbers.as_slice() else { return None };
    Some(Granted { count: number(count)?, usable: number(usable)?, free: number(free)? })
}
