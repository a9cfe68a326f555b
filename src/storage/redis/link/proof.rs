//! The proof that all keys of a connection are on one server.
//!
//! A proxy such as twemproxy or Envoy distributes keys to several servers. It sends a script with
//! several keys to the server of the first key, so a call that combines hits would decide most of
//! them on a wrong server. No reply of a single command reveals such a proxy reliably, because a
//! proxy can send the command to any server, or answer it.
//!
//! The proof uses the routing itself. It stores a token under a random key. Then it reads the token
//! by 64 scripts, whose first keys are other random keys. A script that runs on another server does
//! not find the token. If a proxy sends a share of the keys elsewhere, all scripts find the token only
//! with the probability `(1 - share) ^ 64`: 10^-19 for two equal servers, and 0.1 % for a server with
//! a tenth of the keys. Each proof uses other keys.
//!
//! A proof without a result is made again later, because its cause can end: the server was out of
//! memory, was loading its data, or has evicted the token. A token that a script finds after
//! another script has not found it is a result, because an evicted token does not return. Behind a
//! proxy, hardly any proof is without a result. So in both examples above, all proofs of a
//! connection together raise the probability by less than a hundredth of itself.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, Pipeline, ServerErrorKind, Value, cmd};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::storage::net::CONNECT_WITHIN;
use crate::sync::unpoisoned;

/// The time to live of the token, in milliseconds. It is deleted before, unless the proof is dropped.
const TOKEN_MILLIS: u32 = 10_000;

/// The delay after a proof without a result.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Reads the second key. The first one selects the server.
const READ: &str = "return redis.call('GET', KEYS[2])";

/// Deletes the token. Some proxies close the connection of a client that sends them the command
/// `UNLINK`.
const DELETE: &str = "return redis.call('UNLINK', KEYS[1])";

/// The time after which a running proof is considered stalled, and another one can begin. Its runtime
/// may not be running, so its own timeout would not fire.
const STALLED_AFTER: Duration = CONNECT_WITHIN.saturating_mul(2);

/// The state of the proof of one connection.
#[derive(Debug)]
pub(super) struct Proof {
    is_single_server: AtomicBool,
    stage: Mutex<ProofStage>,
}

#[derive(Debug)]
enum ProofStage {
    /// A proof can begin at this time.
    Waiting(Instant),
    Running(RunningProof),
    /// A proof has had a result.
    Decided,
}

#[derive(Clone, Debug)]
struct RunningProof {
    /// The time after which the proof is considered stalled.
    until: Instant,
    /// The channel that is closed when the proof ends.
    ended: watch::Receiver<()>,
}

/// A running proof. If it is dropped without a result, another one can begin after a delay.
pub(super) struct Proving<'a> {
    of: &'a Proof,
    until: Instant,
    _running: watch::Sender<()>,
}

impl Proof {
    /// Creates the state of a new connection, whose proof can begin immediately.
    pub(super) fn new() -> Self {
        let stage = Mutex::new(ProofStage::Waiting(Instant::now()));
        Self { is_single_server: AtomicBool::new(false), stage }
    }

    /// Returns `true` if the connection has proved to be a single server.
    pub(super) fn is_single_server(&self) -> bool {
        self.is_single_server.load(Ordering::Relaxed)
    }

    /// Returns `true` if a proof can begin.
    pub(super) fn is_due(&self) -> bool {
        self.stage().is_due()
    }

    /// Begins a proof, after waiting for one that is running. Returns `None` if that one or an earlier
    /// one has had a result, or if one has ended without a result a short time ago.
    pub(super) async fn begin(&self) -> Option<Proving<'_>> {
        loop {
            let mut running = match self.try_begin() {
                Ok(proving) => return Some(proving),
                Err(running) => running?,
            };
            let _ = timeout_at(running.until, running.ended.changed()).await;
        }
    }

    /// Begins a proof. If none can begin now, returns the one that is running, if there is one.
    fn try_begin(&self) -> Result<Proving<'_>, Option<RunningProof>> {
        let mut stage = self.stage();
        if !stage.is_due() {
            return Err(if let ProofStage::Running(running) = &*stage { Some(running.clone()) } else { None });
        }
        let (until, (running, ended)) = (Instant::now() + STALLED_AFTER, watch::channel(()));
        *stage = ProofStage::Running(RunningProof { until, ended });
        Ok(Proving { of: self, until, _running: running })
    }

    fn stage(&self) -> MutexGuard<'_, ProofStage> {
        unpoisoned(self.stage.lock())
    }
}

impl ProofStage {
    fn is_due(&self) -> bool {
        match self {
            Self::Waiting(until) | Self::Running(RunningProof { until, .. }) => *until <= Instant::now(),
            Self::Decided => false,
        }
    }
}

impl Proving<'_> {
    /// Ends the proof with a result, which is final for the connection.
    pub(super) fn end(self, is_single_server: bool) {
        self.of.is_single_server.store(is_single_server, Ordering::Relaxed);
        *self.of.stage() = ProofStage::Decided;
    }
}

