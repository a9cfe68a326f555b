//! A cluster: each key has its node, which may change.
//!
//! The client crate's own cluster connection sends a command again after a connection broke, which would count it twice, and
//! while it asks where the slots are, all commands wait. So the nodes are single servers here, each with its connection, and
//! what is added is the map of the slots.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::time::{Instant, sleep_until, timeout};

use super::super::error::{Redirect, RedisStorageError};
use super::super::url::Access;
use super::node::Node;
use super::slots::{Slots, slot_of};
use crate::storage::net::Reconnecting;
use crate::storage::url::{Address, Host};

/// How many nodes are asked for one command: all but the last have said that they have not executed it.
const TRIES: usize = 5;

/// When a key is between two nodes, for so long.
const LATER: Duration = Duration::from_millis(10);

/// How long one node may take to tell where the slots are, and all that are asked together.
const EACH_WITHIN: Duration = Duration::from_millis(200);
const MAP_WITHIN: Duration = Duration::from_secs(1);

/// A handle on all nodes.
#[derive(Clone)]
pub(super) struct Cluster(Arc<Shared>);

struct Shared {
    /// Those that the URL names.
    seeds: Vec<Host>,
    access: Access,
    slots: Arc<Reconnecting<Slots, RedisStorageError>>,
    nodes: Mutex<HashMap<Host, Node>>,
    /// Whom to ask first where the slots are: another one each time.
    first: AtomicUsize,
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Host>, access: Access) -> Self {
        let names: Vec<String> = seeds.iter().map(Host::to_string).collect();
        let slots = Reconnecting::new(&format!("the cluster of {}", names.join(",")));
        Self(Arc::new(Shared { seeds, access, slots, nodes: Mutex::default(), first: AtomicUsize::new(0) }))
    }

    /// As [`Link::run`](super::Link::run).
    pub(super) async fn run(&self, command: &Cmd, deadline: Instant) -> Result<Value, RedisStorageError> {
        let slots = self.slots(deadline).await?;
        let slot = slot_of(command);
        let Some(holder) = slots.holder(slot) else {
            self.renew();
            return Err(RedisStorageError::unreached(self.name(), format!("no node holds slot {slot}")));
        };
        let (mut host, mut asking) = (holder.clone(), false);
        for last in (0..TRIES).map(|tries| tries + 1 == TRIES) {
            let node = self.0.node(&host);
            let reply =
                if asking { node.run_asking(command, deadline).await } else { node.run(command, deadline).await };
            let Err(error) = &reply else { return reply };
            let redirect = error.redirect();
            if redirect.is_none() && error.doubts_the_map() || matches!(redirect, Some(Redirect::Moved(_))) {
                self.renew();
            }
            match redirect.filter(|_| !last) {
                Some(Redirect::Moved(there)) => (host, asking) = (host.named_by(there), false),
                Some(Redirect::Ask(there)) => (host, asking) = (host.named_by(there), true),
                Some(Redirect::Later) => sleep_until((Instant::now() + LATER).min(deadline)).await,
                None => return reply,
            }
        }
        unreachable!("the last try returns")
    }

    /// Whether all slots have a node, and each of these answers.
    pub(super) async fn look(&self, deadline: Instant) -> Result<(), RedisStorageError> {
        let slots = self.slots(deadline).await?;
        if !slots.is_whole() {
            self.renew();
            return Err(RedisStorageError::unreached(self.name(), "some slots have no node"));
        }
        for host in slots.holders() {
            if let Err(error) = self.0.node(host).ping(deadline).await {
                self.renew();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Every node that holds slots.
    pub(super) async fn nodes(&self, deadline: Instant) -> Result<Vec<Node>, RedisStorageError> {
        let slots = self.slots(deadline).await?;
        Ok(slots.holders().into_iter().map(|host| self.0.node(host)).collect())
    }

    /// Returns a key in a slot of each node, of those that `name` makes.
    pub(super) async fn name_on_each(
        &self,
        deadline: Instant,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<String>, RedisStorageError> {
        let slots = self.slots(deadline).await?;
        Ok(slots.name_on_each(name))
    }

    async fn slots(&self, deadline: Instant) -> Result<Arc<Slots>, RedisStorageError> {
        self.0.slots.get(deadline, || Arc::clone(&self.0).ask()).await
    }

    /// Asks in the background where the slots are now.
    fn renew(&self) {
        self.0.slots.renew(|| Arc::clone(&self.0).ask());
    }

    fn name(&self) -> &str {
        self.0.slots.name()
    }
}

impl Shared {
    fn node(&self, host: &Host) -> Node {
        let mut nodes = self.nodes();
        let known = nodes.get(host).cloned();
        known.unwrap_or_else(|| {
            let node = Node::at(Address::Tcp(host.clone()), self.access.clone());
            nodes.insert(host.clone(), node.clone());
            node
        })
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<Host, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the nodes that are known and those of the URL in turn, until one says where the slots are.
    async fn ask(self: Arc<Self>) -> Result<Slots, RedisStorageError> {
        let mut hosts: Vec<Host> = self.nodes().keys().cloned().collect();
        hosts.extend(self.seeds.iter().filter(|seed| !hosts.contains(seed)).cloned().collect::<Vec<_>>());
        let first = self.first.fetch_add(1, Ordering::Relaxed) % hosts.len();
        hosts.rotate_left(first);
        let name = self.slots.name();
        let asked = timeout(MAP_WITHIN, async {
            let mut last = None;
            for host in &hosts {
                let node = self.node(host);
                match node.run(cmd("CLUSTER").arg("SLOTS"), Instant::now() + EACH_WITHIN).await {
                    Ok(reply) => {
                        if let Some(slots) = Slots::read(&reply, host) {
                            return Ok(slots);
                        }
                        last = last.or(Some(RedisStorageError::unreached(name, format!("{host} knows no slots"))));
                    }
                    Err(error) => last = last.or(Some(error.while_connecting())),
                }
            }
            Err(last.unwrap_or_else(|| RedisStorageError::unreached(name, "there is no node")))
        });
        let late = || Err(RedisStorageError::unreached(name, format!("no answer within {MAP_WITHIN:?}")));
        let slots = asked.await.unwrap_or_else(|_| late())?;
        let holders = slots.holders();
        self.nodes().retain(|host, _| holders.contains(&host));
        Ok(slots)
    }
}

impl Host {
    /// The host that a redirection names; without a name it is this one, with another port.
    fn named_by(&self, redirection: &str) -> Self {
        let named = redirection.rsplit_once(':').and_then(|(name, port)| {
            let name = if matches!(name, "" | "?") { &self.name } else { name };
            Some(Self { name: name.to_owned(), port: port.parse().ok()? })
        });
        named.unwrap_or_else(|| self.clone())
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.0.slots).finish()
    }
}
