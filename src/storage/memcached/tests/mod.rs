//! What cannot be seen from outside: what one load and one swap do, and how long they take.

mod away;

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::client::{Client, Version};
use super::url::Target;
use super::{MemcachedStorageError, keys};
use crate::storage::servers::{Memcached, Mode, Proxy};
use crate::storage::{CasStorage, Loaded, Swapped};

const DEADLINE: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

/// What a busy machine may add.
const LITTLE: Duration = Duration::from_millis(60);

fn client(url: &str) -> Client {
    let Target { servers, prefix, deadline } = Target::parse(url).unwrap();
    Client::new(servers, &prefix, deadline)
}

/// The answer, which has to be there in time, whatever it is.
async fn timely<T>(answer: impl Future<Output = T>) -> T {
    let started = Instant::now();
    let answer = answer.await;
    assert!(started.elapsed() < DEADLINE + LITTLE, "{:?}", started.elapsed());
    answer
}

async fn load(client: &Client, key: &str) -> Result<Loaded<Version>, MemcachedStorageError> {
    timely(client.load(key)).await
}

async fn text(client: &Client, key: &str) -> String {
    load(client, key).await.unwrap().text
}

/// Whether it was stored.
async fn swap(client: &Client, key: &str, version: &Version, text: &str) -> Result<bool, MemcachedStorageError> {
    Ok(matches!(timely(client.swap(key, version, text, DAY)).await?, Swapped::Stored))
}

/// Writes over whatever is there.
async fn put(client: &Client, key: &str, text: &str) {
    let loaded = load(client, key).await.unwrap();
    assert!(swap(client, key, &loaded.version, text).await.unwrap());
}

/// Until the client works; how long that was.
async fn recovers(client: &Client, key: &str) -> Duration {
    let started = Instant::now();
    while let Err(error) = load(client, key).await {
        assert!(started.elapsed() < 10 * SECOND, "{error}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    started.elapsed()
}

#[tokio::test]
async fn what_stands_there_is_swapped_once() {
    let server = Memcached::start(&[]);
    let client = client(&server.url());
    let nothing = load(&client, "k").await.unwrap();
    assert_eq!(nothing.text, "");
    assert!(swap(&client, "k", &nothing.version, "").await.unwrap(), "nothing is still there");
    assert!(swap(&client, "k", &nothing.version, "one").await.unwrap());
    assert!(!swap(&client, "k", &nothing.version, "other").await.unwrap());
    assert!(!swap(&client, "k", &nothing.version, "").await.unwrap());
    let one = load(&client, "k").await.unwrap();
    assert_eq!(one.text, "one");
    assert!(swap(&client, "k", &one.version, "two\r\nlines").await.unwrap());
    assert!(!swap(&client, "k", &one.version, "three").await.unwrap());
    assert!(!swap(&client, "k", &one.version, "").await.unwrap());
    let two = load(&client, "k").await.unwrap();
    assert_eq!(two.text, "two\r\nlines");
    assert!(swap(&client, "k", &two.version, "").await.unwrap());
    assert_eq!(server.ask("mg rl:k"), ["EN"]);
    assert!(!swap(&client, "k", &two.version, "three").await.unwrap(), "what is gone is not written over");
    assert!(!swap(&client, "k", &two.version, "").await.unwrap());
    // The same text under the same key is another writing.
    put(&client, "k", "one").await;
    assert!(!swap(&client, "k", &one.version, "four").await.unwrap());
    server.ask("ms rl:k 2\r\n\u{e9}");
    assert_eq!(text(&client, "k").await, "\u{e9}");
    assert_eq!(server.ask("mg rl:k"), ["HD"]);
}

/// Field defect: after a get that was cancelled the next one returned its value.
#[tokio::test]
async fn whoever_goes_away_shifts_nobodys_answer() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let client = client(&format!("memcached://127.0.0.1:{}?deadline=5s", proxy.port()));
    for name in ["a", "b", "c"] {
        client.swap(name, &client.load(name).await.unwrap().version, &name.repeat(9), DAY).await.unwrap();
    }
    proxy.set(Mode::Delay(Duration::from_millis(20)));
    for patience in [0, 1, 5, 10, 15, 19] {
        let dropped = tokio::time::timeout(Duration::from_millis(patience), client.load("a")).await;
        assert!(dropped.is_err());
        let (b, c, gone) = tokio::join!(
            client.load("b"),
            client.load("c"),
            tokio::time::timeout(Duration::from_millis(patience), client.load("a")),
        );
        assert!(gone.is_err());
        assert_eq!((&*b.unwrap().text, &*c.unwrap().text), ("bbbbbbbbb", "ccccccccc"));
        let nothing = Version::default();
        let dropped = client.swap("a", &nothing, "x", DAY);
        assert!(tokio::time::timeout(Duration::from_millis(patience), dropped).await.is_err());
        assert_eq!(client.load("a").await.unwrap().text, "aaaaaaaaa");
    }
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn a_swap_is_never_sent_twice() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let client = client(&format!("memcached://127.0.0.1:{}", proxy.port()));
    for (mode, is_stored) in
        [(Mode::SwallowReplies, true), (Mode::CutAtReply, true), (Mode::Garbage, true), (Mode::SwallowRequests, false)]
    {
        recovers(&client, "k").await;
        let before = server.stat("cmd_set");
        let version = load(&client, "k").await.unwrap().version;
        proxy.set(mode);
        let error = swap(&client, "k", &version, &format!("{mode:?}")).await.unwrap_err();
        assert!(error.may_have_counted(), "{mode:?}: {error}");
        let error = load(&client, "k").await.unwrap_err();
        assert!(!error.may_have_counted(), "{mode:?}: {error}");
        proxy.set(Mode::Pass);
        proxy.cut();
        recovers(&client, "k").await;
        assert_eq!(server.stat("cmd_set") - before, u64::from(is_stored), "{mode:?}");
        assert_eq!(text(&client, "k").await == format!("{mode:?}"), is_stored);
    }
}

/// What a proxy says for a server that is away; it may have passed the request on.
#[tokio::test]
async fn what_a_proxy_says_for_a_server_may_have_counted() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = client(&format!("memcached://{}", listener.local_addr().unwrap()));
    let proxy = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = tokio::io::BufReader::new(stream);
        let mut line = String::new();
        while stream.read_line(&mut line).await.unwrap() > 0 {
            let reply = match line.get(..2) {
                Some("mn") => "MN\r\n",
                Some("mg") => "EN\r\n",
                Some("ms") if line.contains("big") => "SERVER_ERROR object too large for cache\r\n",
                Some("ms") => "SERVER_ERROR Host is down\r\n",
                _ => "",
            };
            stream.get_mut().write_all(reply.as_bytes()).await.unwrap();
            line.clear();
        }
    });
    for (key, counted) in [("k", true), ("big", false)] {
        let version = load(&client, key).await.unwrap().version;
        let error = swap(&client, key, &version, "x").await.unwrap_err();
        assert_eq!(error.may_have_counted(), counted, "{error}");
    }
    proxy.abort();
}

