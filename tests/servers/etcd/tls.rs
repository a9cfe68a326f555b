//! TLS: the certificates that a storage trusts, and those that it presents.

use std::time::Duration;

use common::certificates::Certificates;
use common::message;
use common::servers::Etcd;
use common::servers::storage::failed_check;
use tower_ratelimit::storage::{EtcdStorage, TlsConfig};
use tower_ratelimit::{Key, Quota, RateLimiter, Storage};

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let files = Certificates::create();
    let (key, ca, other) = (files.path("key.pem"), files.path("ca.pem"), files.path("other.pem"));
    let etcd = Etcd::start_with(1, &["--cert-file", &ca, "--key-file", &key]);
    let port = etcd.members[0].port();

    let storage = |scheme: &str, host: &str, ca: &str| {
        EtcdStorage::new(&format!("{scheme}://{host}:{port}?ca={ca}&timeout={LONG:?}"))
    };
    for (scheme, host) in [("etcds", "localhost"), ("etcd+tls", "127.0.0.1")] {
        let storage = storage(scheme, host, &ca).unwrap();
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from(scheme)).await.unwrap().is_admitted());
    }
    let error = message(failed_check(&storage("etcds", "127.0.0.1", &other).unwrap()).await);
    assert!(error.contains("certificate"), "{error}");
    let plain = EtcdStorage::new(&format!("etcd://127.0.0.1:{port}?timeout=60s")).unwrap();
    let error = failed_check(&plain).await;
    assert!(!error.may_have_counted(), "{error}");
}

#[tokio::test]
async fn member_accepts_only_clients_of_its_private_authority() {
    let files = Certificates::authority();
    let [cert, key, ca] = ["server.pem", "server-key.pem", "authority.pem"].map(|name| files.path(name));
    let trusts = ["--client-cert-auth", "--trusted-ca-file", &ca];
    let etcd = Etcd::start_with(1, &[&["--cert-file", &cert, "--key-file", &key], &trusts[..]].concat());

    let url = |options: &str| format!("etcds://localhost:{}?timeout=60s{options}", etcd.members[0].port());
    let client = format!("&ca={ca}&cert={}&key={}", files.path("client.pem"), files.path("client-key.pem"));
    let by_url = EtcdStorage::new(&url(&client)).unwrap();
    let tls = TlsConfig::new().ca(files.read("authority.pem"));
    let identity = tls.clone().client_certificate(files.read("client.pem"), files.read("client-key.pem"));
    let by_builder = EtcdStorage::new(&url("")).unwrap().try_tls(&identity).unwrap();
    for storage in [by_url, by_builder] {
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from("alice")).await.unwrap().is_admitted());
    }

    let stranger = tls.clone().client_certificate(files.read("other.pem"), files.read("other-key.pem"));
    for config in [tls, stranger] {
        let storage = EtcdStorage::new(&url("")).unwrap().try_tls(&config).unwrap();
        let error = failed_check(&storage).await;
        assert!(!error.may_have_counted(), "{error}");
    }
    let error = EtcdStorage::new("etcd://localhost").unwrap().try_tls(&identity).unwrap_err().to_string();
    assert!(error.contains("write etcds://"), "{error}");
}
