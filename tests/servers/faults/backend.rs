//! The backends of the suite: a storage, a policy, and the server that they need.

use std::time::Duration;

use common::servers::{Etcd, FaultyServer, Memcached, Postgres, Server, with_timeout};
use common::{foreign, policy};
use tower_ratelimit::Policy;
use tower_ratelimit::storage::{AnyStorage, EtcdStorage, MemcachedStorage, PostgresStorage, RedisStorage};

/// A storage on one server.
pub(crate) trait Backend: 'static {
    type Server: FaultyServer;

    /// The tolerance for results after their timeout on a busy machine.
    const MARGIN: Duration = Duration::from_millis(60);

    /// The time after which a login whose packets were lost is repeated. By default, several tries
    /// overlap.
    const LOGIN: Duration = Duration::ZERO;

    /// `true` if the client closes a connection without replies after some seconds, whatever the timeout.
    const HAS_KEEP_ALIVE: bool = false;

    /// `true` if the client cancels a call after three quarters of its timeout.
    const CANCELS_CALLS: bool = false;

    /// `true` if a hit reads the state before it sends the write.
    const READS_FIRST: bool;

    /// `true` if a hit reads the state first, unless the process has stored the last one of the key. It
    /// also does so after a hit that has failed.
    const REMEMBERS: bool = false;

    /// `true` if the server keeps its counts over a restart.
    const KEEPS_COUNTS: bool;

    /// Returns a storage on the server behind a port.
    fn storage(port: u16, timeout: Duration) -> AnyStorage;

    /// Returns a policy that admits `limit` units per day.
    fn policy(limit: u32) -> Policy {
        policy(&format!("fixed-window {limit}/day; moving-window {limit}/day"))
    }

    /// Drops the caches of the server, for example its scripts.
    fn flush_caches(_: &Self::Server) {}
}

/// A backend whose server sends each reply as one packet, so that a proxy can count replies.
pub(crate) trait CountsReplies: Backend {
    /// The number of replies before a hit sends its write.
    const REPLIES_BEFORE_COUNTING: usize;

    /// Returns the number of executed commands that count a hit.
    fn writes(server: &Self::Server) -> u64;
}

/// Redis with a policy that a script decides.
pub(crate) struct Redis;

impl Backend for Redis {
    type Server = Server;

    const READS_FIRST: bool = false;
    const KEEPS_COUNTS: bool = false;

    fn storage(port: u16, timeout: Duration) -> AnyStorage {
        AnyStorage::new(RedisStorage::new(&format!("redis://127.0.0.1:{port}?timeout={timeout:?}")).unwrap())
    }

    fn flush_caches(server: &Server) {
        server.ask(&["SCRIPT", "FLUSH"]);
    }
}

impl CountsReplies for Redis {
    const REPLIES_BEFORE_COUNTING: usize = 0;

    fn writes(server: &Server) -> u64 {
        server.calls("evalsha") + server.calls("eval")
    }
}

/// Redis with a policy whose strategy has no script, so compare-and-swap decides.
pub(crate) struct RedisSwap;

impl Backend for RedisSwap {
    type Server = Server;

    const READS_FIRST: bool = true;
    const KEEPS_COUNTS: bool = false;

    fn storage(port: u16, timeout: Duration) -> AnyStorage {
        Redis::storage(port, timeout)
    }

    fn policy(limit: u32) -> Policy {
        foreign(limit)
    }

    fn flush_caches(server: &Server) {
        Redis::flush_caches(server);
    }
}

impl CountsReplies for RedisSwap {
    const REPLIES_BEFORE_COUNTING: usize = 1;

    fn writes(server: &Server) -> u64 {
        server.calls("set")
    }
}

pub(crate) struct MemcachedServer;

impl Backend for MemcachedServer {
    type Server = Memcached;

    const READS_FIRST: bool = false;
    const REMEMBERS: bool = true;
    const KEEPS_COUNTS: bool = false;

    fn storage(port: u16, timeout: Duration) -> AnyStorage {
        let url = format!("memcached://127.0.0.1:{port}?long-logs=allow");
        AnyStorage::new(MemcachedStorage::new(&with_timeout(&url, timeout)).unwrap())
    }
}

impl CountsReplies for MemcachedServer {
    const REPLIES_BEFORE_COUNTING: usize = 0;

    fn writes(server: &Memcached) -> u64 {
        server.stat("cmd_set")
    }
}

/// An etcd of one member.
pub(crate) struct EtcdMember;

impl Backend for EtcdMember {
    type Server = Etcd;

    const MARGIN: Duration = common::harness::MARGIN;
    const HAS_KEEP_ALIVE: bool = true;
    const READS_FIRST: bool = false;
    const REMEMBERS: bool = true;
    const KEEPS_COUNTS: bool = true;

    fn storage(port: u16, timeout: Duration) -> AnyStorage {
        let url = format!("etcd://127.0.0.1:{port}?long-logs=allow");
        AnyStorage::new(EtcdStorage::new(&with_timeout(&url, timeout)).unwrap())
    }
}

/// A PostgreSQL, with one connection so that tests can count them.
pub(crate) struct PostgresServer;

impl Backend for PostgresServer {
    type Server = Postgres;

    const MARGIN: Duration = common::harness::MARGIN;
    /// Each login takes a backend, so there is one at a time.
    const LOGIN: Duration = Duration::from_secs(1);
    const CANCELS_CALLS: bool = true;
    const READS_FIRST: bool = false;
    const KEEPS_COUNTS: bool = true;

    fn storage(port: u16, timeout: Duration) -> AnyStorage {
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres?connections=1&long-logs=allow");
        AnyStorage::new(PostgresStorage::new(&with_timeout(&url, timeout)).unwrap())
    }
}
