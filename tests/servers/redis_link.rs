//! `RedisStorage` and its servers: what a URL may say, and what happens when a server goes away and comes back.

use std::time::{Duration, Instant};

use tower_ratelimit::storage::{RedisStorage, RedisStorageError};

use common::servers::{Cluster, Mode, Proxy, Sentinels, Server};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(10);

/// Time out here means that something hung.
const LITTLE: Duration = Duration::from_millis(60);

fn storage(url: &str) -> RedisStorage {
    RedisStorage::new(url).unwrap_or_else(|error| panic!("{error}"))
}

/// What is wrong, which is known within `timeout`.
async fn fails(storage: &RedisStorage, timeout: Duration) -> RedisStorageError {
    let started = Instant::now();
    let error = storage.ready(timeout).await.unwrap_err();
    assert!(started.elapsed() < timeout + LITTLE, "{:?}: {error}", started.elapsed());
    error
}

/// How long it takes until the servers answer.
async fn recovers(storage: &RedisStorage) -> Duration {
    let started = Instant::now();
    storage.ready(LONG).await.unwrap();
    started.elapsed()
}

/// Field defect: a limiter that cannot start while Redis is down.
#[tokio::test]
async fn a_server_may_start_after_the_storage_and_again() {
    let mut server = Server::start(&[]);
    server.kill();
    let storage = storage(&server.url());
    let error = fails(&storage, SECOND / 10).await;
    assert!(error.to_string().contains(&format!("cannot reach 127.0.0.1:{}: ", server.port())), "{error}");
    for _ in 0..3 {
        server.restart();
        let took = recovers(&storage).await;
        assert!(took < SECOND, "{took:?}");
        server.kill();
        assert!(!fails(&storage, SECOND / 10).await.is_timeout());
    }
}

#[tokio::test]
async fn a_server_that_hangs_is_waited_for_no_longer_than_asked() {
    let server = Server::start(&[]);
    let (known, new) = (storage(&server.url()), storage(&server.url()));
    recovers(&known).await;
    server.stop();
    for storage in [&known, &new] {
        for _ in 0..3 {
            fails(storage, SECOND / 10).await;
        }
    }
    server.go_on();
    for storage in [&known, &new] {
        assert!(recovers(storage).await < SECOND);
    }
}

/// A client crate never tries again after an error of the server's while connecting.
#[tokio::test]
async fn a_wrong_password_can_be_put_right_while_the_program_runs() {
    let server = Server::start(&["--requirepass", "first"]);
    let url = format!("redis://:p%40ss%2Fword@127.0.0.1:{}", server.port());
    let (with, without) = (storage(&url), storage(&server.url()));
    assert!(fails(&with, SECOND / 10).await.to_string().contains("authentication failed"));
    assert!(fails(&without, SECOND / 10).await.to_string().contains("NOAUTH"));
    server.ask(&["CONFIG", "SET", "requirepass", "p@ss/word"]);
    assert!(recovers(&with).await < SECOND);
    assert!(!format!("{with:?}").contains("p@ss"));
}

#[tokio::test]
async fn users_and_databases_are_those_of_the_url() {
    let server = Server::start(&[]);
    server.ask(&["ACL", "SETUSER", "a:b", "on", ">s e", "+@all", "~*"]);
    let at = format!("127.0.0.1:{}", server.port());
    recovers(&storage(&format!("redis://a%3Ab:s%20e@{at}/3"))).await;
    let error = fails(&storage(&format!("redis://a%3Ab:se@{at}/3")), SECOND / 10).await;
    assert!(error.to_string().contains("authentication failed"), "{error}");
    let error = fails(&storage(&format!("valkey://{at}/99")), SECOND / 10).await.to_string();
    assert!(error.contains("99") || error.contains("range"), "{error}");
    let clients = storage(&format!("redis://{at}/5"));
    recovers(&clients).await;
    assert!(server.ask(&["CLIENT", "LIST"]).to_string().contains(" db=5 "));
}

/// A server that knows no `AUTH` repeats what it was told.
#[tokio::test]
async fn no_error_tells_a_password() {
    let server = Server::start(&["--rename-command", "AUTH", ""]);
    let error = fails(&storage(&format!("redis://me:hunter2@127.0.0.1:{}", server.port())), SECOND / 10).await;
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
    let texts: Vec<String> = causes.map(|cause| format!("{cause} {cause:?}")).collect();
    assert!(texts.len() > 1 && !texts.concat().contains("hunter2"), "{texts:?}");
}

#[cfg(unix)]
#[tokio::test]
async fn unix_sockets_are_servers_too() {
    let other = Server::start(&[]);
    let socket = other.folder().join("a b.sock");
    let storage = storage(&format!("redis+unix://{}?db=2", socket.display().to_string().replace(' ', "%20")));
    fails(&storage, SECOND / 10).await;
    let server = Server::start(&["--unixsocket", socket.to_str().unwrap()]);
    assert!(recovers(&storage).await < SECOND);
    assert!(server.ask(&["CLIENT", "LIST"]).to_string().contains(" db=2 "));
}

