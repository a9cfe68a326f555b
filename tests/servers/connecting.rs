//! Errors of a connection: a server of another protocol, a login that a server rejects, and causes
//! that are known only after the callers have gone.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use common::certificates::Certificates;
use common::servers::storage::failed_check;
use common::servers::{Etcd, Memcached, Mode, Postgres, Proxy, Server, with_timeout};
use common::time::{EVENTUALLY, Stopwatch};
use common::{message, outside_of_a_runtime, policy};
use tokio::task::spawn_blocking;
use tower_ratelimit::storage::{AnyStorage, StorageErrorKind};
use tower_ratelimit::{Key, RateLimiter, Storage};

/// A timeout that only a test that hangs reaches.
const LONG: Duration = Duration::from_secs(60);

/// Returns the error of a check, with all causes.
async fn check_error(url: &str) -> String {
    let storage: AnyStorage = with_timeout(url, LONG).parse().unwrap();
    let error = failed_check(&storage).await;
    assert_eq!(error.kind(), StorageErrorKind::Unreachable, "{url}");
    message(error)
}

/// Answers each connection with `text`, and returns the port.
fn answering(text: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        // The connections stay open. Closing one can discard an answer that the client has not read.
        let mut clients = Vec::new();
        for mut client in listener.incoming().map_while(Result::ok) {
            let _ = client.read(&mut [0; 1_024]);
            let _ = client.write_all(text);
            clients.push(client);
        }
    });
    port
}