impl Drop for Proving<'_> {
    fn drop(&mut self) {
        let mut stage = self.of.stage();
        // A proof that has stalled changes nothing after another one has begun.
        if matches!(&*stage, ProofStage::Running(running) if running.until == self.until) {
            *stage = ProofStage::Waiting(Instant::now() + RETRY_AFTER);
        }
    }
}

/// The commands of a proof, and the token that the scripts must return.
pub(super) struct ProofCommands {
    pub(super) store: Cmd,
    pub(super) read: Pipeline,
    pub(super) delete: Cmd,
    token: Vec<u8>,
}

impl ProofCommands {
    /// The number of replies to `read`.
    pub(super) const READS: usize = 64;

    /// Creates the commands, with random keys under `prefix`.
    pub(super) fn new(prefix: &str) -> Self {
        let random = RandomState::new();
        // The keys look like those of the states, so a proxy treats them alike.
        let key = |number: usize| format!("{prefix}:{{ready {:x}}}", random.hash_one(number));
        let (home, token) = (key(0), format!("{:x}", random.hash_one("token")).into_bytes());
        let mut store = cmd("SET");
        store.arg(&home).arg(&token).arg("PX").arg(TOKEN_MILLIS);
        let mut read = Pipeline::with_capacity(Self::READS);
        for number in 1..=Self::READS {
            read.cmd("EVAL").arg(READ).arg(2).arg(key(number)).arg(&home);
        }
        let mut delete = cmd("EVAL");
        delete.arg(DELETE).arg(1).arg(&home);
        Self { store, read, delete, token }
    }

    /// Returns `true` if the replies to `read` prove that all keys are on one server, `false` if
    /// they prove the opposite, and `None` if they prove nothing.
    pub(super) fn result(&self, replies: &[Value]) -> Option<bool> {
        let found = |reply: &Value| matches!(reply, Value::BulkString(bytes) if *bytes == self.token);
        let Some(missed) = replies.iter().position(|reply| !found(reply)) else {
            return (replies.len() == Self::READS).then_some(true);
        };
        let is_refuted = replies[missed..].iter().any(|reply| found(reply) || is_refusal_of_a_slot(reply));
        is_refuted.then_some(false)
    }
}

/// Returns `true` if a server of a cluster refused the slots of the keys.
pub(super) fn is_refusal_of_a_slot(reply: &Value) -> bool {
    let kind = if let Value::ServerError(error) = reply { error.kind() } else { None };
    matches!(kind, Some(ServerErrorKind::Moved | ServerErrorKind::CrossSlot))
}

#[cfg(test)]
mod tests {
    use redis::parse_redis_value;

    use super::*;

    #[test]
    fn only_replies_of_several_servers_refute_a_proof() {
        let commands = ProofCommands::new("rl");
        let found = || Value::BulkString(commands.token.clone());
        let error = |text: &str| parse_redis_value(format!("-{text} text\r\n").as_bytes()).unwrap();
        let replies = |first: usize, others: Value, last: usize| {
            let middle = vec![others; ProofCommands::READS - first - last];
            commands.result(&[vec![found(); first], middle, vec![found(); last]].concat())
        };
        assert_eq!(replies(0, found(), 0), Some(true));
        assert_eq!(commands.result(&vec![found(); ProofCommands::READS - 1]), None);
        for reply in [Value::Nil, Value::BulkString(b"other".to_vec()), error("OOM"), error("NOPERM")] {
            for first in [0, 10] {
                assert_eq!(replies(first, reply.clone(), 0), None, "{reply:?}");
            }
            assert_eq!(replies(10, reply.clone(), 1), Some(false), "{reply:?}");
            assert_eq!(replies(0, reply, 1), Some(false));
        }
        for code in ["MOVED", "CROSSSLOT"] {
            assert_eq!(replies(10, error(code), 0), Some(false), "{code}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn proof_without_a_result_is_retried_after_a_delay() {
        let (proof, end) = (Proof::new(), Duration::from_millis(1));
        for _ in 0..3 {
            let proving = proof.begin().await.unwrap();
            assert!(!proof.is_due(), "a proof is running");
            let (next, ()) = tokio::join!(proof.begin(), async { drop(proving) });
            assert!(next.is_none(), "the proof has ended without a result");
            tokio::time::advance(RETRY_AFTER.checked_sub(end).unwrap()).await;
            assert!(!proof.is_due() && proof.begin().await.is_none());
            tokio::time::advance(end).await;
            assert!(proof.is_due());
        }
        proof.begin().await.unwrap().end(true);
        tokio::time::advance(100 * RETRY_AFTER).await;
        assert!(proof.is_single_server() && !proof.is_due(), "a result is final");
        assert!(proof.begin().await.is_none());
    }

    /// Guards against this defect: a proof on a runtime that nothing drives blocks all later ones.
    #[tokio::test(start_paused = true)]
    async fn proof_that_stalls_is_replaced() {
        let proof = Proof::new();
        let stalled = proof.begin().await.unwrap();
        let begun = Instant::now();
        let proving = proof.begin().await.unwrap();
        assert_eq!(begun.elapsed(), STALLED_AFTER);
        drop(stalled);
        assert!(!proof.is_due(), "the second one is still running");
        proving.end(true);
        assert!(proof.is_single_server());
    }
}
