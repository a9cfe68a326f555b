//! TLS: whom a storage trusts.

mod servers;

use std::process::Command;
use std::time::Duration;

use tower_ratelimit::storage::RedisStorage;

use self::servers::Server;

const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);

fn openssl(arguments: &[&str]) {
    let output = Command::new("openssl").args(arguments).output().expect("openssl is installed");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn certificates_are_trusted_that_the_url_names_and_no_others() {
    let plain = Server::start(&[]);
    let file = |name: &str| plain.folder().join(name).to_str().unwrap().to_owned();
    let (key, ca, other) = (file("key.pem"), file("ca.pem"), file("other.pem"));
    for (name, key) in [(&ca, &key), (&other, &file("other-key.pem"))] {
        let request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost \
                       -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE";
        let mut arguments: Vec<&str> = request.split_whitespace().collect();
        arguments.extend(["-keyout", key, "-out", name]);
        openssl(&arguments);
    }
    // Its own port is for the harness, this one is for us.
    let port = servers::free_port();
    let listens = ["--tls-port", &port.to_string(), "--tls-auth-clients", "no", "--requirepass", "secret"];
    let files = ["--tls-cert-file", &ca, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let _server = Server::start(&[&listens[..], &files].concat());

    let storage = |host: &str, ca: &str| RedisStorage::new(&format!("rediss://:secret@{host}:{port}?ca={ca}"));
    for host in ["localhost", "127.0.0.1"] {
        storage(host, &ca).unwrap().ready(LONG).await.unwrap();
    }
    let error = storage("127.0.0.1", &other).unwrap().ready(SHORT).await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
    let error =
        RedisStorage::new(&format!("redis://:secret@127.0.0.1:{port}")).unwrap().ready(SHORT).await.unwrap_err();
    assert!(!error.may_have_counted(), "{error}");

    for (ca, part) in [(file("none.pem"), "none.pem"), (key, "no certificate")] {
        let error = storage("localhost", &ca).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("write") && !error.contains("secret"), "{error}");
    }
}