#[tokio::test]
async fn whatever_stands_between_is_got_over() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let storage = storage(&proxy.url());
    for mode in [Mode::Garbage, Mode::SwallowReplies, Mode::CutAtReply, Mode::SwallowRequests] {
        // In the middle, and from the beginning.
        for _ in 0..2 {
            proxy.set(mode);
            for _ in 0..2 {
                fails(&storage, SECOND / 10).await;
            }
            proxy.set(Mode::Pass);
            proxy.cut();
            assert!(recovers(&storage).await < SECOND, "{mode:?}");
            proxy.cut();
        }
    }
}

#[tokio::test]
async fn the_primary_that_sentinels_name_is_followed() {
    let mut all = Sentinels::start();
    let url = all.url();
    let storage = storage(&url);
    recovers(&storage).await;
    all.sentinels[0].kill();
    assert!(recovers(&storage).await < SECOND, "one sentinel is missed by nobody");
    all.sentinels[0].restart();

    let clients = |server: &Server| server.ask(&["CLIENT", "LIST", "TYPE", "normal"]).to_string();
    // The last that we say is PING, or ROLE where it is asked from time to time whether it still is the primary.
    let is_ours = |line: &str| {
        !line.contains("name=sentinel") && ["cmd=ping", "cmd=role"].iter().any(|command| line.contains(command))
    };
    let ours = |server: &Server| clients(server).lines().any(is_ours);
    assert!(ours(&all.servers[0]) && !ours(&all.servers[1]));
    all.servers[0].kill();
    recovers(&storage).await;
    assert!(ours(&all.servers[1]));

    let unknown = self::storage(&url.replace("mymaster", "other"));
    let error = fails(&unknown, SECOND / 10).await.to_string();
    assert!(error.contains("knows no service \"other\""), "{error}");
}

/// After a failover by hand the old primary went on taking writes for ten seconds.
#[tokio::test]
async fn a_primary_that_is_none_any_more_is_left() {
    let all = Sentinels::start();
    let storage = storage(&all.url());
    recovers(&storage).await;
    assert_eq!(all.sentinels[0].ask(&["SENTINEL", "FAILOVER", "mymaster"]).to_string(), "OK");
    let started = Instant::now();
    let ours = || all.servers[1].ask(&["CLIENT", "LIST", "TYPE", "normal"]).to_string().contains("cmd=ping");
    while !ours() {
        assert!(started.elapsed() < LONG);
        let _ = storage.ready(SECOND / 10).await;
    }
}

#[tokio::test]
async fn a_cluster_is_ready_when_all_of_its_nodes_are() {
    let mut cluster = Cluster::start();
    let storage = storage(&cluster.url());
    recovers(&storage).await;
    cluster.nodes[1].kill();
    fails(&storage, SECOND / 10).await;
    cluster.nodes[1].restart();
    cluster.wait_until_whole();
    assert!(recovers(&storage).await < SECOND);
    cluster.nodes[2].stop();
    fails(&storage, SECOND / 10).await;
    cluster.nodes[2].go_on();
    assert!(recovers(&storage).await < SECOND);

    let one = self::storage(&format!("redis+cluster://127.0.0.1:{}", cluster.nodes[0].port()));
    recovers(&one).await;
    cluster.nodes.iter_mut().for_each(Server::kill);
    assert!(!fails(&one, SECOND / 10).await.is_timeout());
}

