//! TLS: the certificates that a storage trusts.

use std::time::Duration;

use common::certificates::Certificates;
use common::message;
use common::servers::Etcd;
use tower_ratelimit::storage::EtcdStorage;
use tower_ratelimit::{Key, Quota, RateLimiter};

const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let files = Certificates::create();
    let (key, ca, other) = (files.path("key.pem"), files.path("ca.pem"), files.path("other.pem"));
    let etcd = Etcd::start_with(1, &["--cert-file", &ca, "--key-file", &key]);
    let port = etcd.members[0].port();

    let storage = |scheme: &str, host: &str, ca: &str| EtcdStorage::new(&format!("{scheme}://{host}:{port}?ca={ca}"));
    for (scheme, host) in [("etcds", "localhost"), ("etcd+tls", "127.0.0.1")] {
        let storage = storage(scheme, host, &ca).unwrap().deadline(LONG);
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from(scheme)).await.unwrap().is_admitted());
    }
    let error = message(storage("etcds", "127.0.0.1", &other).unwrap().ready(SHORT).await.unwrap_err());
    assert!(error.contains("certificate"), "{error}");
    let plain = EtcdStorage::new(&format!("etcd://127.0.0.1:{port}")).unwrap();
    let error = plain.ready(SHORT).await.unwrap_err();
    assert!(!error.may_have_counted(), "{error}");
}
