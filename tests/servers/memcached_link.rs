//! `MemcachedStorage` and its servers: what a URL may say, and when it is ready.

use std::time::{Duration, Instant};

use tower_ratelimit::storage::{AnyStorage, MemcachedStorage, MemcachedStorageError};

use common::servers::Memcached;

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(10);

/// Time out here means that something hung.
const LITTLE: Duration = Duration::from_millis(60);

fn storage(url: &str) -> MemcachedStorage {
    MemcachedStorage::new(url).unwrap_or_else(|error| panic!("{error}"))
}

/// What is wrong, which is known within `timeout`.
async fn fails(storage: &MemcachedStorage, timeout: Duration) -> MemcachedStorageError {
    let started = Instant::now();
    let error = storage.ready(timeout).await.unwrap_err();
    assert!(started.elapsed() < timeout + LITTLE, "{:?}: {error}", started.elapsed());
    error
}

#[tokio::test]
async fn it_is_ready_when_all_servers_are() {
    let (one, mut other) = (Memcached::start(&[]), Memcached::start(&[]));
    other.kill();
    let storage = storage(&format!("memcached://127.0.0.1:{},127.0.0.1:{}", one.port(), other.port()));
    let error = fails(&storage, SECOND / 10).await;
    assert!(error.to_string().contains(&format!("cannot reach 127.0.0.1:{}: ", other.port())), "{error}");
    other.restart();
    storage.ready(LONG).await.unwrap();
    one.stop();
    fails(&storage, SECOND / 10).await;
    one.go_on();
    storage.ready(LONG).await.unwrap();
}

#[cfg(unix)]
#[tokio::test]
async fn unix_sockets_are_servers_too() {
    let socket = std::env::temp_dir().join(format!("tower-ratelimit {}.sock", std::process::id()));
    let storage = storage(&format!("memcached+unix://{}", socket.display().to_string().replace(' ', "%20")));
    fails(&storage, SECOND / 10).await;
    let server = Memcached::on(&socket);
    storage.ready(LONG).await.unwrap();
    drop(server);
    let error = fails(&storage, SECOND / 10).await;
    assert!(error.to_string().contains(&*socket.display().to_string()), "{error}");
    std::fs::remove_file(socket).unwrap();
}

/// Each says what was wrong and what to write.
#[test]
fn urls_that_cannot_be_are_refused_with_what_to_write() {
    for (url, parts) in [
        ("", &["\"\"", "memcached://host:11211"][..]),
        ("localhost:11211", &["\"localhost:11211\"", "memcached://host:11211"]),
        ("http://localhost", &["\"http\"", "memcached+unix:///path/to.sock"]),
        ("memcached+cluster://a,b", &["\"memcached+cluster\"", "memcached://host:11211,host:11211"]),
        ("Memcached://localhost", &["\"Memcached\""]),
        ("memcached://", &["names no host"]),
        ("memcached:///0", &["names no host"]),
        ("memcached://:11211", &["\":11211\"", "host:11211"]),
        ("memcached://host:0", &["\"host:0\""]),
        ("memcached://host:65536", &["\"host:65536\""]),
        ("memcached://ho st", &["\"ho st\""]),
        ("memcached://2001:db8::1", &["\"2001:db8::1\"", "[2001:db8::1]:11211"]),
        ("memcached://a,,b", &["\"\"", "host:11211"]),
        ("memcached://a,b:1,a:11211", &["a:11211 twice"]),
        ("memcached://host/0", &["\"/0\"", "leave it out"]),
        ("memcached+unix://host/s", &["memcached+unix:///path/to.sock"]),
        ("memcached+unix://", &["memcached+unix:///path/to.sock"]),
        ("memcached://host#x", &["%23"]),
        ("memcached://host?db=1", &["\"db\"", "prefix, deadline"]),
        ("memcached://host?deadline", &["deadline=100ms"]),
        ("memcached://host?deadline=100", &["\"100\"", "100ms"]),
        ("memcached://host?deadline=1s&deadline=2s", &["twice"]),
        ("memcached://host?prefix=", &["\"\"", "\"rl\""]),
        ("memcached://host?prefix=a%20b", &["\"a b\""]),
        ("memcached://host?prefix=a%0D%0Ab", &["without white space"]),
    ] {
        let error = MemcachedStorage::new(url).expect_err(url).to_string();
        assert!(error.starts_with("cannot read the URL "), "{url:?}: {error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{url:?}: {error}");
        assert!(["write", "written", "leave"].iter().any(|help| error.contains(help)), "{url:?}: {error}");
    }
}

#[test]
fn no_error_of_a_url_tells_its_login() {
    for url in [
        "memcached://secret@host",
        "memcached://me:secret@host",
        "memcached://:secret@host",
        "memcached://me:pa/secret@host",
        "memcached://me:secret?pa@host",
        "memcached+unix://me:secret@/s",
        "memcache://me:secret@host",
    ] {
        let error = MemcachedStorage::new(url).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("secret"), "{url}: {error}");
    }
}

#[test]
fn urls_that_can_be() {
    for url in [
        "memcached://localhost",
        "memcached://localhost/",
        "memcached://127.0.0.1:1?prefix=a:b&deadline=2s",
        "memcached://[::1]:11211",
        "memcached://a,b:1,[::1]:2,[::1]",
        "memcached+unix:///var/run/memcached%20a.sock?prefix=x",
    ] {
        let storage = MemcachedStorage::new(url).unwrap_or_else(|error| panic!("{error}"));
        assert!(format!("{storage:?}").len() < 500, "{storage:?}");
        assert!(
            matches!(url.parse::<AnyStorage>(), Ok(storage) if format!("{storage:?}").starts_with("MemcachedStorage"))
        );
    }
}

#[test]
fn what_a_builder_is_told_is_checked_too() {
    let storage = || MemcachedStorage::new("memcached://h").unwrap();
    for prefix in ["", "a b", "a\r\n", "caf\u{e9}", &"a".repeat(65)] {
        assert!(storage().try_prefix(prefix).is_err(), "{prefix:?}");
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
    shared::<MemcachedStorage>();
    shared::<MemcachedStorageError>();
}
