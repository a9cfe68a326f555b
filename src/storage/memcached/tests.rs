//! Tests of the client against a fake server.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use super::client::{Client, Version};
use crate::storage::cas::ServerStore;
use crate::storage::net::MOST;
use crate::storage::{CasStorage, Loaded, MemcachedStorage, StorageError, Swapped};
use crate::time::Timestamp;

const DAY: Duration = Duration::from_secs(86_400);

/// A fake server that implements the meta commands that this crate sends. Clones share its state.
#[derive(Clone, Default)]
struct FakeServer(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The version and the data of each key.
    items: HashMap<String, (u64, Vec<u8>)>,
    /// The last version that was assigned.
    last: u64,
    connections: Vec<AbortHandle>,
    /// Scripted replies to writes: a part of the key, and the reply to a write of such a key.
    scripted: Vec<(&'static str, &'static str)>,
    /// The seconds by which the server's clock is ahead. With `None`, the server does not support
    /// `stats`.
    ahead: Option<u64>,
    /// The expiry of the last write.
    expiry: u64,
}

impl FakeServer {
    async fn start() -> (Self, Client) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("memcached://{}", listener.local_addr().unwrap());
        let server = Self::default();
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let serving = tokio::spawn(accepting.clone().serve(stream));
                accepting.0.lock().unwrap().connections.push(serving.abort_handle());
            }
        });
        (server, MemcachedStorage::new(&url).unwrap().0.store().clone())
    }

    async fn serve(self, stream: TcpStream) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while stream.read_line(&mut line).await? > 0 {
            let words: Vec<&str> = line.split_whitespace().collect();
            let mut data = Vec::new();
            if words[0] == "ms" {
                data.resize(words[2].parse::<usize>().unwrap() + 2, 0);
                stream.read_exact(&mut data).await?;
                data.truncate(data.len() - 2);
            }
            let reply = self.0.lock().unwrap().reply(&words, data);
            stream.write_all(&reply).await?;
            line.clear();
        }
        Ok(())
    }

    /// Deletes all items, restarts the versions, and closes all connections.
    fn restart(&self) {
        let before = std::mem::take(&mut *self.0.lock().unwrap());
        before.connections.iter().for_each(AbortHandle::abort);
    }

    fn item(&self, key: &str) -> Option<(u64, Vec<u8>)> {
        self.0.lock().unwrap().items.get(key).cloned()
    }
}

