use std::fmt;

/// The certificates and the private key for TLS connections to a server, as PEM from memory. See
/// `RedisStorage::try_tls`, `EtcdStorage::try_tls` and `PostgresStorage::try_tls`.
///
/// The host name of the server is always verified. For certificates in files, use the options `ca`,
/// `cert` and `key` of the URL instead.
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
    /// Creates a configuration without a client certificate, which trusts the certificates of the
    /// system.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts only the certificates in `pem`. Defaults to the certificates of the system.
    ///
    /// `pem` contains one or more certificates, each of one of these kinds:
    ///
    /// - that of the authority that signed the server's certificate
    /// - the server's own certificate, if it is self-signed and not marked as an authority
    ///   (`CA:FALSE`)
    ///
    /// `try_tls` reports malformed certificates.
    #[must_use]
    pub fn ca(self, pem: impl Into<Vec<u8>>) -> Self {
        Self { ca: Some(pem.into()), ..self }
    }

    /// Presents a client certificate to the server. Defaults to none.
    ///
    /// `chain` contains the certificate, followed by those of intermediate authorities. `key` is
    /// the private key of the certificate, without a passphrase. Both are PEM.
    ///
    /// `try_tls` reports malformed values, and a key that does not match the certificate.
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
