//! A Redis Cluster: one connection per node, and the map from slots to nodes.
//!
//! The cluster connection of the `redis` crate is unsuitable, for two reasons. It retries a command
//! after the connection was lost, which can count a hit twice. And all commands wait while it loads
//! the slot map.
//!
//! Without retries, the connection of that crate sends no command twice. But then it follows no
//! redirect, and it never leaves a primary that hangs: 4 to 7 seconds after a replica was promoted,
//! its keys still had no replies.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Arg, Cmd, Value, cmd};
use tokio::time::{Instant, sleep_until, timeout};

use super::super::error::{Redirect, needs_new_slot_map, redirect};
use super::super::url::Access;
use super::node::Node;
use crate::storage::StorageError;
use crate::storage::net::{Reconnecting, Usable};
use crate::storage::url::{Address, Host};
use crate::sync::unpoisoned;

/// The maximum number of times that a command is sent. It is sent again only after a reply that
/// means that the node has not executed it.
const MAX_ATTEMPTS: usize = 5;

/// The delay after `TRYAGAIN`, which a node returns while it migrates a slot.
const TRY_AGAIN_DELAY: Duration = Duration::from_millis(10);

/// The timeout of `CLUSTER SLOTS` on one node.
const NODE_TIMEOUT: Duration = Duration::from_millis(200);

/// The timeout of loading the slot map, including all attempts.
const MAP_TIMEOUT: Duration = Duration::from_secs(1);

/// A handle to the connections of all nodes.
#[derive(Clone)]
pub(super) struct Cluster(Arc<ClusterInner>);