#[tokio::test]
async fn protocol_of_another_server_is_named() {
    let (redis, memcached) = (Server::start(&[]), Memcached::start(&[]));
    let http = answering(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
    let tls = answering(&[0x15, 3, 1, 0, 2, 2, 10]);
    let servers = [(redis.port(), "Redis"), (memcached.port(), "memcached"), (http, "HTTP"), (tls, "TLS")];
    for (scheme, expected) in [("redis", "Redis"), ("memcached", "memcached"), ("etcd", "etcd")] {
        // memcached closes a connection of etcd's protocol, which can discard its answer.
        let is_named = |found| found != expected && (found, expected) != ("memcached", "etcd");
        for (port, found) in servers.iter().filter(|(_, found)| is_named(*found)) {
            let error = check_error(&format!("{scheme}://127.0.0.1:{port}")).await;
            let advice = "check the scheme, the host and the port in the URL";
            assert_eq!(error, format!("127.0.0.1:{port} speaks {found}, not {expected}: {advice}"));
        }
    }
    let unknown = answering(b"220 mail.example ESMTP\r\n");
    for scheme in ["redis", "memcached", "etcd"] {
        let error = check_error(&format!("{scheme}://127.0.0.1:{unknown}")).await;
        assert!(error.starts_with(&format!("cannot reach 127.0.0.1:{unknown}: ")), "{error}");
    }
}

/// Guards against this defect: `rediss://` at a port without TLS says only that connecting took too long.
#[tokio::test]
async fn port_without_tls_is_named() {
    let files = Certificates::create();
    let (redis, etcd) = spawn_blocking(|| (Server::start(&[]), Etcd::start(1))).await.unwrap();
    let memcached = Memcached::start(&[]);
    let ports = [("rediss", redis.port()), ("memcacheds", memcached.port()), ("etcds", etcd.members[0].port())];
    for (scheme, port) in ports {
        let (url, watch) = (format!("{scheme}://127.0.0.1:{port}?ca={}", files.path("ca.pem")), Stopwatch::start());
        let begin = format!("cannot reach 127.0.0.1:{port}: no TLS handshake: ");
        loop {
            let storage: AnyStorage = with_timeout(&url, LONG).parse().unwrap();
            let error = message(storage.check().await.unwrap_err());
            if error.starts_with(&begin) {
                assert!(
                    error.contains("; check that this port speaks TLS, or write the scheme without TLS"),
                    "{error}"
                );
                break;
            }
            // On a busy machine, the time to connect ends before that of the handshake.
            assert!(error.ends_with("connecting took longer than 1s") && watch.wall() < EVENTUALLY, "{error}");
        }
    }
}

#[tokio::test]
async fn rejected_login_to_redis_says_what_to_write() {
    let server = Server::start(&["--requirepass", "secret"]);
    let at = format!("127.0.0.1:{}", server.port());
    let begin = format!("cannot log in to {at}: ");
    let missing = check_error(&format!("redis://{at}")).await;
    assert!(missing.starts_with(&format!("{begin}NOAUTH ")), "{missing}");
    assert!(missing.contains("put the password into the URL: write redis://:password@"), "{missing}");
    for login in [":wrong", "nobody:secret"] {
        let wrong = check_error(&format!("redis://{login}@{at}")).await;
        assert!(wrong.starts_with(&begin) && wrong.contains("check the user and the password"), "{wrong}");
    }
}

#[tokio::test]
async fn rejected_login_to_memcached_says_what_to_write() {
    let (closed, open) = (Memcached::with_login("app", "secret", &[]), Memcached::start(&[]));
    let [closed_at, open_at] = [&closed, &open].map(|server| format!("127.0.0.1:{}", server.port()));
    for (login, at, expected) in [
        ("", &closed_at, "the server requires a login (put it into the URL: write user:password@ before the host)"),
        ("app:wrong@", &closed_at, "the server rejects the user or the password (check both"),
        ("other:secret@", &closed_at, "the server rejects the user or the password (check both"),
        ("app:secret@", &open_at, "the server has no logins (leave out the text before @ in the URL, or start"),
    ] {
        let error = check_error(&format!("memcached://{login}{at}")).await;
        assert!(error.starts_with(&format!("cannot log in to {at}: {expected}")), "{error}");
        assert!(!error.contains("secret") && !error.contains("wrong"), "{error}");
    }
    // A server without logins would store the password, and show it to every client.
    assert_eq!(open.ask("get auth"), ["END"]);
}

#[tokio::test]
async fn timeout_names_the_last_failed_login_to_memcached() {
    let server = Memcached::with_login("app", "secret", &[]);
    let proxy = Proxy::start(server.port());
    let at = format!("127.0.0.1:{}", proxy.port());
    assert_timeout_names(&proxy, &format!("memcached://{at}"), "requires a login").await;
    assert_timeout_names(&proxy, &format!("memcached://app:wrong@{at}"), "rejects the user or the password").await;
}

/// Hits through a proxy that delays each reply for longer than the timeout of the hit, until a hit
/// times out with `cause` as its cause.
async fn assert_timeout_names(proxy: &Proxy, url: &str, cause: &str) {
    let timeout = Duration::from_millis(20);
    let storage: AnyStorage = with_timeout(url, timeout).parse().unwrap();
    let limiter = RateLimiter::with_storage(policy("9/day"), storage);
    proxy.set(Mode::Delay(3 * timeout));
    let (watch, begin) =
        (Stopwatch::start(), format!("no connection to 127.0.0.1:{} within the timeout: ", proxy.port()));
    loop {
        let error = limiter.hit(&Key::global()).await.unwrap_err();
        assert!(!error.may_have_counted(), "{error:#}");
        let (is_timeout, text) = (error.is_timeout(), message(error));
        if is_timeout && text.contains(cause) {
            assert!(text.starts_with(&begin), "{text}");
            return;
        }
        assert!(watch.wall() < EVENTUALLY, "{text}");
        // The attempt ends, and so does the time in which hits get its error at once.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn timeout_names_the_last_failed_login_to_redis() {
    let server = Server::start(&["--requirepass", "secret"]);
    let proxy = Proxy::start(server.port());
    let at = format!("127.0.0.1:{}", proxy.port());
    assert_timeout_names(&proxy, &format!("redis://{at}"), "NOAUTH").await;
    assert_timeout_names(&proxy, &format!("redis://:wrong@{at}"), "check the user and the password").await;
}

#[tokio::test]
async fn timeout_names_a_wrong_password_database_and_table_of_postgres() {
    let server = spawn_blocking(|| Postgres::start(&[])).await.unwrap();
    server.ask("CREATE USER app PASSWORD 'secret'");
    server
        .set_access("local all all trust\nhost all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n");
    let proxy = Proxy::start(server.port());
    let at = format!("127.0.0.1:{}", proxy.port());
    for (rest, cause) in [
        (format!("app:wrong@{at}/postgres"), "password authentication failed for user \"app\""),
        (format!("postgres@{at}/other"), "database \"other\" does not exist"),
        (format!("postgres@{at}/postgres?table=other&migrate=false"), "has no table for the states"),
    ] {
        assert_timeout_names(&proxy, &format!("postgres://{rest}"), cause).await;
    }
}

/// Guards against this defect: a timer or a task of the storage panics.
#[test]
fn calls_outside_of_a_runtime_are_errors() {
    for url in
        ["redis://127.0.0.1:1", "memcached://127.0.0.1:1", "etcd://127.0.0.1:1", "postgres://user@127.0.0.1:1/db"]
    {
        let storage: AnyStorage = url.parse().unwrap();
        let (limiter, key) = (RateLimiter::with_storage(policy("5/minute"), storage.clone()), Key::from("k"));
        let errors = [
            outside_of_a_runtime(limiter.hit(&key)).map(drop),
            outside_of_a_runtime(limiter.peek(&key)).map(drop),
            outside_of_a_runtime(limiter.clear(&key)),
            outside_of_a_runtime(storage.check()),
            outside_of_a_runtime(storage.clear_all()).map(drop),
        ];
        for (call, error) in ["hit", "peek", "clear", "check", "clear_all"].into_iter().zip(errors) {
            let error = error.unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Cancelled, "{call} on {url}: {error}");
            assert!(!error.may_have_counted() && message(error).contains("no tokio runtime"), "{call} on {url}");
        }
    }
}
