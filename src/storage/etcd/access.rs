//! Logins and certificates of an [`EtcdStorage`].

use std::sync::Arc;

use super::EtcdStorage;
use super::lease::Leases;
use super::url::Access;
use crate::error::BoxError;
use crate::storage::credentials::{Credentials, LoginSource};

impl EtcdStorage {
    /// Sets a provider of credentials, which the storage calls for each new connection. Overrides
    /// the user and the password in the URL.
    ///
    /// Use it for passwords that rotate. etcd revokes the tokens of a user whose password changes.
    /// The storage then reconnects with new credentials. If the provider fails, the attempt to
    /// connect fails too, and later calls retry it.
    ///
    /// An attempt to connect, including the provider, is aborted after one second. The guide on
    /// [deploying](crate::guide::deploying#logins-that-rotate) has more details.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// ```
    /// use tower_ratelimit::storage::{Credentials, EtcdStorage};
    ///
    /// let storage = EtcdStorage::new("etcd://one,two,three")?.credentials(|| async {
    ///     let password = std::fs::read_to_string("/run/secrets/etcd-password")?;
    ///     Ok(Credentials::new("ratelimit", password.trim_end()))
    /// });
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    #[must_use]
    pub fn credentials<F, Fut>(self, provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        let access = Access { login: LoginSource::provider(provider), ..self.store.members.access().clone() };
        self.with_access(access)
    }

    /// Sets the certificates for TLS. Replaces the options `ca`, `cert` and `key` of the URL,
    /// including those that `config` does not set.
    ///
    /// With `--client-cert-auth`, etcd takes the user from the common name of the client
    /// certificate, unless the storage has a login.
    ///
    /// Call this method before the first decision, because the returned storage opens new
    /// connections.
    ///
    /// # Errors
    ///
    /// Returns an error if
    ///
    /// - a certificate or the private key is malformed, or they do not match,
    /// - `config` has no certificates to trust, and the system has none,
    /// - the scheme of the URL is `etcd`, which has no TLS.
    #[cfg(feature = "etcd-rustls")]
    pub fn try_tls(self, config: &crate::storage::TlsConfig) -> Result<Self, crate::ConfigError> {
        use crate::error::ConfigError;
        let access = self.store.members.access().clone();
        let Some(tls) = &access.tls else {
            return Err(ConfigError::new("the URL has no TLS: write etcds:// instead of etcd://"));
        };
        let tls = Some(tls.with(config).map_err(ConfigError::new)?);
        Ok(self.with_access(Access { tls, ..access }))
    }

    fn with_access(mut self, access: Access) -> Self {
        self.store.members = self.store.members.with_access(access);
        self.store.leases = Arc::new(Leases::new());
        self.with_changed_store()
    }
}
