//! TLS: the certificates that a storage trusts, and those that it presents.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS12;
use rustls::{ClientConfig, KeyLog, RootCertStore};
use tower_ratelimit::storage::{RedisStorage, TlsConfig};
use tower_ratelimit::{Key, Quota, RateLimiter, Storage};

use common::certificates::Certificates;
use common::message;
use common::servers::Server;
use common::servers::storage::failed_check;

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn only_certificates_that_the_url_names_are_trusted() {
    let files = Certificates::create();
    let (key, ca, other) = (files.path("key.pem"), files.path("ca.pem"), files.path("other.pem"));
    // The harness uses the other port, without TLS.
    let port = common::servers::free_port();
    let listens = ["--tls-port", &port.to_string(), "--tls-auth-clients", "no", "--requirepass", "secret"];
    let pair = ["--tls-cert-file", &ca, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let _server = Server::start(&[&listens[..], &pair].concat());

    let storage =
        |host: &str, ca: &str| RedisStorage::new(&format!("rediss://:secret@{host}:{port}?timeout=60s&ca={ca}"));
    for host in ["localhost", "127.0.0.1"] {
        storage(host, &ca).unwrap().ready(LONG).await.unwrap();
    }
    let error = message(failed_check(&storage("127.0.0.1", &other).unwrap()).await);
    assert!(error.contains("certificate"), "{error}");
    let plain = RedisStorage::new(&format!("redis://:secret@127.0.0.1:{port}?timeout=60s")).unwrap();
    let error = failed_check(&plain).await;
    assert!(!error.may_have_counted(), "{error}");

    for (ca, part) in [(files.path("none.pem"), "none.pem"), (key, "no certificate")] {
        let error = storage("localhost", &ca).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("write") && !error.contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn server_accepts_only_clients_with_a_certificate_of_its_authority() {
    let files = Certificates::authority();
    let path = |name: &str| files.path(name);
    let port = common::servers::free_port();
    let listens = ["--tls-port", &port.to_string(), "--tls-auth-clients", "yes", "--requirepass", "secret"];
    let [cert, key, ca] = ["server.pem", "server-key.pem", "authority.pem"].map(path);
    let pair = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let _server = Server::start(&[&listens[..], &pair].concat());

    let url = |options: &str| format!("rediss://:secret@localhost:{port}?timeout=60s{options}");
    let client = |cert: &str, key: &str| format!("&ca={ca}&cert={}&key={}", path(cert), path(key));
    let by_url = RedisStorage::new(&url(&client("client.pem", "client-key.pem"))).unwrap();
    let tls = TlsConfig::new().ca(files.read("authority.pem"));
    let identity = tls.clone().client_certificate(files.read("client.pem"), files.read("client-key.pem"));
    let by_builder = RedisStorage::new(&url("")).unwrap().try_tls(&identity).unwrap();
    for storage in [by_url, by_builder] {
        storage.ready(LONG).await.unwrap();
        let limiter = RateLimiter::with_storage(Quota::per_minute(5), storage);
        assert!(limiter.hit(&Key::from("alice")).await.unwrap().is_admitted());
    }

    let no_client = RedisStorage::new(&url(&format!("&ca={ca}"))).unwrap();
    let stranger = RedisStorage::new(&url(&client("other.pem", "other-key.pem"))).unwrap();
    let no_client_by_builder = RedisStorage::new(&url(&client("client.pem", "client-key.pem"))).unwrap();
    for storage in [no_client, stranger, no_client_by_builder.try_tls(&tls).unwrap()] {
        let error = failed_check(&storage).await;
        assert!(!error.may_have_counted() && !format!("{error:#}").contains("secret"), "{error:#}");
    }
}

/// Counts the handshakes of a configuration that speaks TLS 1.2, which logs one secret for each.
#[derive(Debug, Default)]
struct Handshakes(AtomicUsize);

impl KeyLog for Handshakes {
    fn log(&self, label: &str, _: &[u8], _: &[u8]) {
        assert_eq!(label, "CLIENT_RANDOM");
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn rustls_configuration_of_the_program_decides_on_versions_and_certificates() {
    let files = Certificates::authority();
    let port = common::servers::free_port();
    let listens = ["--tls-port", &port.to_string(), "--tls-auth-clients", "no", "--requirepass", "secret"];
    let [cert, key, ca] = ["server.pem", "server-key.pem", "authority.pem"].map(|name| files.path(name));
    let pair = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    let _server = Server::start(&[&listens[..], &pair].concat());

    let handshakes = Arc::<Handshakes>::default();
    let config = |roots: RootCertStore| {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_protocol_versions(&[&TLS12]).unwrap();
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.key_log = handshakes.clone();
        Arc::new(config)
    };
    let url = format!("rediss://:secret@localhost:{port}?timeout=60s");
    let storage = |tls: &TlsConfig| RedisStorage::new(&url).unwrap().try_tls(tls);
    let mut roots = RootCertStore::empty();
    let untrusting = TlsConfig::from_rustls(config(roots.clone()));
    let error = message(failed_check(&storage(&untrusting).unwrap()).await);
    assert!(error.contains("certificate"), "{error}");
    assert_eq!(handshakes.0.load(Ordering::Relaxed), 0);

    roots.add(CertificateDer::from_pem_slice(&files.read("authority.pem")).unwrap()).unwrap();
    let tls = TlsConfig::from_rustls(config(roots));
    let trusting = storage(&tls).unwrap();
    trusting.ready(LONG).await.unwrap();
    let limiter = RateLimiter::with_storage(Quota::per_minute(5), trusting);
    assert!(limiter.hit(&Key::from("alice")).await.unwrap().is_admitted());
    assert!(handshakes.0.load(Ordering::Relaxed) > 0);

    let error = storage(&tls.ca(files.read("authority.pem"))).unwrap_err().to_string();
    assert!(error.contains("call neither `ca` nor `client_certificate`"), "{error}");
}

#[test]
fn files_that_cannot_be_used_are_rejected_with_their_path() {
    let files = Certificates::authority();
    let path = |name: &str| files.path(name);
    let [ca, cert, key, none] = ["authority.pem", "client.pem", "client-key.pem", "none.pem"].map(path);
    std::fs::write(path("broken.pem"), "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n").unwrap();
    let (broken, other) = (path("broken.pem"), path("other-key.pem"));
    for (options, parts) in [
        (format!("cert={cert}"), ["write key=/path/to/key.pem", ""]),
        (format!("key={key}"), ["write cert=/path/to/cert.pem", ""]),
        (format!("cert={none}&key={key}"), ["none.pem", "cert=/path/to/cert.pem"]),
        (format!("cert={cert}&key={none}"), ["none.pem", "key=/path/to/key.pem"]),
        (format!("cert={key}&key={cert}"), ["no certificate in", "client-key.pem"]),
        (format!("cert={cert}&key={ca}"), ["no private key in", "authority.pem"]),
        (format!("cert={cert}&key={other}"), ["cannot be used together", "other-key.pem"]),
        (format!("ca={broken}"), ["broken.pem", "write"]),
    ] {
        let error = RedisStorage::new(&format!("rediss://:secret@localhost?{options}")).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{options}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
    let error = RedisStorage::new(&format!("redis://localhost?ca={ca}")).unwrap_err().to_string();
    assert!(error.contains("unknown option"), "{error}");
}

#[test]
fn pem_that_cannot_be_used_is_rejected() {
    let files = Certificates::authority();
    let (cert, key) = (files.read("client.pem"), files.read("client-key.pem"));
    let tls = TlsConfig::new().ca(files.read("authority.pem"));
    assert!(!format!("{:?}", tls.clone().client_certificate(&*cert, &*key)).contains("PRIVATE"));
    // A key from an environment variable may have lost its line breaks. The error must not quote it.
    let text = String::from_utf8(key.clone()).unwrap();
    let (on_one_line, with_a_long_begin_line) = (text.replace('\n', " "), text.replacen("-----\n", "", 1));
    for (config, part) in [
        (TlsConfig::new().ca("text"), "no certificate in `ca`"),
        (tls.clone().client_certificate(&*key, &*key), "no certificate in the client certificate"),
        (tls.clone().client_certificate(&*cert, &*cert), "no private key"),
        (tls.clone().client_certificate(&*cert, &*on_one_line), "the line breaks may be missing"),
        (TlsConfig::new().ca(&*on_one_line), "the line breaks may be missing"),
        (TlsConfig::new().ca(&*with_a_long_begin_line), "the line breaks may be missing"),
        (tls.clone().client_certificate(&*cert, files.read("other-key.pem")), "cannot be used together"),
    ] {
        let error = RedisStorage::new("rediss://localhost").unwrap().try_tls(&config).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('['), "{error}");
    }
    let error = RedisStorage::new("redis://localhost").unwrap().try_tls(&tls).unwrap_err().to_string();
    assert!(error.contains("write rediss://"), "{error}");
}