/// Field defect: one lock around each call.
#[tokio::test]
async fn calls_do_not_wait_for_each_other() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let client = client(&format!("memcached://127.0.0.1:{}", proxy.port()));
    recovers(&client, "k").await;
    proxy.set(Mode::Delay(Duration::from_millis(30)));
    let mut many: JoinSet<_> = JoinSet::new();
    for number in 0..200 {
        let client = client.clone();
        many.spawn(async move { swap(&client, &format!("k{number}"), &Version::default(), "x").await.unwrap() });
    }
    assert!(many.join_all().await.into_iter().all(|stored| stored));
    assert_eq!(proxy.connections(), 1);
}

/// Field defect: what is to expire in more than 30 days is gone at once.
#[tokio::test]
async fn everything_stays_as_long_as_it_is_to() {
    let server = Memcached::start(&[]);
    let client = client(&server.url());
    for (days, least, most) in
        [(1, 86_400, 86_402), (30, 2_592_000, 2_592_002), (31, 2_678_400, 2_678_402), (36_500, -1, -1)]
    {
        let key = format!("{days}");
        let stored = client.swap(&key, &Version::default(), "x", DAY * days).await.unwrap();
        assert!(matches!(stored, Swapped::Stored), "{days} days");
        let told = server.ask(&format!("mg rl:{key} t"));
        let left: i64 = told[0].strip_prefix("HD t").unwrap().parse().unwrap();
        assert!((least..=most).contains(&left), "{days} days: {left} seconds");
    }
    for (millis, key) in [(0, "a"), (1, "b"), (1_500, "c")] {
        let _ = client.swap(key, &Version::default(), "x", Duration::from_millis(millis)).await.unwrap();
        let stored_at = Instant::now();
        while text(&client, key).await == "x" {
            assert!(stored_at.elapsed() < 5 * SECOND, "{millis} ms");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(stored_at.elapsed() >= Duration::from_millis(millis), "{millis} ms: {:?}", stored_at.elapsed());
    }
}

/// A server that is asked to keep too much drops what was there.
#[tokio::test]
async fn the_longest_text_can_be_kept_under_the_longest_key() {
    let server = Memcached::start(&[]);
    let client = client(&format!("{}?deadline=5s&prefix={}", server.url(), "p".repeat(64)));
    let (key, longest, nothing) = ("k".repeat(500), client.longest().unwrap(), Version::default());
    assert!(matches!(client.swap(&key, &nothing, &"x".repeat(longest), DAY).await.unwrap(), Swapped::Stored));
    let there = client.load(&key).await.unwrap();
    assert_eq!(there.text.len(), longest);
    assert!(matches!(client.swap(&key, &there.version, &"y".repeat(longest), DAY).await.unwrap(), Swapped::Stored));

    let small = Memcached::start(&["-I", "512k"]);
    let client = self::client(&small.url());
    let error = swap(&client, "k", &nothing, &"x".repeat(600_000)).await.unwrap_err();
    assert!(error.to_string().contains("object too large for cache (start it with a larger -I"), "{error}");
    assert!(!error.may_have_counted());
    put(&client, "k", "fits").await;
    assert_eq!(text(&client, "k").await, "fits", "the connection is as good as before");
}

#[tokio::test]
async fn keys_of_any_length_and_kind_are_kept_apart() {
    let server = Memcached::start(&[]);
    let client = client(&server.url());
    let long = "long".repeat(100);
    let names =
        ["a b", "a%20b", r"a\sb", "a#b", "x\r\nmn", &long, &format!("{long}2"), &"k".repeat(247), &"k".repeat(248)];
    for name in names {
        put(&client, name, name).await;
    }
    for name in names {
        assert_eq!(text(&client, name).await, name);
    }
    assert_eq!(server.ask(r"mg rl:a\sb"), ["HD"]);
    assert_eq!(server.ask(&format!("mg {}", keys::key("rl", &long))), ["HD"]);
}
