//! The [`CasStorage`] over the memcached servers: routes each key to its server.

use std::fmt;
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::MemcachedConnection;
use super::login::MemcachedAccess;
use super::meta::{self, CasId, Reply};
use super::node::{Node, Request};
use super::ring::Ring;
use crate::storage::cas::{RecentTexts, ServerStore, VERSION_LASTS};
use crate::storage::net::WithCalls;
use crate::storage::url::Address;
use crate::storage::{CasStorage, Clock, Loaded, StorageError, StorageErrorKind, Swapped, names, net};
use crate::time::Timestamp;

/// The maximum length of a text in bytes. By default, a server stores items of up to 1 MiB,
/// including the key and a header. Longer texts are not sent, because a server that rejects an item
/// deletes the old one.
const LARGEST: usize = (1 << 20) - 1_024;

/// A client for all servers. Clones share the connections.
#[derive(Clone)]
pub(super) struct Client {
    nodes: Arc<[Node]>,
    ring: Arc<Ring>,
    recent: Arc<RecentTexts<Version>>,
    #[cfg_attr(
        not(any(feature = "memcached-rustls", feature = "testing")),
        allow(dead_code, reason = "nothing reconnects")
    )]
    access: MemcachedAccess,
    #[cfg_attr(not(feature = "memcached-rustls"), allow(dead_code, reason = "nothing reconnects"))]
    machine: Arc<dyn Clock>,
}

/// The CAS value of an item, and the number of the connection that loaded it. `None` if there was
/// no item.
///
/// A server that restarts assigns the same CAS values to other items, so a version is only valid on
/// its connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Version(pub(super) Option<(CasId, u64)>);

impl Client {
    /// Creates a client. It does not connect yet.
    pub(super) fn new(servers: Vec<Address>, access: MemcachedAccess, machine: Arc<dyn Clock>) -> Self {
        let ring = Arc::new(Ring::new(&servers));
        let node = |server| Node::new(server, access.clone(), Arc::clone(&machine));
        Self { nodes: servers.into_iter().map(node).collect(), ring, recent: Arc::default(), access, machine }
    }

    #[cfg(feature = "memcached-rustls")]
    pub(super) fn access(&self) -> &MemcachedAccess {
        &self.access
    }

    /// Returns a client with new connections and another login or TLS settings.
    #[cfg(feature = "memcached-rustls")]
    pub(super) fn with_access(&self, access: MemcachedAccess) -> Self {
        Self::new(self.servers(), access, Arc::clone(&self.machine))
    }

    /// Returns a client with new connections and another machine clock.
    #[cfg(feature = "testing")]
    pub(super) fn reconnected(&self, machine: Arc<dyn Clock>) -> Self {
        Self::new(self.servers(), self.access.clone(), machine)
    }

    #[cfg(any(feature = "memcached-rustls", feature = "testing"))]
    fn servers(&self) -> Vec<Address> {
        self.nodes.iter().map(|node| node.address().clone()).collect()
    }

    /// Returns the server of the key, even if it is down, because another server would start to
    /// count at zero.
    fn node(&self, key: &str) -> &Node {
        &self.nodes[self.ring.index(key)]
    }

    /// Returns the server of the key, and an open connection to it. Waits for one until `deadline`.
    async fn open(
        &self,
        key: &str,
        deadline: tokio::time::Instant,
    ) -> Result<(&Node, Arc<WithCalls<MemcachedConnection>>), StorageError> {
        let within = deadline - tokio::time::Instant::now();
        let node = self.node(key);
        let open = node.open(deadline).await?;
        node.learn_time(&open, within);
        Ok((node, open))
    }
}

impl CasStorage for Client {
    type Error = StorageError;
    type Version = Version;

    fn recall(&self, name: &str) -> Option<Loaded<Version>> {
        let (text, version) = self.recent.recall(name, VERSION_LASTS)?;
        Some(Loaded { text, version, now: Some(self.node(&item_key(name)).time().now()) })
    }

