//! Combines hits that wait at the same time into one call of a script. Each [`Call`] passes
//! here, also one that is always sent alone.
//!
//! A script call costs the server a few microseconds besides the decision, for example to read the
//! clock. It costs the client a reply. Hits that share a call share these costs.
//!
//! The keys of such a call must be on one server. So hits are combined only on a connection that has
//! [proved](super::link) to be one server, or that the user has vouched for.
//!
//! A hit is sent at once if fewer than four other hits of the storage are in flight. Otherwise it
//! joins a group. A task of the group yields to the runtime once, and then sends all hits that
//! have joined in the meantime. A full group is sent without the yield. The script decides the hits
//! of a call in order, with the same results as in calls of their own.
//!
//! A task sends the group, because the future of a hit may not be polled for a while. Each runtime
//! has its own groups, because the tasks of another runtime may not run for a while.
//!
//! A call has at most 16 hits. It takes about 65 µs, for which other clients of the server wait.
//! With 32, a hit takes 5 % less.
//!
//! A hit that fails in the script has written nothing, because the states are written last. It is
//! sent again in a call of its own, which returns its error. So are all hits of a call that the
//! server refuses, for example because the user has no right to one of the keys. A lost reply fails
//! all hits of the call, and none is sent again.
//!
//! A caller that is dropped, or that reaches its deadline before the command is handed to the
//! connection, removes its hit. So its error says that it has not counted.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use redis::Value;
use tokio::runtime::{self, Handle};
use tokio::task::yield_now;
use tokio::time::Instant;

use super::error::{is_cross_slot, is_script_missing};
use super::link::{Link, Node};
use super::script::{Call, Combined, ScriptId};
use super::url::Combine;
use crate::storage::net::Gauge;
use crate::storage::ticket::{Ticket, Unanswered};
use crate::storage::{StorageError, StorageErrorKind};
use crate::sync::unpoisoned;

/// The maximum number of hits in one call.
///
/// Other clients of the server wait for the whole call, which takes about 4 µs per hit. More hits
/// per call gain little.
const MAX_HITS: usize = 16;

/// A hit joins a group only if at least this many other hits are in flight.
const MIN_IN_FLIGHT: usize = 4;

/// Combines the hits of one storage.
#[derive(Debug)]
pub(super) struct Combiner {
    pub(super) mode: Combine,
    /// The prefix of all keys.
    prefix: Arc<str>,
    in_flight: Gauge,
    /// `true` if the server has refused a group because its keys are in several slots. It would
    /// refuse nearly every other group, too.
    is_refused: AtomicBool,
    /// The groups that hits can join. The task of a group closes it, and then sends it.
    open: Mutex<HashMap<GroupKey, Arc<Group>>>,
}

/// The properties that all hits of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct GroupKey {
    runtime: runtime::Id,
    script_id: ScriptId,
}

/// The hits of one call that have not been sent yet.
type Group = Mutex<Vec<GroupedHit>>;

/// A hit that waits to be sent with others.
#[derive(Debug)]
struct GroupedHit {
    call: Arc<Call>,
    deadline: Instant,
    ticket: Ticket<CombinedReply>,
}

/// The result of a hit, or `None` if the hit has not counted and must be sent in a call of its own.
type CombinedReply = Option<Result<Value, StorageError>>;

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
        let (in_flight, is_refused, open) = (Gauge::default(), AtomicBool::new(false), Mutex::default());
        Arc::new(Self { mode, prefix, in_flight, is_refused, open })
    }

    /// Waits for the proof that hits can be combined, unless it is not needed.
    pub(super) async fn prove(&self, link: &Link, deadline: Instant) {
        if self.mode == Combine::OnSingleServer
            && let Some(node) = link.only_node()
        {
            node.prove(&self.prefix, deadline).await;
        }
    }

    /// Returns `true` if hits can be combined on this connection now.
    fn is_possible_on(&self, node: &Node) -> bool {
        match self.mode {
            Combine::Never => false,
            Combine::OnSingleServer => node.is_single_server(&self.prefix),
            Combine::Always => !self.is_refused.load(Ordering::Relaxed),
        }
    }

    /// Sends a call, in one command with other hits if possible.
    ///
    /// The future can be dropped at any time, without an effect on other hits.
    pub(super) async fn run(
        self: &Arc<Self>,
        link: &Link,
        call: &Arc<Call>,
        deadline: Instant,
    ) -> Result<Value, StorageError> {
        let others = self.in_flight.count();
        let _in_flight = self.in_flight.enter(1, usize::MAX);
        if others >= MIN_IN_FLIGHT
            && call.can_be_combined()
            && let Some(node) = link.only_node()
            && Handle::try_current().is_ok()
            && self.is_possible_on(node)
            && let Some(result) = self.join(node, call, deadline).await
        {
            return result;
        }
        self.run_alone(link, call, deadline).await
    }

    /// Sends a call in a command of its own. A call with several keys is sent only on a connection that
    /// leads to one server, or to the node of a cluster that holds all of them.
    pub(super) async fn run_alone(&self, link: &Link, call: &Call, deadline: Instant) -> Result<Value, StorageError> {
        let needs_one_server = call.has_several_keys();
        let Some(node) = link.only_node().filter(|_| needs_one_server) else {
            return link.run_script(&call.by_hash(), || call.by_text(), deadline).await;
        };
        let needs_proof = self.mode != Combine::Always;
        let mut reply = node.run_on_one_server(deadline, 1, needs_proof, || Some(call.by_hash())).await;
        if matches!(reply, Ok(None)) {
            node.prove(&self.prefix, deadline).await;
            reply = node.run_on_one_server(deadline, 1, needs_proof, || Some(call.by_hash())).await;
        }
        if reply.as_ref().is_err_and(is_script_missing) {
            reply = node.run_on_one_server(deadline, 1, needs_proof, || Some(call.by_text())).await;
        }
        reply?.ok_or_else(|| not_one_server(node.name()))
    }

    /// Joins a group, and waits for the outcome. Returns `None` if the hit must be sent in a call
    /// of its own.
    async fn join(self: &Arc<Self>, node: &Node, call: &Arc<Call>, deadline: Instant) -> CombinedReply {
        let (ticket, caller) = Ticket::new();
        self.enter(node, GroupedHit { call: Arc::clone(call), deadline, ticket });
        caller.wait(deadline).await.unwrap_or_else(|unanswered| {
            Some(Err(match unanswered {
                // The runtime ended after the call was sent. The server may have executed it.
                Unanswered::Dropped => StorageError::connection_lost(node.name(), "the runtime has ended"),
                Unanswered::Late(stage) if stage.is_begun => StorageError::timed_out(node.name()),
                Unanswered::Late(_) => node.not_connected(),
            }))
        })
    }

    /// Adds a hit to the open group of the current runtime. If the hit is the first of its group or
    /// fills it, also spawns a task that sends the group.
    fn enter(self: &Arc<Self>, node: &Node, hit: GroupedHit) {
        let runtime = Handle::current();
        let key = GroupKey { runtime: runtime.id(), script_id: hit.call.script_id() };
        let mut open = self.open();
        let (group, is_new) = match open.entry(key) {
            Entry::Occupied(entry) => (Arc::clone(entry.get()), false),
            Entry::Vacant(entry) => (Arc::clone(entry.insert(Arc::default())), true),
        };
        let is_full = {
            let mut hits = unpoisoned(group.lock());
            hits.push(hit);
            hits.len() >= MAX_HITS
        };
        if is_full {
            open.remove(&key);
        }
        // A runtime that shuts down drops a spawned task immediately. Dropping it takes the lock.
        drop(open);
        if is_new || is_full {
            let (combiner, node) = (Arc::clone(self), node.clone());
            let sending = Sending { combiner, node, key, group, is_closed: is_full };
            if is_full {
                runtime.spawn(sending.send());
            } else {
                runtime.spawn(sending.send_after_yield());
            }
        }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<GroupKey, Arc<Group>>> {
        unpoisoned(self.open.lock())
    }
}

