//! Connects with rustls.

use std::fmt;
use std::fs;
use std::io;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// The settings of a TLS connection.
#[derive(Clone)]
pub(in crate::storage) struct Tls {
    config: Arc<ClientConfig>,
    alpn: Option<&'static [u8]>,
}

/// The names of the parts in error messages: quoted paths, or words.
struct PemNames {
    ca: String,
    cert: String,
    key: String,
    /// The advice that ends a message.
    help: &'static str,
}

impl Tls {
    /// Creates the settings from the paths of PEM files in a URL: the certificates to trust, and the
    /// certificate and the private key of this client.
    ///
    /// # Errors
    ///
    /// Returns a message if a file cannot be read, or does not contain the expected PEM.
    pub(super) fn from_files(
        ca: Option<&str>,
        client: Option<(&str, &str)>,
        alpn: Option<&'static [u8]>,
    ) -> Result<Self, String> {
        let read = |path: &str, option: &str| {
            fs::read(path).map_err(|error| {
                format!("cannot read {path:?}: {error}; write the path of a PEM file, {option}=/path/to/{option}.pem")
            })
        };
        let mut config = TlsConfig::new();
        let mut names = PemNames {
            ca: "the system's certificate store".to_owned(),
            cert: String::new(),
            key: String::new(),
            help: "write the paths of PEM files, ca=/path/to/ca.pem&cert=/path/to/cert.pem&key=/path/to/key.pem",
        };
        if let Some(path) = ca {
            config = config.ca(read(path, "ca")?);
            names.ca = format!("{path:?}");
        }
        if let Some((cert, key)) = client {
            config = config.client_certificate(read(cert, "cert")?, read(key, "key")?);
            (names.cert, names.key) = (format!("{cert:?}"), format!("{key:?}"));
        }
        Self::with_names(&config, alpn, &names)
    }

    /// Returns a copy with the certificates of `config` and the same ALPN protocol.
    ///
    /// # Errors
    ///
    /// Returns a message if a part of `config` is malformed.
    pub(in crate::storage) fn with(&self, config: &TlsConfig) -> Result<Self, String> {
        let names = PemNames {
            ca: if config.ca.is_some() { "`ca`" } else { "the system's certificate store" }.to_owned(),
            cert: "the client certificate".to_owned(),
            key: "the client's key".to_owned(),
            help: "pass the content of a PEM file",
        };
        Self::with_names(config, self.alpn, &names)
    }

    fn with_names(config: &TlsConfig, alpn: Option<&'static [u8]>, names: &PemNames) -> Result<Self, String> {
        let mut rustls = match &config.rustls {
            Some(rustls) if config.ca.is_none() && config.client.is_none() => ClientConfig::clone(rustls),
            Some(_) => {
                let message =
                    "a rustls configuration has its own certificates; call neither `ca` nor `client_certificate`";
                return Err(message.to_owned());
            }
            None => client_config(config, names)?,
        };
        if let Some(alpn) = alpn {
            rustls.alpn_protocols = vec![alpn.to_vec()];
        }
        Ok(Self { config: Arc::new(rustls), alpn })
    }

    /// Returns the settings, for a client crate that does the handshake itself.
    #[cfg(feature = "postgres-rustls")]
    pub(in crate::storage) fn rustls(&self) -> ClientConfig {
        ClientConfig::clone(&self.config)
    }

    /// Does the handshake on `stream`, and verifies that the server's certificate is for `name`.
    pub(in crate::storage) async fn over(&self, stream: TcpStream, name: &str) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(Arc::clone(&self.config)).connect(name, stream).await
    }
}

