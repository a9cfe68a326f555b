//! A Redis Cluster: one connection per node, and the map from slots to nodes.
//!
//! The cluster connection of the `redis` crate is unsuitable, for two reasons. It retries a command
//! after the connection was lost, which can count a hit twice. And all commands wait while it loads
//! the slot map.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::time::{Instant, sleep_until, timeout};

use super::super::error::{Redirect, needs_new_slot_map, redirect};
use super::super::url::Access;
use super::node::Node;
use super::slots::{Slots, slot_of};
use crate::storage::StorageError;
use crate::storage::net::Reconnecting;
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
    slots: Arc<Reconnecting<Slots>>,
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

    async fn slots(&self, deadline: Instant) -> Result<Arc<Slots>, StorageError> {
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
    async fn load_slots(self: Arc<Self>) -> Result<Slots, StorageError> {
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
                        if let Some(slots) = Slots::parse(&reply, host) {
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
