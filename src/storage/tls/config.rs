use std::fmt;

/// The certificates and the private key for TLS connections to a server, as PEM. See
/// `RedisStorage::try_tls`, `EtcdStorage::try_tls` and `PostgresStorage::try_tls`.
///
/// Instead, the URL options `ca`, `cert` and `key` can name PEM files.
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
    pub(super) ca: Option<Vec<u8>>,
    pub(super) client: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsConfig {
    /// Creates a configuration that trusts the certificates of the system, without a client
    /// certificate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts only the certificates in `pem`. Defaults to the certificates of the system.
    ///
    /// `pem` contains the certificate of the authority that signed the server's certificate. It may
    /// also contain the server's own certificate, if that is self-signed and not marked as an
    /// authority (`CA:FALSE`).
    #[must_use]
    pub fn ca(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { ca: Some(pem.into()), ..self }
    }

    /// Presents a client certificate to the server. Defaults to none.
    ///
    /// `chain` contains the certificate, followed by those of intermediate authorities. `key` is its
    /// private key without a passphrase. Both are PEM.
    #[must_use]
    pub fn client_certificate(self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        Self { client: Some((chain.into(), key.into())), ..self }
    }
}

/// Prints only which certificates are set, not the certificates or the private key.
impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig")
            .field("ca", &self.ca.is_some())
            .field("client_certificate", &self.client.is_some())
            .finish()
    }
}
