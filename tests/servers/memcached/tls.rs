//! TLS: the certificates that a storage trusts, and those that it presents.

use common::certificates::Certificates;
use common::message;
use common::servers::storage::failed_check;
use common::servers::{Memcached, free_port, with_timeout};
use tower_ratelimit::storage::{AnyStorage, MemcachedStorage, StorageErrorKind, TlsConfig};
use tower_ratelimit::{Key, Quota, RateLimiter, Storage};

use super::{LONG, storage};

/// Returns the options of a server with TLS on `port`.
fn options(port: u16, cert: &str, key: &str) -> [String; 5] {
    let files = format!("ssl_chain_cert={cert},ssl_key={key}");
    ["-Z", "-l", &format!("127.0.0.1:{port}"), "-o", &files].map(str::to_owned)
}

async fn assert_admits(storage: impl Storage, client: &str) {
    storage.ready(LONG).await.unwrap();
    let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
    assert!(limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
}

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let (files, port) = (Certificates::create(), free_port());
    let (key, ca, other) = (files.path("key.pem"), files.path("ca.pem"), files.path("other.pem"));
    let options = options(port, &ca, &key);
    let server = Memcached::with_login("app", "secret", &options.each_ref().map(|option| &**option));

    let url = |host: &str, ca: &str| format!("memcacheds://app:secret@{host}:{port}?ca={ca}");
    for host in ["localhost", "127.0.0.1"] {
        assert_admits(storage(&url(host, &ca)), host).await;
        let parsed: AnyStorage = with_timeout(&url(host, &ca), LONG).parse().unwrap();
        assert_admits(parsed, host).await;
    }
    assert_eq!(server.stat("curr_items"), 2);
    let error = message(failed_check(&storage(&url("127.0.0.1", &other))).await);
    assert!(error.contains("certificate") && !error.contains("secret"), "{error}");

    let missing = message(failed_check(&storage(&format!("memcacheds://localhost:{port}?ca={ca}"))).await);
    assert!(missing.contains("the server requires a login"), "{missing}");
}

/// Guards against this defect: a server with TLS waits for more bytes than the client sends, so the
/// error says only that connecting took too long.
#[tokio::test]
async fn port_with_tls_is_named() {
    let (files, port) = (Certificates::create(), free_port());
    let options = options(port, &files.path("ca.pem"), &files.path("key.pem"));
    let _server = Memcached::start(&options.each_ref().map(|option| &**option));
    for login in ["", "app:secret@"] {
        let error = failed_check(&storage(&format!("memcached://{login}127.0.0.1:{port}"))).await;
        assert_eq!(error.kind(), StorageErrorKind::Unreachable);
        let error = message(error);
        let advice = "if this port speaks TLS, write memcacheds:// instead of memcached://";
        assert!(error.starts_with(&format!("cannot reach 127.0.0.1:{port}: ")) && error.ends_with(advice), "{error}");
    }
}

#[tokio::test]
async fn server_accepts_only_clients_with_a_certificate_of_its_authority() {
    let (files, port) = (Certificates::authority(), free_port());
    let [cert, key, ca] = ["server.pem", "server-key.pem", "authority.pem"].map(|name| files.path(name));
    let mut options = options(port, &cert, &key);
    options[4] = format!("{},ssl_verify_mode=2,ssl_ca_cert={ca}", options[4]);
    let _server = Memcached::start(&options.each_ref().map(|option| &**option));

    let url = |options: &str| format!("memcacheds://localhost:{port}?timeout=60s{options}");
    let client = format!("&ca={ca}&cert={}&key={}", files.path("client.pem"), files.path("client-key.pem"));
    assert_admits(MemcachedStorage::new(&url(&client)).unwrap(), "by URL").await;
    let tls = TlsConfig::new().ca(files.read("authority.pem"));
    let identity = tls.clone().client_certificate(files.read("client.pem"), files.read("client-key.pem"));
    assert_admits(MemcachedStorage::new(&url("")).unwrap().try_tls(&identity).unwrap(), "by builder").await;

    let stranger = tls.clone().client_certificate(files.read("other.pem"), files.read("other-key.pem"));
    for config in [tls, stranger] {
        let storage = MemcachedStorage::new(&url("")).unwrap().try_tls(&config).unwrap();
        let error = failed_check(&storage).await;
        assert!(!error.may_have_counted(), "{error}");
    }
    let error = MemcachedStorage::new("memcached://localhost").unwrap().try_tls(&identity).unwrap_err().to_string();
    assert!(error.contains("write memcacheds://"), "{error}");
}