struct ClusterInner {
    /// The nodes in the URL.
    seeds: Vec<Host>,
    access: Access,
    slots: Arc<Reconnecting<SlotMap>>,
    nodes: Mutex<HashMap<Host, Node>>,
    /// The index of the node that is asked first for the slot map. Each load increments it.
    next_start: AtomicUsize,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Host>, access: Access) -> Self {
        let names: Vec<String> = seeds.iter().map(Host::to_string).collect();
        let slots = Reconnecting::new(&format!("the cluster at {}", names.join(",")));
        Self(Arc::new(ClusterInner { seeds, access, slots, nodes: Mutex::default(), next_start: AtomicUsize::new(0) }))
    }

    /// Implements [`Link::run`](super::Link::run).
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, StorageError> {
        let slots = self.slots(deadline).await?;
        let slot = slot_of(command);
        let Some(holder) = slots.holder(slot) else {
            self.refresh_slots();
            return Err(StorageError::unreachable(self.name(), format!("no node holds slot {slot}")));
        };
        let (mut host, mut asking) = (holder.clone(), false);
        for is_last in (1..=MAX_ATTEMPTS).map(|attempt| attempt == MAX_ATTEMPTS) {
            let node = self.0.node(&host);
            let reply =
                if asking { node.run_asking(command, deadline).await } else { node.run(command, deadline).await };
            let Err(error) = &reply else { return reply };
            let redirect = redirect(error);
            if redirect.is_none() && needs_new_slot_map(error) || matches!(redirect, Some(Redirect::Moved(_))) {
                self.refresh_slots();
            }
            match redirect.filter(|_| !is_last) {
                Some(Redirect::Moved(target)) => (host, asking) = (host.redirected_to(target), false),
                Some(Redirect::Ask(target)) => (host, asking) = (host.redirected_to(target), true),
                Some(Redirect::TryAgain) => sleep_until((Instant::now() + TRY_AGAIN_DELAY).min(deadline)).await,
                None => return reply,
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Checks that every slot has a node, and that every node replies.
    pub(super) async fn ping(&self, deadline: Instant) -> Result<(), StorageError> {
        let slots = self.slots(deadline).await?;
        if !slots.is_complete() {
            self.refresh_slots();
            return Err(StorageError::unreachable(self.name(), "some slots are not assigned to a node"));
        }
        for host in slots.holders() {
            if let Err(error) = self.0.node(host).ping(deadline).await {
                self.refresh_slots();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns every node that holds slots.
    pub(super) async fn nodes(&self, deadline: Instant) -> Result<Vec<Node>, StorageError> {
        let slots = self.slots(deadline).await?;
        Ok(slots.holders().into_iter().map(|host| self.0.node(host)).collect())
    }

    /// Returns a key in a slot of each node. `name` returns a different candidate for each number.
    pub(super) async fn key_on_each(
        &self,
        deadline: Instant,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<String>, StorageError> {
        let slots = self.slots(deadline).await?;
        Ok(slots.key_on_each(name))
    }

    async fn slots(&self, deadline: Instant) -> Result<Arc<SlotMap>, StorageError> {
        self.0.slots.get(deadline, || Arc::clone(&self.0).load_slots()).await
    }

    /// Loads the slot map again in the background.
    fn refresh_slots(&self) {
        self.0.slots.renew(|| Arc::clone(&self.0).load_slots());
    }

    fn name(&self) -> &str {
        self.0.slots.name()
    }
}

impl ClusterInner {
    /// Returns the handle to a node, and creates it if there is none.
    fn node(&self, host: &Host) -> Node {
        let mut nodes = self.nodes();
        let existing = nodes.get(host).cloned();
        existing.unwrap_or_else(|| {
            let node = Node::at(Address::Tcp(host.clone()), self.access.clone());
            nodes.insert(host.clone(), node.clone());
            node
        })
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<Host, Node>> {
        unpoisoned(self.nodes.lock())
    }

    /// Loads the slot map from the first node that returns it. Tries the known nodes and those in
    /// the URL. Each load starts with another node.
    async fn load_slots(self: Arc<Self>) -> Result<SlotMap, StorageError> {
        let mut hosts: Vec<Host> = self.nodes().keys().cloned().collect();
        hosts.extend(self.seeds.iter().filter(|seed| !hosts.contains(seed)).cloned().collect::<Vec<_>>());
        let start = self.next_start.fetch_add(1, Ordering::Relaxed) % hosts.len();
        hosts.rotate_left(start);
        let name = self.slots.name();
        let loading = timeout(MAP_TIMEOUT, async {
            let mut last = None;
            for host in &hosts {
                let node = self.node(host);
                match node.run(cmd("CLUSTER").arg("SLOTS"), Instant::now() + NODE_TIMEOUT).await {
                    Ok(reply) => {
                        if let Some(slots) = SlotMap::parse(&reply, host) {
                            return Ok(slots);
                        }
                        last = last.or(Some(StorageError::unreachable(name, format!("{host} returned no slots"))));
                    }
                    Err(error) => last = last.or(Some(error.while_connecting(&host.to_string()))),
                }
            }
            Err(last.unwrap_or_else(|| StorageError::unreachable(name, "the cluster has no nodes")))
        });
        let late =
            || Err(StorageError::unreachable(name, format!("no node returned the slots within {MAP_TIMEOUT:?}")));
        let slots = loading.await.unwrap_or_else(|_| late())?;
        let holders = slots.holders();
        self.nodes().retain(|host, _| holders.contains(&host));
        Ok(slots)
    }
}

impl Host {
    /// Returns the host that a redirection from this host names. A redirection without a host name
    /// is to another port of this host.
    fn redirected_to(&self, target: &str) -> Self {
        let host = target.rsplit_once(':').and_then(|(name, port)| {
            let name = if matches!(name, "" | "?") { &self.name } else { name };
            Some(Self { name: name.to_owned(), port: port.parse().ok()? })
        });
        host.unwrap_or_else(|| self.clone())
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.0.slots).finish()
    }
}

/// The number of slots in a cluster.
const SLOT_COUNT: u16 = 16_384;

/// The map from slots to nodes, as ranges in the order of their slots.
pub(super) struct SlotMap(Vec<SlotRange>);

struct SlotRange {
    first: u16,
    last: u16,
    host: Host,
}

impl Usable for SlotMap {}

impl SlotMap {
    /// Parses the reply of the node at `asked` to `CLUSTER SLOTS`. Returns `None` if the reply is
    /// malformed or has no slots.
    pub(super) fn parse(reply: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(ranges) = reply else { return None };
        let mut ranges = ranges.iter().map(|range| SlotRange::parse(range, asked)).collect::<Option<Vec<_>>>()?;
        ranges.sort_unstable_by_key(|range| range.last);
        (!ranges.is_empty()).then_some(Self(ranges))
    }

    /// Returns the node that holds a slot.
    pub(super) fn holder(&self, slot: u16) -> Option<&Host> {
        let range = self.0.get(self.0.partition_point(|range| range.last < slot))?;
        (range.first <= slot).then_some(&range.host)
    }

    /// Returns `true` if every slot has a node.
    pub(super) fn is_complete(&self) -> bool {
        let ends = self.0.iter().try_fold(0, |next, range| (range.first == next).then_some(range.last + 1));
        ends == Some(SLOT_COUNT)
    }

    /// Returns the nodes that hold slots, without duplicates.
    pub(super) fn holders(&self) -> Vec<&Host> {
        let mut hosts: Vec<&Host> = self.0.iter().map(|range| &range.host).collect();
        hosts.sort_unstable_by_key(|host| (&host.name, host.port));
        hosts.dedup();
        hosts
    }

    /// Returns a key in a slot of each node. `name` returns a different candidate for each number.
    ///
    /// Tries up to 64 candidates per slot, which is enough to find a key of a node with a single
    /// slot.
    pub(super) fn key_on_each(&self, name: impl Fn(u32) -> String) -> Vec<String> {
        let mut hosts = self.holders();
        let mut keys = Vec::with_capacity(hosts.len());
        for key in (0..64 * u32::from(SLOT_COUNT)).map(name) {
            let Some(holder) = self.holder(slot(key.as_bytes())) else { continue };
            if let Some(at) = hosts.iter().position(|host| *host == holder) {
                hosts.swap_remove(at);
                keys.push(key);
            }
            if hosts.is_empty() {
                break;
            }
        }
        keys
    }
}

impl SlotRange {
    fn parse(range: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = parts.as_slice() else { return None };
        let [name, Value::Int(port), ..] = primary.as_slice() else { return None };
        let name = match name {
            Value::BulkString(bytes) => str::from_utf8(bytes).ok()?,
            Value::SimpleString(text) => text,
            _ => "",
        };
        // NULL (read as "" above) means the endpoint that was asked. The name is empty if a node does
        // not know its own address, and "?" if it should have a hostname and has none. The best guess
        // is then the asked host, too.
        let name = if matches!(name, "" | "?") { &asked.name } else { name };
        let host = Host { name: name.to_owned(), port: u16::try_from(*port).ok()? };
        let slot = |number: i64| u16::try_from(number).ok().filter(|slot| *slot < SLOT_COUNT);
        Some(Self { first: slot(*first)?, last: slot(*last)?, host })
    }
}

/// Returns the slot of the command's first key. The slot of a command without a key is arbitrary.
pub(super) fn slot_of(command: &Cmd) -> u16 {
    let mut arguments = command.args_iter().map(|argument| match argument {
        Arg::Simple(bytes) => bytes,
        _ => b"",
    });
    let name = arguments.next().unwrap_or_default();
    let is_script = name.eq_ignore_ascii_case(b"EVALSHA") || name.eq_ignore_ascii_case(b"EVAL");
    let key = arguments.nth(if is_script { 2 } else { 0 }).unwrap_or_default();
    slot(key)
}

/// Returns the slot of a key, as the specification of Redis Cluster defines it: the CRC16 (XMODEM)
/// of the key's hash tag, or of the whole key if it has none.
fn slot(key: &[u8]) -> u16 {
    let tag = || {
        let inside = &key[key.iter().position(|byte| *byte == b'{')? + 1..];
        let end = inside.iter().position(|byte| *byte == b'}')?;
        (end > 0).then_some(&inside[..end])
    };
    let crc = tag().unwrap_or(key).iter().fold(0, |crc: u16, byte| {
        (0..8).fold(
            crc ^ (u16::from(*byte) << 8),
            |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
            },
        )
    });
    crc % SLOT_COUNT
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are from the specification and from `CLUSTER KEYSLOT`.
    #[test]
    fn slots_match_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"a{foo}b{c}"), 12_182);
        assert_eq!(slot(b"{}foo"), slot(b"{}foo"));
        assert_ne!(slot(b"{}foo"), 12_182, "empty braces are not a hash tag");
        let mut command = redis::cmd("evalsha");
        assert_eq!(slot_of(command.arg("sha").arg(1).arg("{foo}1").arg("bar")), 12_182);
        assert_eq!(slot_of(redis::cmd("GET").arg("foo")), 12_182);
    }

    #[test]
    fn slots_without_a_node_are_detected() {
        let range = |first, last, port| SlotRange { first, last, host: Host { name: "h".to_owned(), port } };
        let complete = SlotMap(vec![range(0, 9, 1), range(10, 16_383, 2)]);
        assert!(
            complete.is_complete() && complete.holder(9).unwrap().port == 1 && complete.holder(10).unwrap().port == 2
        );
        let incomplete = SlotMap(vec![range(0, 9, 1), range(11, 16_383, 2)]);
        assert!(!incomplete.is_complete() && incomplete.holder(10).is_none() && incomplete.holder(11).is_some());
    }
}