    async fn load(&self, name: &str, deadline: Instant) -> Result<Loaded<Version>, StorageError> {
        let (key, deadline) = (item_key(name), deadline.into());
        let (node, open) = self.open(&key, deadline).await?;
        let request = Request { bytes: meta::get(&key), changes: false };
        let (text, version) = match node.send(&open, request, deadline).await? {
            Reply::Value { cas, text } => {
                // Other programs may have written this item. Bytes that are not UTF-8 may follow the
                // number of a later version, which must stay readable.
                (String::from_utf8_lossy(&text).into_owned(), Some((cas, open.number)))
            }
            Reply::NotFound => (String::new(), None),
            other => return Err(node.unexpected(&open, false, &other)),
        };
        Ok(Loaded { text, version: Version(version), now: Some(node.time().now()) })
    }

    async fn swap(
        &self,
        name: &str,
        version: &Version,
        text: &str,
        time_to_live: Duration,
        deadline: Instant,
    ) -> Result<Swapped<Version>, StorageError> {
        self.recent.forget(name);
        let (key, deadline) = (item_key(name), deadline.into());
        let (node, open) = self.open(&key, deadline).await?;
        let bytes = match version.0 {
            Some((_, connection)) if connection != open.number => return Ok(Swapped::Lost(None)),
            Some((cas, _)) if text.is_empty() => meta::delete(&key, cas),
            None if text.is_empty() => meta::get(&key),
            version => meta::set(&key, text, version.map(|(cas, _)| cas), expiry(time_to_live, node.time().known())),
        };
        let is_get = version.0.is_none() && text.is_empty();
        match node.send(&open, Request { bytes, changes: !is_get }, deadline).await? {
            Reply::Done { cas } if !is_get => {
                if let Some(cas) = cas {
                    self.recent.record(name, text, Version(Some((cas, open.number))));
                }
                Ok(Swapped::Stored)
            }
            Reply::NotFound if is_get => Ok(Swapped::Stored),
            Reply::Value { .. } if is_get => Ok(Swapped::Lost(None)),
            // The item has expired, or was evicted.
            Reply::NotFound if !is_get => {
                let (text, version) = (String::new(), Version(None));
                Ok(Swapped::Lost(Some(Loaded { text, version, now: Some(node.time().now()) })))
            }
            Reply::Exists | Reply::NotStored if !is_get => {
                self.recent.set_shared(name);
                Ok(Swapped::Lost(None))
            }
            other => Err(node.unexpected(&open, !is_get, &other)),
        }
    }

    fn max_text_len(&self) -> Option<usize> {
        Some(LARGEST)
    }
}

impl ServerStore for Client {
    const LABEL: &'static str = "memcached";

    /// Leaves the prefix as it is, because [`item_key`] encodes it with the rest of the key.
    fn encoded_prefix(prefix: &str) -> Arc<str> {
        prefix.into()
    }

    fn name(&self) -> String {
        let names: Vec<&str> = self.nodes.iter().map(Node::name).collect();
        names.join(",")
    }

    /// Returns an error if too many keys are busy, or if all servers are overloaded.
    fn overload(&self, busy_keys: usize) -> Option<StorageError> {
        let mut error =
            (busy_keys >= net::MOST * self.nodes.len()).then(|| StorageError::overloaded(&self.name(), busy_keys));
        if error.is_some() {
            return error;
        }
        for node in &*self.nodes {
            error = Some(node.overload()?);
        }
        error
    }

    /// Checks that all servers reply.
    async fn ping(&self, _: &str, deadline: Instant) -> Result<(), StorageError> {
        for node in &*self.nodes {
            node.ping(deadline.into()).await?;
        }
        Ok(())
    }

    async fn delete_all(&self, _: &str, _: Instant) -> Result<u64, StorageError> {
        let message = "memcached cannot list its keys; use another prefix, or empty the servers with flush_all";
        Err(StorageError::new(StorageErrorKind::Unsupported, message))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&*self.nodes).finish()
    }
}

/// The largest length of a key in the protocol, in bytes.
const LONGEST_KEY: usize = 250;