/// Creates a rustls configuration from PEM.
fn client_config(config: &TlsConfig, names: &PemNames) -> Result<ClientConfig, String> {
    let PemNames { ca, cert, key, help } = names;
    let provider = provider().ok_or(NO_PROVIDER)?;
    let mut roots = RootCertStore::empty();
    match &config.ca {
        Some(pem) => {
            for certificate in certificates(pem, ca, help)? {
                roots.add(certificate).map_err(|error| format!("cannot use a certificate in {ca}: {error}"))?;
            }
        }
        // Certificates of the system that cannot be parsed are skipped, as the rustls docs
        // recommend.
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    if roots.is_empty() {
        return Err(format!("no certificate in {ca}; name the certificates to trust, ca=/path/to/ca.pem"));
    }
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    match &config.client {
        Some((chain, secret)) => {
            let chain = certificates(chain, cert, help)?;
            let secret = PrivateKeyDer::from_pem_slice(secret).map_err(|error| {
                format!("no private key in {key}: {}; {help}, of a key without a passphrase", reason(&error))
            })?;
            builder.with_client_auth_cert(chain, secret).map_err(|error| {
                format!("the certificate in {cert} and the private key in {key} cannot be used together: {error}")
            })
        }
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Returns the cryptography provider that the program has installed, or else ring.
///
/// rustls itself would panic if none is installed and crates enable two of them.
fn provider() -> Option<Arc<CryptoProvider>> {
    let provider = CryptoProvider::get_default().cloned();
    #[cfg(feature = "ring")]
    let provider = provider.or_else(|| Some(Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())));
    provider
}

/// The error without a provider.
const NO_PROVIDER: &str = "TLS has no cryptography; enable the feature \"ring\" of tower-ratelimit, or call \
                           `install_default` of a `CryptoProvider` of rustls before";

/// Returns the certificates in a PEM text, at least one.
fn certificates(pem: &[u8], name: &str, help: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let parsed = parsed.map_err(|error| format!("malformed certificate in {name}: {}; {help}", reason(&error)))?;
    if parsed.is_empty() { Err(format!("no certificate in {name}; {help}")) } else { Ok(parsed) }
}

/// Returns the text of an error. The texts of the crate for malformed sections quote the file, which
/// may be a private key.
fn reason(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a section has no END line; the line breaks may be missing".to_owned(),
        pem::Error::IllegalSectionStart { .. } => "invalid BEGIN line; the line breaks may be missing".to_owned(),
        other => other.to_string(),
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// The certificates and the private key for TLS connections to a server: PEM from memory, or a
/// rustls configuration. See `RedisStorage::try_tls`, `MemcachedStorage::try_tls`,
/// `EtcdStorage::try_tls` and `PostgresStorage::try_tls`.
///
/// The storage verifies the host name of the server, unless you pass a rustls configuration whose
/// verifier skips this check. For certificates in files, use the options `ca`, `cert` and `key` of the
/// URL instead.
///
/// The cryptography comes from the first of these that exists:
///
/// 1. the rustls configuration, if you pass one
/// 2. the `CryptoProvider` that the program has installed with `install_default` of rustls 0.23
/// 3. the crate `ring`, if the default feature `ring` is enabled
///
/// Without the feature `ring`, install a provider before you create the storage, even if you pass a
/// rustls configuration.
///
/// ```no_run
/// # #[cfg(feature = "redis-rustls")]
/// # fn storage(ca: &[u8], certificate: &[u8], key: &[u8]) -> Result<(), tower_ratelimit::ConfigError> {
/// use tower_ratelimit::storage::{RedisStorage, TlsConfig};
///
/// let tls = TlsConfig::new().ca(ca).client_certificate(certificate, key);
/// let storage = RedisStorage::new("rediss://cache")?.try_tls(&tls)?;
/// # drop(storage);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct TlsConfig {
    ca: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
    rustls: Option<Arc<ClientConfig>>,
}

impl TlsConfig {
    /// Creates a configuration without a client certificate, which trusts the certificates of the
    /// system.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a configuration from one of rustls 0.23, for example with another `CryptoProvider`
    /// or a certificate that the program renews. For etcd, its ALPN protocols are replaced by `h2`.
    ///
    /// `config` decides which certificates to trust and to present. So `try_tls` returns an error if
    /// [`ca`](Self::ca) or [`client_certificate`](Self::client_certificate) is called, too.
    pub fn from_rustls(config: impl Into<Arc<ClientConfig>>) -> Self {
        Self { rustls: Some(config.into()), ..Self::new() }
    }

    /// Trusts only the certificates in `pem`. Defaults to the certificates of the system.
    ///
    /// `pem` contains one or more certificates, each of one of these kinds:
    ///
    /// - that of the authority that signed the server's certificate
    /// - the server's own certificate, if it is self-signed and not marked as an authority
    ///   (`CA:FALSE`)
    ///
    /// `try_tls` returns an error if the certificates are malformed.
    #[must_use]
    pub fn ca(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { ca: Some(pem.into()), ..self }
    }

    /// Presents a client certificate to the server. Defaults to none.
    ///
    /// `chain` contains the certificate, followed by those of intermediate authorities. `key` is
    /// the private key of the certificate, without a passphrase. Both are PEM.
    ///
    /// `try_tls` returns an error if a value is malformed, or if the key does not match the
    /// certificate.
    #[must_use]
    pub fn client_certificate(self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { client: Some((chain.into(), key.into())), ..self }
    }
}

/// Prints only which parts are set, not the certificates or the private key.
impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig")
            .field("ca", &self.ca.is_some())
            .field("client_certificate", &self.client.is_some())
            .field("rustls", &self.rustls.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::Error;
    use tokio_rustls::rustls::crypto::{GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms};
    use tokio_rustls::rustls::sign::SigningKey;

    use super::*;

    /// Cryptography that can do nothing.
    #[derive(Debug)]
    struct Nothing;

    impl SecureRandom for Nothing {
        fn fill(&self, _: &mut [u8]) -> Result<(), GetRandomFailed> {
            Err(GetRandomFailed)
        }
    }

    impl KeyProvider for Nothing {
        fn load_private_key(&self, _: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
            Err(Error::General("no keys".to_owned()))
        }
    }

    /// No other unit test connects over TLS.
    #[test]
    fn installed_cryptography_is_used_before_ring() {
        assert_eq!(provider().map(|ring| ring.cipher_suites.is_empty()), cfg!(feature = "ring").then_some(false));
        #[cfg(all(feature = "redis-rustls", not(feature = "ring")))]
        {
            let error = crate::storage::RedisStorage::new("rediss://cache").unwrap_err().to_string();
            assert_eq!(error, format!("cannot read the URL \"rediss://cache\": {NO_PROVIDER}"));
        }
        let algorithms = WebPkiSupportedAlgorithms { all: &[], mapping: &[] };
        let nothing = CryptoProvider {
            cipher_suites: Vec::new(),
            kx_groups: Vec::new(),
            signature_verification_algorithms: algorithms,
            secure_random: &Nothing,
            key_provider: &Nothing,
        };
        nothing.install_default().unwrap();
        assert!(provider().unwrap().cipher_suites.is_empty());
    }
}
