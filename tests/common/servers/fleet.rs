//! Redis Cluster and Redis Sentinel.

use super::{Server, wait_until};

/// Three primaries that share the slots. While a node is down, only its own slots are unavailable.
#[derive(Debug)]
pub struct Cluster {
    pub nodes: Vec<Server>,
}

/// The slots of node `n` end before `ENDS[n]`.
const ENDS: [u16; 3] = [5_461, 10_923, 16_384];

impl Cluster {
    pub fn start() -> Self {
        let nodes: Vec<Server> = ENDS.iter().map(|_| cluster_node()).collect();
        let mut first = 0;
        for (epoch, (node, end)) in nodes.iter().zip(ENDS).enumerate() {
            let slots: Vec<String> = (first..end).map(|slot| slot.to_string()).collect();
            let adding: Vec<&str> =
                ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
            ok(node, &adding);
            ok(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(epoch + 1).to_string()]);
            first = end;
        }
        let cluster = Self { nodes };
        wait_until("the nodes know each other", || {
            // All of them must have greeted the first one.
            let met = cluster.nodes[1..].iter().map(|node| meets(node, &cluster.nodes[0], 3)).collect::<Vec<_>>();
            met == [true, true] && known(&cluster.nodes[0]) == 3
        });
        cluster.wait_until_complete();
        cluster
    }

    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    pub fn wait_until_complete(&self) {
        for node in &self.nodes {
            wait_until("the cluster is complete", || {
                let info = node.ask(&["CLUSTER", "INFO"]).to_string();
                let whole = ["cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3", "cluster_size:3"];
                whole.iter().all(|part| info.contains(part))
            });
        }
    }

    /// Starts a replica of a node. It replaces the node when the node fails.
    pub fn start_replica(&self, of: usize) -> Server {
        let replica = cluster_node();
        wait_until("all nodes know the replica", || {
            meets(&replica, &self.nodes[of], 4) && self.nodes.iter().all(|node| known(node) == 4)
        });
        let id = self.id(of);
        wait_until("the replica knows its primary", || replica.ask(&["CLUSTER", "REPLICATE", &id]).to_string() == "OK");
        replica
    }

    /// Returns the node that initially has this slot.
    pub fn home(slot: u16) -> usize {
        ENDS.iter().position(|end| slot < *end).unwrap()
    }

    /// Returns the slot of a key.
    pub fn slot(&self, key: &str) -> u16 {
        self.nodes[0].ask(&["CLUSTER", "KEYSLOT", key]).to_string().parse().unwrap()
    }

    /// Begins to move the slot of a key from its initial node to the next one.
    pub fn begin_move(&self, key: &str) -> SlotMove<'_> {
        let slot = self.slot(key);
        let from = Self::home(slot);
        let moving = SlotMove { cluster: self, slot, from, to: (from + 1) % self.nodes.len() };
        moving.set(moving.to, "IMPORTING", moving.from);
        moving.set(moving.from, "MIGRATING", moving.to);
        moving
    }

    pub fn id(&self, node: usize) -> String {
        self.nodes[node].ask(&["CLUSTER", "MYID"]).to_string()
    }
}

/// A slot that moves from one node to another.
#[derive(Debug)]
pub struct SlotMove<'a> {
    cluster: &'a Cluster,
    slot: u16,
    from: usize,
    /// The number of the new node.
    pub to: usize,
}

impl SlotMove<'_> {
    /// Moves a key to the new node.
    pub fn migrate(&self, key: &str) {
        let port = self.cluster.nodes[self.to].port().to_string();
        ok(&self.cluster.nodes[self.from], &["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
    }

    /// Ends the move, after which both nodes know that the slot is on the new one.
    pub fn end(self) {
        self.set(self.to, "NODE", self.to);
        self.set(self.from, "NODE", self.to);
    }

    fn set(&self, node: usize, state: &str, other: usize) {
        let (slot, id) = (self.slot.to_string(), self.cluster.id(other));
        ok(&self.cluster.nodes[node], &["CLUSTER", "SETSLOT", &slot, state, &id]);
    }
}

/// Returns the number of nodes that a node knows, including itself.
fn known(node: &Server) -> usize {
    node.ask(&["CLUSTER", "NODES"]).to_string().lines().filter(|line| !line.contains("handshake")).count()
}

/// Returns `true` if a node knows all nodes. Otherwise, it greets another one. A handshake that takes longer
/// than the timeout of the nodes is given up.
fn meets(node: &Server, other: &Server, nodes: usize) -> bool {
    let knows = known(node) == nodes;
    if !knows {
        ok(node, &["CLUSTER", "MEET", "127.0.0.1", &other.port().to_string()]);
    }
    knows
}

fn cluster_node() -> Server {
    let options = "--cluster-enabled yes --cluster-node-timeout 1000 --cluster-require-full-coverage no \
                   --repl-diskless-sync-delay 0";
    Server::start(&options.split_whitespace().collect::<Vec<_>>())
}

/// Waits until the replica has received all writes of its primary.
pub fn wait_until_replicated(primary: &Server, replica: &Server) {
    let offset = |server: &Server| {
        let info = server.ask(&["INFO", "replication"]).to_string();
        info.lines().find_map(|line| line.strip_prefix("master_repl_offset:").map(str::to_owned)).unwrap()
    };
    wait_until("the replica has received all writes", || {
        replica.ask(&["INFO", "replication"]).to_string().contains("master_link_status:up")
            && offset(primary) == offset(replica)
    });
}

/// A primary, its replica, and three sentinels that name them `mymaster`.
#[derive(Debug)]
pub struct Sentinels {
    pub servers: Vec<Server>,
    pub sentinels: Vec<Server>,
}

impl Sentinels {
    pub fn start() -> Self {
        let primary = Server::start(&["--repl-diskless-sync-delay", "0"]);
        let port = primary.port().to_string();
        let replica = Server::start(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
        let sentinels = (0..3).map(|_| sentinel(&port)).collect();
        let all = Self { servers: vec![primary, replica], sentinels };
        for sentinel in &all.sentinels {
            wait_until("the sentinels know each other", || {
                let known = sentinel.ask(&["SENTINEL", "MASTER", "mymaster"]).to_string();
                let replicas = sentinel.ask(&["SENTINEL", "REPLICAS", "mymaster"]).to_string();
                known.contains(" num-slaves 1 ")
                    && known.contains(" num-other-sentinels 2 ")
                    // The sentinel has asked the replica.
                    && replicas.contains(" master-link-status ok ")
            });
        }
        wait_until("the replica is in sync", || {
            all.servers[1].ask(&["INFO", "replication"]).to_string().contains("master_link_status:up")
        });
        all
    }

    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("redis+sentinel://{}/mymaster", hosts.join(","))
    }
}

fn sentinel(primary: &str) -> Server {
    let lines = [
        format!("sentinel monitor mymaster 127.0.0.1 {primary} 2"),
        "sentinel down-after-milliseconds mymaster 500".to_owned(),
        "sentinel failover-timeout mymaster 2000".to_owned(),
    ];
    Server::configured(&lines.join("\n"), &["--sentinel"])
}

fn ok(server: &Server, command: &[&str]) {
    let reply = server.ask(command).to_string();
    assert_eq!(reply, "OK", "{:?}", &command[..2]);
}