/// Each says what was wrong and what to write.
#[test]
fn urls_that_cannot_be_are_refused_with_what_to_write() {
    for (url, parts) in [
        ("", &["\"\"", "redis://host:6379"][..]),
        ("localhost:6379", &["\"localhost:6379\"", "redis://host:6379"]),
        ("http://localhost", &["\"http\"", "redis://host:6379"]),
        ("redis+tcp://localhost", &["\"redis+tcp\"", "redis+cluster://host:6379,host:6379"]),
        ("Redis://localhost", &["\"Redis\"", "redis://host:6379"]),
        ("rediss+unix:///s", &["\"rediss+unix\"", "redis+unix:///path"]),
        ("redis://", &["names no host"]),
        ("redis:///1", &["names no host"]),
        ("redis://:6379", &["\":6379\"", "host:6379"]),
        ("redis://host:", &["\"host:\"", "host:6379"]),
        ("redis://host:0", &["\"host:0\""]),
        ("redis://host:65536", &["\"host:65536\""]),
        ("redis://host:+1", &["\"host:+1\""]),
        ("redis://ho st", &["\"ho st\""]),
        ("redis://2001:db8::1", &["\"2001:db8::1\"", "[2001:db8::1]:6379"]),
        ("redis://[::1", &["\"[::1\""]),
        ("redis://[::1]6379", &["\"[::1]6379\""]),
        ("redis://a,b", &["several hosts", "redis+cluster://"]),
        ("redis+cluster://a,,b", &["\"\"", "host:6379"]),
        ("redis://host/one", &["\"one\"", "/0"]),
        ("redis://host/-1", &["\"-1\""]),
        ("redis://host/0/1", &["\"0/1\""]),
        ("redis+cluster://host/1", &["no database but 0"]),
        ("redis+unix://host/s", &["redis+unix:///path/to.sock"]),
        ("redis+unix://", &["redis+unix:///path/to.sock"]),
        ("redis+unix:///s?db=x", &["\"x\""]),
        ("redis+sentinel://host", &["the service", "redis+sentinel://host:26379/mymaster"]),
        ("redis+sentinel://host/s/x", &["\"x\""]),
        ("redis+sentinel://host/s?sentinel-user=me", &["sentinel-password"]),
        ("redis://host#insecure", &["#", "%23"]),
        ("redis://host?db=1", &["\"db\"", "prefix, deadline"]),
        ("redis://host?ca=x", &["\"ca\""]),
        ("redis://host?deadline", &["\"deadline\"", "deadline=100ms"]),
        ("redis://host?deadline=100", &["\"100\"", "100ms"]),
        ("redis://host?deadline=0s", &["\"0s\"", "at least 1ms"]),
        ("redis://host?deadline=2h", &["\"2h\"", "100ms or 2s"]),
        ("redis://host?deadline=1s&deadline=2s", &["\"deadline\"", "twice"]),
        ("redis://host?prefix=", &["\"\"", "\"rl\""]),
        ("redis://host?prefix=a{b}", &["\"a{b}\"", "{ and }"]),
        ("redis://host?prefix=a%", &["\"prefix\"", "%25"]),
    ] {
        let error = RedisStorage::new(url).expect_err(url).to_string();
        assert!(error.starts_with("cannot read the URL "), "{url:?}: {error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{url:?}: {error}");
        assert!(["write", "written", "leave"].iter().any(|help| error.contains(help)), "{url:?}: {error}");
    }
}

#[test]
fn no_error_of_a_url_tells_its_login() {
    for url in [
        "redis://secret@host",
        "redis://:secret@",
        "redis://:secret@host:x",
        "redis://me:secret@host/x",
        "redis://me:sec%zzret@host",
        "redis://me:pa/secret@host",
        "redis://me:secret/pa@host",
        "redis://me:pa?secret@host",
        "redis://me:secret?pa@host",
        "redis://me:secret#pa@host",
        "redis://me:pa@secret@host",
        "redis://me:secret@host,other",
        "http://me:secret@host",
        "me:secret@host",
        "redis+cluster://me:secret@host/4",
        "redis+sentinel://host/s?sentinel-password=secret&x=1",
        "redis+sentinel://host/s?sentinel-password=secret%zz",
        "redis+sentinel://host/s?password=secret",
    ] {
        let error = RedisStorage::new(url).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("secret"), "{url}: {error}");
    }
    let fine = RedisStorage::new("redis+sentinel://me:secret@host/s?sentinel-password=secret").unwrap();
    assert!(!format!("{fine:?}").contains("secret"), "{fine:?}");
}

#[test]
fn urls_that_can_be() {
    for url in [
        "redis://localhost",
        "valkey://localhost:1/0",
        "redis://127.0.0.1/15?prefix=a:b&deadline=2s",
        "redis://[::1]:6379/",
        "redis://user:p%40%2F%3F%23@host",
        "redis+unix:///var/run/redis%20a.sock?db=3",
        "valkey+unix://:pass@/s",
        "redis+cluster://a,b:1,[::1]:2/0",
        "valkey+cluster://:pass@a",
        "redis+sentinel://a,b/service",
        "valkey+sentinel://u:p@a,b:1/service/3?sentinel-user=x&sentinel-password=y",
    ] {
        RedisStorage::new(url).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn what_a_builder_is_told_is_checked_too() {
    let storage = || RedisStorage::new("redis://h").unwrap();
    for prefix in ["", "a b", "a{", "}", "caf\u{e9}", &"a".repeat(65)] {
        assert!(storage().try_prefix(prefix).unwrap_err().to_string().contains(prefix));
    }
    assert!(format!("{:?}", storage().prefix("shop")).contains("\"shop\""));
    for deadline in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        assert!(storage().try_deadline(deadline).unwrap_err().to_string().contains("Duration::from_millis(100)"));
    }
    assert!(format!("{:?}", storage().deadline(LITTLE)).contains("60ms"));
}

#[test]
fn what_is_public_can_cross_threads() {
    fn shared<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    shared::<RedisStorage>();
    shared::<RedisStorageError>();
}
