//! Combines hits that wait at the same time into one call of a script.
//!
//! A script call costs the server a few microseconds besides the decision, for example to read the
//! clock. It costs the client a reply. Hits that share a call share these costs.
//!
//! The keys of such a call must be on one server. So hits are combined only on a connection that has
//! [proved](super::link) to be one server, or that the user has vouched for.
//!
//! A hit is sent at once if fewer than four other hits of the storage are in flight. Otherwise it
//! joins a [`Group`]. A task of the group yields to the runtime once, and then sends all hits that
//! have joined in the meantime. A full group is sent without the yield. The script decides the hits
//! of a call in order, with the same results as in calls of their own.
//!
//! A task sends the group, because the future of a hit may not be polled for a while. Each runtime
//! has its own groups, because the tasks of another runtime may not run for a while.

mod group;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use redis::Value;
use tokio::runtime::{self, Handle};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use self::group::{Group, Hit, Member, Outcome};
use super::error::is_script_missing;
use super::link::{Link, Node};
use super::script::{Call, Combined, Kin};
use crate::storage::{StorageError, StorageErrorKind};
use crate::sync::unpoisoned;

/// The maximum number of hits in one call.
///
/// Other clients of the server wait for the whole call, which takes about 4 us per hit. More hits
/// per call gain little.
const MAX_HITS: usize = 16;

/// A hit joins a group only if at least this many other hits are in flight.
const MIN_IN_FLIGHT: usize = 4;

/// The connections on which hits are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Combine {
    Never,
    /// Those that have proved to be one server.
    OnSingleServer,
    /// All, because the user vouches for them.
    Always,
}

impl Combine {
    /// The values of the option `combine` in a URL.
    pub(super) const WORDS: [(&str, Self); 3] =
        [("true", Self::OnSingleServer), ("false", Self::Never), ("always", Self::Always)];
}

/// Combines the hits of one storage.
#[derive(Debug)]
pub(super) struct Combiner {
    mode: Combine,
    /// The prefix of all keys.
    prefix: Arc<str>,
    in_flight: AtomicUsize,
    /// The groups that hits can join. The task of a group closes it, and then sends it.
    open: Mutex<HashMap<GroupKey, Arc<Group>>>,
}

/// The properties that all hits of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GroupKey {
    runtime: runtime::Id,
    kin: Kin,
}

/// A guard that decrements the number of hits in flight when it is dropped.
struct InFlight<'a>(&'a AtomicUsize);

/// The task that sends a group. If the runtime drops the task before that, each hit is sent in a
/// call of its own.
struct Sending {
    combiner: Arc<Combiner>,
    node: Node,
    key: GroupKey,
    group: Arc<Group>,
    is_closed: bool,
}

impl Combiner {
    pub(super) fn new(mode: Combine, prefix: Arc<str>) -> Arc<Self> {
        Arc::new(Self { mode, prefix, in_flight: AtomicUsize::new(0), open: Mutex::default() })
    }

    /// Returns `true` if hits can be combined on this connection now.
    fn is_possible_on(&self, node: &Node) -> bool {
        match self.mode {
            Combine::Never => false,
            Combine::OnSingleServer => node.is_single_server(&self.prefix),
            Combine::Always => true,
        }
    }

    /// Runs the script of a call, in one call with other hits if possible.
    ///
    /// The future can be dropped at any time, without an effect on other hits.
    pub(super) async fn run(
        self: &Arc<Self>,
        link: &Link,
        call: &Arc<Call>,
        deadline: Instant,
    ) -> Result<Value, StorageError> {
        let others = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let _in_flight = InFlight(&self.in_flight);
        if others >= MIN_IN_FLIGHT
            && call.can_be_combined()
            && let Some(node) = link.single()
            && self.is_possible_on(node)
            && let Some(result) = self.join(node, call, deadline).await
        {
            return result;
        }
        run_alone(link, call, deadline).await
    }

    /// Joins a group, and waits for the outcome. Returns `None` if the hit must be sent in a call
    /// of its own.
    async fn join(self: &Arc<Self>, node: &Node, call: &Arc<Call>, deadline: Instant) -> Outcome {
        let (outcome, received) = oneshot::channel();
        let member = self.enter(node, Hit { call: Arc::clone(call), deadline, outcome });
        match timeout_at(deadline, received).await {
            Ok(Ok(outcome)) => outcome,
            // The runtime ended after the call was sent. The server may have executed it.
            Ok(Err(_)) => Some(Err(StorageError::connection_lost(node.name(), "the runtime has ended"))),
            Err(_) if member.leave() => Some(Err(StorageError::not_connected(node.name()))),
            Err(_) => Some(Err(StorageError::timed_out(node.name()))),
        }
    }