impl Sending {
    /// Removes all hits from the group.
    fn take(&self) -> Vec<GroupedHit> {
        std::mem::take(&mut *unpoisoned(self.group.lock()))
    }

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
        let (count, deadline) = {
            let mut hits = unpoisoned(self.group.lock());
            hits.retain(GroupedHit::is_awaited);
            // The callers apply their own deadlines, so the call may take until the last one.
            (hits.len(), hits.iter().map(|hit| hit.deadline).max())
        };
        let Some(deadline) = deadline.filter(|_| count >= 2) else { return };
        let mut hits = Vec::new();
        let by_hash = || {
            hits = self.take();
            hits.retain(|hit| hit.is_awaited() && hit.ticket.begin());
            (!hits.is_empty()).then(|| Combined::new(&calls(&hits)).by_hash())
        };
        let needs_proof = self.combiner.mode != Combine::Always;
        let mut reply = self.node.run_on_one_server(deadline, count, needs_proof, by_hash).await;
        if reply.as_ref().is_err_and(is_script_missing) {
            let by_text = Combined::new(&calls(&hits)).by_text();
            reply = self.node.run_on_one_server(deadline, hits.len(), needs_proof, || Some(by_text)).await;
        }
        if hits.is_empty() {
            // The call was not sent.
            hits = self.take();
        }
        match reply {
            Ok(Some(Value::Array(replies))) if replies.len() == hits.len() => {
                for (hit, reply) in hits.into_iter().zip(replies) {
                    // A hit that failed has counted nothing. A call of its own returns the error.
                    hit.ticket.answer((reply != Value::Nil).then_some(Ok(reply)));
                }
            }
            // The connection was replaced, and the new one has not proved to be one server.
            Ok(None) => hits.into_iter().for_each(GroupedHit::send_alone),
            // The server refused the call, so it executed nothing. The key of one hit may be the
            // cause, so the other hits can succeed in calls of their own.
            Err(error) if error.kind() == StorageErrorKind::Refused => {
                if is_cross_slot(&error) {
                    self.combiner.is_refused.store(true, Ordering::Relaxed);
                }
                hits.into_iter().for_each(GroupedHit::send_alone);
            }
            Err(error) => hits.into_iter().for_each(|hit| hit.ticket.answer(Some(Err(error.clone())))),
            // The caller reports the unexpected reply.
            Ok(Some(other)) => hits.into_iter().for_each(|hit| hit.ticket.answer(Some(Ok(other.clone())))),
        }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if self.is_closed || self.close() {
            self.take().into_iter().for_each(GroupedHit::send_alone);
        }
    }
}

impl GroupedHit {
    /// Returns `false` if the caller has left, or was dropped. Then the hit is not sent.
    fn is_awaited(&self) -> bool {
        self.ticket.is_awaited() && !self.ticket.is_dropped()
    }

    fn send_alone(self) {
        self.ticket.answer(None);
    }
}

/// Creates the error of several keys on a connection that may lead to several servers.
fn not_one_server(name: &str) -> StorageError {
    let message = format!(
        "cannot decide on several keys together, because {name} may be a proxy for several servers: wrap the storage \
         as `InOrder::new(storage)`, or write combine=always in its URL if it is one server"
    );
    StorageError::new(StorageErrorKind::Unsupported, message).uncounted()
}

fn calls(hits: &[GroupedHit]) -> Vec<&Call> {
    hits.iter().map(|hit| &*hit.call).collect()
}
