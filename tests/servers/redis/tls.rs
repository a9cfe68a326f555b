//! TLS: the certificates that a storage trusts.

use std::time::Duration;

use tower_ratelimit::storage::RedisStorage;

use common::certificates::Certificates;
use common::message;
use common::servers::Server;

const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let files = Certificates::create();
    let (key, ca, other) = (files.path("key.pem"), files.path("ca.pem"), files.path("other.pem"));
    // The harness uses the other port, without TLS.
    let port = common::servers::free_port();
    let listens = ["--tls-port", &port.to_string(), "--tls-auth-clients", "no", "--requirepass", "secret"];
    let pair = ["--tls-cert-file", &ca, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let _server = Server::start(&[&listens[..], &pair].concat());

    let storage = |host: &str, ca: &str| RedisStorage::new(&format!("rediss://:secret@{host}:{port}?ca={ca}"));
    for host in ["localhost", "127.0.0.1"] {
        storage(host, &ca).unwrap().ready(LONG).await.unwrap();
    }
    let error = message(storage("127.0.0.1", &other).unwrap().ready(SHORT).await.unwrap_err());
    assert!(error.contains("certificate"), "{error}");
    let error =
        RedisStorage::new(&format!("redis://:secret@127.0.0.1:{port}")).unwrap().ready(SHORT).await.unwrap_err();
    assert!(!error.may_have_counted(), "{error}");

    for (ca, part) in [(files.path("none.pem"), "none.pem"), (key, "no certificate")] {
        let error = storage("localhost", &ca).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("write") && !error.contains("secret"), "{error}");
    }
}