impl State {
    fn reply(&mut self, words: &[&str], data: Vec<u8>) -> Vec<u8> {
        let &[verb, ref rest @ ..] = words else { panic!("an empty line") };
        if verb == "version" {
            return b"VERSION 1.6.18\r\n".to_vec();
        }
        if verb == "mn" {
            return b"MN\r\n".to_vec();
        }
        if verb == "stats" {
            let time = self.ahead.map(|ahead| Timestamp::wall_clock().as_micros() / 1_000_000 + ahead);
            return time.map_or("ERROR\r\n".into(), |time| format!("STAT pid 1\r\nSTAT time {time}\r\nEND\r\n").into());
        }
        let key = rest[0];
        self.expiry = rest.iter().find_map(|word| word.strip_prefix('T')?.parse().ok()).unwrap_or(self.expiry);
        if verb == "ms"
            && let Some((_, reply)) = self.scripted.iter().find(|(part, _)| key.contains(part))
        {
            return reply.as_bytes().to_vec();
        }
        let version = self.items.get(key).map(|(version, _)| *version);
        let expected = rest.iter().skip(1).find_map(|word| word.strip_prefix('C')?.parse::<u64>().ok());
        let reply: &[u8] = match (verb, version, expected) {
            ("mg", Some(version), _) => {
                let data = &self.items[key].1;
                return [format!("VA {} c{version}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat();
            }
            ("mg", None, _) => b"EN\r\n",
            ("ms" | "md", None, Some(_)) => b"NF\r\n",
            ("ms" | "md", Some(version), Some(expected)) if version != expected => b"EX\r\n",
            // `ME` stores only if the item does not exist.
            ("ms", Some(_), None) if rest.contains(&"ME") => b"NS\r\n",
            ("ms", ..) => {
                self.last += 1;
                self.items.insert(key.to_owned(), (self.last, data));
                return format!("HD c{}\r\n", self.last).into();
            }
            ("md", ..) => {
                self.items.remove(key);
                b"HD\r\n"
            }
            _ => b"ERROR\r\n",
        };
        reply.to_vec()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

async fn load(client: &Client, key: &str) -> Result<Loaded<Version>, StorageError> {
    client.load(key, soon()).await
}

async fn text(client: &Client) -> String {
    load(client, "k").await.unwrap().text
}

/// Returns `true` if the text was stored.
async fn swap(client: &Client, key: &str, version: &Version, text: &str) -> Result<bool, StorageError> {
    Ok(matches!(client.swap(key, version, text, DAY, soon()).await?, Swapped::Stored))
}

async fn put(client: &Client, text: &str) {
    let version = load(client, "k").await.unwrap().version;
    assert!(swap(client, "k", &version, text).await.unwrap());
}

#[tokio::test]
async fn swap_stores_only_in_place_of_the_loaded_version() {
    let (server, client) = FakeServer::start().await;
    let swap = async |version: &Version, text: &str| swap(&client, "k", version, text).await.unwrap();
    let nothing = load(&client, "k").await.unwrap();
    assert_eq!(nothing.text, "");
    assert!(swap(&nothing.version, "").await, "there is no item yet");
    assert!(swap(&nothing.version, "one").await);
    assert!(!swap(&nothing.version, "other").await);
    assert!(!swap(&nothing.version, "").await);
    let one = load(&client, "k").await.unwrap();
    assert_eq!(one.text, "one");
    assert!(swap(&one.version, "two\r\nlines").await);
    assert!(!swap(&one.version, "three").await);
    assert!(!swap(&one.version, "").await);
    let two = load(&client, "k").await.unwrap();
    assert_eq!(two.text, "two\r\nlines");
    assert!(swap(&two.version, "").await);
    assert_eq!(server.item("k"), None);
    assert!(!swap(&two.version, "three").await, "the item was removed");
    assert!(!swap(&two.version, "").await);
    // The same text gets a new version.
    put(&client, "one").await;
    assert!(!swap(&one.version, "four").await);
    put(&client, "\u{e9}").await;
    assert_eq!(text(&client).await, "\u{e9}");
}

/// A restarted server assigns the same versions again.
#[tokio::test]
async fn version_from_before_a_restart_swaps_nothing() {
    let (server, client) = FakeServer::start().await;
    put(&client, "before").await;
    let (before, recalled) = (load(&client, "k").await.unwrap(), client.recall("k").unwrap());
    let (version, _) = server.item("k").unwrap();
    server.restart();
    while load(&client, "k").await.is_err() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    put(&client, "after").await;
    assert_eq!(server.item("k"), Some((version, b"after".to_vec())), "the same version of another item");
    assert_eq!(recalled.version.0.map(|(cas, _)| cas), Some(version));
    assert!(!swap(&client, "k", &recalled.version, "late").await.unwrap());
    assert!(!swap(&client, "k", &before.version, "late").await.unwrap());
    assert_eq!(text(&client).await, "after");
}

/// A proxy replies for a server that is down. It may have forwarded the request.
#[tokio::test]
async fn error_reply_of_a_proxy_may_have_counted() {
    let (server, client) = FakeServer::start().await;
    server.0.lock().unwrap().scripted =
        vec![("big", "SERVER_ERROR object too large for cache\r\n"), ("k", "SERVER_ERROR Host is down\r\n")];
    for (key, may_have_counted) in [("k", true), ("big", false)] {
        let version = load(&client, key).await.unwrap().version;
        let error = swap(&client, key, &version, "x").await.unwrap_err();
        assert_eq!(error.may_have_counted(), may_have_counted, "{error}");
    }
}

/// A later version may store bytes that are not UTF-8 after its number.
#[tokio::test]
async fn bytes_of_a_later_version_are_not_overwritten() {
    let (server, client) = FakeServer::start().await;
    put(&client, "x").await;
    let bytes = b"v9\xff\xfe".to_vec();
    let stored = (7, bytes.clone());
    server.0.lock().unwrap().items.insert("k".to_owned(), stored.clone());
    assert!(text(&client).await.starts_with("v9"), "the version can be read");
    assert_eq!(server.item("k"), Some(stored));
}

/// The clock of a server may be 90 days ahead. An instant of this machine's clock, 60 days from
/// now, is in the server's past, so the item would expire at once.
#[tokio::test]
async fn long_expiries_are_instants_of_the_servers_clock() {
    let keep = 60 * DAY;
    for (ahead, expected) in [(Some(90 * 86_400), Some(150 * 86_400)), (Some(0), Some(60 * 86_400)), (None, None)] {
        let (server, client) = FakeServer::start().await;
        server.0.lock().unwrap().ahead = ahead;
        let loaded = load(&client, "k").await.unwrap();
        let now = Timestamp::wall_clock().as_micros() / 1_000_000;
        let seen = loaded.now.unwrap().as_micros() / 1_000_000;
        assert!(
            seen.abs_diff(now + ahead.unwrap_or(0)) <= 2,
            "server time {seen}, machine time {now}, ahead by {ahead:?}"
        );
        assert!(matches!(client.swap("k", &loaded.version, "x", keep, soon()).await, Ok(Swapped::Stored)));
        let expiry = server.0.lock().unwrap().expiry;
        match expected {
            Some(after) => {
                assert!((now + after..now + after + 8).contains(&expiry), "expiry {expiry}, machine time {now}");
            }
            None => assert_eq!(expiry, 0, "the item never expires"),
        }
        // Short expiries are relative, so clocks do not matter.
        let version = load(&client, "k").await.unwrap().version;
        assert!(matches!(client.swap("k", &version, "y", DAY, soon()).await, Ok(Swapped::Stored)));
        assert_eq!(server.0.lock().unwrap().expiry, 86_401);
    }
}

#[test]
fn overload_names_the_servers() {
    let storage = MemcachedStorage::new("memcached://one,two").unwrap();
    let error = storage.0.store().overload(2 * MOST).unwrap();
    let expected = "overloaded: 2048 calls to one:11211,two:11211 are in flight, this call was not sent";
    assert_eq!((error.to_string().as_str(), error.may_have_counted()), (expected, false));
}