    /// Adds a hit to the open group of the current runtime. If the hit is the first of its group or
    /// fills it, also spawns a task that sends the group.
    fn enter(self: &Arc<Self>, node: &Node, hit: Hit) -> Member {
        let (runtime, call) = (Handle::current(), Arc::clone(&hit.call));
        let key = GroupKey { runtime: runtime.id(), kin: call.kin() };
        let mut open = self.open();
        let (group, is_new) = match open.entry(key) {
            Entry::Occupied(entry) => (Arc::clone(entry.get()), false),
            Entry::Vacant(entry) => (Arc::clone(entry.insert(Arc::default())), true),
        };
        let is_full = group.push(hit) >= MAX_HITS;
        if is_full {
            open.remove(&key);
        }
        // A runtime that shuts down drops a spawned task immediately. Dropping it takes the lock.
        drop(open);
        if is_new || is_full {
            let (combiner, node, of) = (Arc::clone(self), node.clone(), Arc::clone(&group));
            let sending = Sending { combiner, node, key, group: of, is_closed: is_full };
            if is_full {
                runtime.spawn(sending.send());
            } else {
                runtime.spawn(sending.send_after_yield());
            }
        }
        Member { group, call }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<GroupKey, Arc<Group>>> {
        unpoisoned(self.open.lock())
    }
}

impl Sending {
    async fn send_after_yield(mut self) {
        yield_now().await;
        if self.close() {
            self.send().await;
        }
    }

    /// Closes the group. Returns `false` if the group became full, so that another task sends it.
    fn close(&mut self) -> bool {
        let mut open = self.combiner.open();
        if open.get(&self.key).is_some_and(|group| Arc::ptr_eq(group, &self.group)) {
            open.remove(&self.key);
            self.is_closed = true;
        }
        self.is_closed
    }

    /// Sends the hits in one call, and distributes the replies.
    async fn send(self) {
        // The callers apply their own deadlines, so the call may take until the last one.
        let Some(deadline) = self.group.last_deadline() else { return };
        let count = self.group.len();
        if count < 2 {
            return;
        }
        let mut hits = Vec::new();
        let by_hash = || {
            hits = self.group.take();
            (!hits.is_empty()).then(|| Combined::new(&calls(&hits)).by_hash())
        };
        let needs_proof = self.combiner.mode != Combine::Always;
        let mut reply = self.node.run_several(deadline, count, needs_proof, by_hash).await;
        if reply.as_ref().is_err_and(is_script_missing) {
            let by_text = Combined::new(&calls(&hits)).by_text();
            reply = self.node.run_several(deadline, hits.len(), needs_proof, || Some(by_text)).await;
        }
        if hits.is_empty() {
            // The call was not sent.
            hits = self.group.take();
        }
        match reply {
            Ok(Some(Value::Array(replies))) if replies.len() == hits.len() => {
                for (hit, reply) in hits.into_iter().zip(replies) {
                    // A hit that failed has counted nothing. A call of its own returns the error.
                    hit.complete((reply != Value::Nil).then_some(Ok(reply)));
                }
            }
            // The connection was replaced, and the new one has not proved to be one server.
            Ok(None) => hits.into_iter().for_each(Hit::send_alone),
            // The server refused the call, so it executed nothing. The key of one hit may be the
            // cause, so the other hits can succeed in calls of their own.
            Err(error) if error.kind() == StorageErrorKind::Refused => {
                hits.into_iter().for_each(Hit::send_alone);
            }
            Err(error) => hits.into_iter().for_each(|hit| hit.complete(Some(Err(error.clone())))),
            // The caller reports the unexpected reply.
            Ok(Some(other)) => hits.into_iter().for_each(|hit| hit.complete(Some(Ok(other.clone())))),
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.is_closed || self.close() {
            self.group.take().into_iter().for_each(Hit::send_alone);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn calls(hits: &[Hit]) -> Vec<&Call> {
    hits.iter().map(|hit| &*hit.call).collect()
}

/// Runs the script by its hash, or sends its text if the server has not cached it.
pub(super) async fn run_alone(link: &Link, call: &Call, deadline: Instant) -> Result<Value, StorageError> {
    match link.run(&call.by_hash(), deadline).await {
        Err(error) if is_script_missing(&error) => link.run(&call.by_text(), deadline).await,
        other => other,
    }
}
