//! Sentinels, who know which server is the primary.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redis::{Value, cmd};
use tokio::time::Instant;

use super::super::error::RedisStorageError;
use super::super::url::Access;
use super::connect::Connection;
use super::node::Node;
use crate::storage::url::{Address, Host, Login};

/// How long one sentinel may take.
const EACH_WITHIN: Duration = Duration::from_millis(200);

/// While the primary is in use, they are asked again so often.
const AGAIN: Duration = Duration::from_secs(1);

pub(super) struct Sentinels {
    all: Vec<Node>,
    /// The one that answered last.
    first: AtomicUsize,
    service: String,
    /// How to be let in by the primary.
    access: Access,
    asked_at: Mutex<Instant>,
}

impl Sentinels {
    pub(super) fn new(hosts: Vec<Host>, service: String, login: Login, access: Access) -> Self {
        let to_sentinels = Access { login, db: 0, tls: access.tls.clone() };
        let all = hosts.into_iter().map(|host| Node::at(Address::Tcp(host), to_sentinels.clone())).collect();
        Self { all, first: AtomicUsize::new(0), service, access, asked_at: Mutex::new(Instant::now()) }
    }

    /// Connects to the primary, or whom they take for it: it has to say so itself.
    pub(super) async fn connect(&self) -> Result<(Connection, Address), RedisStorageError> {
        let address = Address::Tcp(self.primary().await?);
        let (connection, role) = Connection::open(&address, &self.access, &cmd("ROLE")).await?;
        if !matches!(&role, Value::Array(parts) if parts.first().and_then(text) == Some("master")) {
            let why = format!("the sentinels name {address}, which does not say by ROLE that it is one");
            return Err(RedisStorageError::unreached(&self.to_string(), why));
        }
        Ok((connection, address))
    }

    /// Where the primary is, by the first of them who knows.
    pub(super) async fn primary(&self) -> Result<Host, RedisStorageError> {
        let mut asking = cmd("SENTINEL");
        asking.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let (first, count) = (self.first.load(Ordering::Relaxed), self.all.len());
        let mut last = None;
        for at in (0..count).map(|step| (first + step) % count) {
            match self.all[at].run(&asking, Instant::now() + EACH_WITHIN).await {
                Ok(reply) => {
                    if let Some(host) = host(&reply) {
                        self.first.store(at, Ordering::Relaxed);
                        return Ok(host);
                    }
                    let why = format!("{} knows no service {:?}", self.all[at].name(), self.service);
                    last = Some(RedisStorageError::unreached(&self.to_string(), why));
                }
                Err(error) => last = last.or(Some(error.while_connecting())),
            }
        }
        Err(last.unwrap_or_else(|| RedisStorageError::unreached(&self.to_string(), "there is no sentinel")))
    }

    /// Whether to ask again where the primary is, which is said to one caller.
    pub(super) fn is_time_to_ask(&self) -> bool {
        let mut asked_at = self.asked_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_time = asked_at.elapsed() >= AGAIN;
        if is_time {
            *asked_at = Instant::now();
        }
        is_time
    }
}

fn host(reply: &Value) -> Option<Host> {
    let Value::Array(parts) = reply else { return None };
    let [name, port] = parts.as_slice() else { return None };
    Some(Host { name: text(name)?.to_owned(), port: text(port)?.parse().ok()? })
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of its sentinels", self.service)
    }
}
