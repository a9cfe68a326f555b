//! TLS: the certificates that a storage trusts, and those that it presents.

use std::time::Duration;

use common::certificates::Certificates;
use common::message;
use common::servers::storage::{RUNTIME, failed_check};
use common::servers::{Postgres, wait_until, with_timeout};
use tower_ratelimit::storage::{PostgresStorage, StorageErrorKind, TlsConfig};
use tower_ratelimit::{Key, Quota, RateLimiter, Storage};

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let (files, server) = (Certificates::create(), Postgres::start(&[]));
    server.enable_tls(&files.read("ca.pem"), &files.read("key.pem"), None);
    let storage = |host: &str, options: &str| {
        let url = format!("postgres://postgres@{host}:{}/postgres?{options}", server.port());
        PostgresStorage::new(&url).unwrap()
    };
    let (ca, other) = (files.path("ca.pem"), files.path("other.pem"));
    for (host, mode) in [("localhost", "require"), ("127.0.0.1", "verify-full")] {
        let storage = storage(host, &format!("sslmode={mode}&ca={ca}&timeout=60s"));
        storage.ready(LONG).await.unwrap();
        super::migrate(&storage).await;
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from(host)).await.unwrap().is_admitted());
    }
    let encrypted = "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE client_port > 0";
    assert_eq!(server.ask(encrypted), "t");

    let error = failed_check(&storage("localhost", &format!("sslmode=require&ca={other}&timeout=60s"))).await;
    assert!(!error.may_have_counted(), "{error}");
    assert!(message(error).contains("certificate"));
    // The certificate is of another host.
    let wrong_name = format!("hostaddr=127.0.0.1&sslmode=require&ca={ca}&timeout=60s");
    let error = failed_check(&storage("other.example", &wrong_name)).await;
    assert!(message(error).contains("certificate"));
    // The server rejects connections without TLS.
    for options in ["timeout=60s", "sslmode=disable&timeout=60s"] {
        let error = failed_check(&storage("localhost", options)).await;
        assert_eq!(error.kind(), StorageErrorKind::Unreachable, "{error}");
    }
}

/// The cancel requests are encrypted, too.
#[test]
fn statements_over_tls_are_prepared_and_cancelled() {
    let preload = ["shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track_planning=on"];
    let (files, server) = (Certificates::create(), Postgres::start(&preload));
    server.enable_tls(&files.read("ca.pem"), &files.read("key.pem"), None);
    server.ask("CREATE EXTENSION pg_stat_statements");
    let (port, ca) = (server.port(), files.path("ca.pem"));
    let url = format!("postgres://postgres@localhost:{port}/postgres?connections=1&sslmode=require&ca={ca}");
    let storage = PostgresStorage::new(&with_timeout(&url, super::locked_row::DEADLINE)).unwrap();
    super::locked_row::check(&server, &storage);
    let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
    // The server plans a prepared statement for each of the first five executions. It is prepared again each
    // second.
    let plans = "SELECT plans < calls FROM pg_stat_statements WHERE query LIKE 'SELECT $2::int8, (SELECT state%'";
    wait_until("a plan is used again", || {
        for _ in 0..60 {
            let _ = RUNTIME.block_on(limiter.peek(&Key::from("k"))).unwrap();
        }
        server.ask(plans) == "t"
    });
}

#[tokio::test]
async fn server_of_a_private_authority_accepts_only_its_clients() {
    let (files, server) = (Certificates::authority(), Postgres::start(&[]));
    let [cert, key, authority] = ["server.pem", "server-key.pem", "authority.pem"].map(|name| files.read(name));
    server.enable_tls(&cert, &key, Some(&authority));

    let url = |options: &str| {
        format!("postgres://postgres@localhost:{}/postgres?sslmode=require&timeout=60s{options}", server.port())
    };
    let [ca, cert, key] = ["authority.pem", "client.pem", "client-key.pem"].map(|name| files.path(name));
    let by_url = PostgresStorage::new(&url(&format!("&ca={ca}&cert={cert}&key={key}"))).unwrap();
    let tls = TlsConfig::new().ca(authority);
    let identity = tls.clone().client_certificate(files.read("client.pem"), files.read("client-key.pem"));
    let by_builder = PostgresStorage::new(&url("")).unwrap().try_tls(&identity).unwrap();
    for storage in [by_url, by_builder] {
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from("alice")).await.unwrap().is_admitted());
    }

    let stranger = tls.clone().client_certificate(files.read("other.pem"), files.read("other-key.pem"));
    for config in [tls, stranger] {
        let storage = PostgresStorage::new(&url("")).unwrap().try_tls(&config).unwrap();
        let error = failed_check(&storage).await;
        assert!(!error.may_have_counted(), "{error}");
    }
    let error = PostgresStorage::new("postgres://a@localhost").unwrap().try_tls(&identity).unwrap_err().to_string();
    assert!(error.contains("add sslmode=require"), "{error}");
}

#[tokio::test]
async fn server_without_tls_is_an_error_if_the_url_requires_tls() {
    let server = Postgres::start(&["ssl=off"]);
    let storage = PostgresStorage::new(&format!("{}?sslmode=require&timeout=60s", server.url())).unwrap();
    let error = failed_check(&storage).await;
    assert_eq!(error.kind(), StorageErrorKind::Unreachable, "{error}");
    assert!(message(error).contains("TLS"));
}
