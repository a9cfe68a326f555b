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
//! a tenth of the keys. Each connection uses other keys.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use redis::{Cmd, Pipeline, Value, cmd};

/// The time to live of the token, in milliseconds. It is deleted before, unless the proof is dropped.
const TOKEN_MILLIS: u32 = 10_000;

/// Reads the second key. The first one selects the server.
const SCRIPT: &str = "return redis.call('GET', KEYS[2])";

/// The state of the proof of one connection.
#[derive(Debug, Default)]
pub(super) struct Proof {
    is_single_server: AtomicBool,
    /// `true` while the proof is running, and after it has ended with a result.
    is_begun: AtomicBool,
}

/// A running proof. If it is dropped without a result, the next caller begins another one.
pub(super) struct Proving<'a>(Option<&'a Proof>);

impl Proof {
    /// Returns `true` if the connection has proved to be a single server.
    pub(super) fn is_single_server(&self) -> bool {
        self.is_single_server.load(Ordering::Relaxed)
    }

    /// Returns `true` if the proof is running, or has ended with a result.
    pub(super) fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Relaxed)
    }

    /// Begins the proof. Returns `None` if it was begun before.
    pub(super) fn begin(&self) -> Option<Proving<'_>> {
        (!self.is_begun.swap(true, Ordering::Relaxed)).then(|| Proving(Some(self)))
    }
}

impl Proving<'_> {
    /// Ends the proof with a result, which is final for the connection.
    pub(super) fn end(mut self, is_single_server: bool) {
        if let Some(proof) = self.0.take() {
            proof.is_single_server.store(is_single_server, Ordering::Relaxed);
        }
    }
}

impl Drop for Proving<'_> {
    fn drop(&mut self) {
        if let Some(proof) = self.0 {
            proof.is_begun.store(false, Ordering::Relaxed);
        }
    }
}

/// The commands of a proof, and the token that the scripts must return.
pub(super) struct Commands {
    pub(super) store: Cmd,
    pub(super) read: Pipeline,
    pub(super) delete: Cmd,
    token: Vec<u8>,
}

impl Commands {
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
            read.cmd("EVAL").arg(SCRIPT).arg(2).arg(key(number)).arg(&home);
        }
        let mut delete = cmd("UNLINK");
        delete.arg(&home);
        Self { store, read, delete, token }
    }

    /// Returns `true` if the replies prove that all keys are on one server.
    pub(super) fn is_proof(&self, replies: &[Value]) -> bool {
        let found = |reply: &Value| matches!(reply, Value::BulkString(bytes) if *bytes == self.token);
        replies.len() == Self::READS && replies.iter().all(found)
    }
}