/// Returns the key of an item: the name of the states, `PREFIX:POLICY|KEY`, with a space as `\s`, `#` as `\h`, `\` as `\\`, and
/// any other byte that is not printable ASCII as `\x0d`. A key of more than 250 bytes is shortened.
fn item_key(name: &str) -> String {
    let mut key = String::with_capacity(name.len() + 8);
    for byte in name.bytes() {
        match byte {
            b' ' => key.push_str("\\s"),
            b'#' => key.push_str("\\h"),
            b'\\' => key.push_str("\\\\"),
            _ if byte.is_ascii_graphic() => key.push(byte.into()),
            _ => write!(key, "\\x{byte:02x}").expect("writing to a string does not fail"),
        }
    }
    names::short(key, LONGEST_KEY)
}

/// The longest relative expiry. A server reads a larger number as an instant, in seconds since
/// 1970.
const MAX_RELATIVE: u64 = 30 * 86_400;

/// No expiry: the item stays until it is evicted. Used for instants after January 2038, which do
/// not fit into 32 bits, and if the server's time is unknown. The states in the text contain their
/// own expiry.
const NEVER: i32 = 0;

/// The margin for the uncertainty of a server's time, in seconds. It is added to an expiry that is
/// an instant, so that the item does not expire early.
const UNCERTAINTY: u64 = 3;

/// Returns the expiry for a text that is kept for `time_to_live`, on a server whose clock shows `now`.
///
/// Servers count in whole seconds, and the first second may end immediately. So one second is
/// added.
///
/// If `now` is unknown, an expiry of more than 30 days is [`NEVER`], because an instant could be in
/// the server's past.
fn expiry(time_to_live: Duration, now: Option<Timestamp>) -> i32 {
    let partial = u64::from(time_to_live.subsec_nanos() > 0);
    let span = time_to_live.as_secs().saturating_add(partial + 1);
    let expiry = match now {
        _ if span <= MAX_RELATIVE => span,
        Some(now) => now.as_secs_ceil().saturating_add(span).saturating_add(UNCERTAINTY),
        None => return NEVER,
    };
    i32::try_from(expiry).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_keys_are_escaped_and_not_shortened() {
        assert_eq!(item_key("rl:fixed-window 2/day|t:alice"), r"rl:fixed-window\s2/day|t:alice");
        let longest = "a".repeat(250);
        assert_eq!(item_key(&longest), longest);
        assert_eq!(item_key("rl:\r\n\u{e9}"), r"rl:\x0d\x0a\xc3\xa9");
        assert_eq!(item_key(r"rl:a\s#"), r"rl:a\\s\h");
    }

    #[test]
    fn long_keys_keep_their_beginning_and_end_with_a_hash() {
        for prefix in ["rl", &"p".repeat(64)] {
            let keys = ["a", "b"].map(|end| item_key(&format!("{prefix}:free|t:{}{end}", "x".repeat(1_000))));
            for key in &keys {
                assert!(key.len() == 250 && key.starts_with(&format!("{prefix}:free|t:xxx")), "{key}");
                assert!(key.bytes().all(|byte| byte.is_ascii_graphic()), "{key}");
            }
            assert_ne!(keys[0], keys[1]);
        }
        // Computed by md5sum.
        assert!(item_key(&format!("rl:{}", "a".repeat(250))).ends_with("#e4280db832ee8e0f3b1d629af1b83f06"));
    }

    /// Guards against this defect: items with an expiry of more than 30 days expired at once.
    #[test]
    fn long_expiries_are_instants() {
        let now = Some(Timestamp::from_micros(1_800_000_000_000_000));
        for (millis, expected) in [
            (0, 1),
            (1, 2),
            (1_000, 2),
            (1_001, 3),
            (2_591_999_000, 2_592_000),
            (2_591_999_001, 1_802_592_004),
            (2_592_000_000, 1_802_592_004),
            (347_483_643_000, i32::MAX),
            (347_483_644_000, NEVER),
            (u64::MAX, NEVER),
        ] {
            assert_eq!(expiry(Duration::from_millis(millis), now), expected, "{millis} ms");
        }
        assert_eq!(expiry(Duration::MAX, now), NEVER);
    }

    #[test]
    fn server_with_an_unknown_clock_gets_no_instant() {
        for (secs, expected) in [(0, 1), (2_591_999, 2_592_000), (2_592_000, NEVER), (u64::MAX, NEVER)] {
            assert_eq!(expiry(Duration::from_secs(secs), None), expected, "{secs} s");
        }
    }
}
