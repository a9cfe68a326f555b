//! Logins and certificates of a [`RedisStorage`].

use std::sync::Arc;

use super::RedisStorage;
use super::link::Link;
use super::url::Access;
use crate::error::BoxError;
use crate::storage::credentials::{Credentials, LoginSource};

impl RedisStorage {
    /// Sets a provider of credentials, which the storage calls for each new connection. Use it for
    /// passwords and tokens that rotate. Overrides the user and the password in the URL, but not
    /// the login for sentinels.
    ///
    /// | event | effect |
    /// |---|---|
    /// | the password changes | open connections stay open |
    /// | the server closes the connection, or replies that a login is required | the storage reconnects with new credentials |
    /// | the provider fails, or the server rejects its credentials | calls fail, and the storage tries again after a backoff of up to 200 ms |
    ///
    /// An attempt to connect takes at most one second, including the call of the provider. While it
    /// has not succeeded, another try starts every 250 milliseconds, up to four in total. So up to
    /// four calls of the provider can run at once.
    /// The guide on [deploying](crate::guide::deploying#logins-that-rotate) has more details.
    ///
    /// The returned storage opens new connections, which it does not share with earlier clones.
    ///
    /// ```
    /// use tower_ratelimit::storage::{Credentials, RedisStorage};
    ///
    /// let storage = RedisStorage::new("redis://cache")?.credentials(|| async {
    ///     // Blocks only for a moment, because the file is small and local.
    ///     let password = std::fs::read_to_string("/run/secrets/redis-password")?;
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
        let access = Access { login: LoginSource::provider(provider), ..self.target.1.clone() };
        self.with_access(access)
    }

    /// Sets the certificates and the private key for TLS. Overrides the options `ca`, `cert` and
    /// `key` of the URL. Those that `config` does not set return to their defaults.
    ///
    /// The returned storage opens new connections, which it does not share with earlier clones.
    ///
    /// # Errors
    ///
    /// Returns an error if a part of `config` is malformed, or if the scheme of the URL has no TLS.
    #[cfg(feature = "redis-rustls")]
    pub fn try_tls(self, config: &crate::storage::TlsConfig) -> Result<Self, crate::ConfigError> {
        use crate::error::ConfigError;
        let Some(tls) = &self.target.1.tls else {
            return Err(ConfigError::new("the URL has no TLS: write rediss:// instead of redis://"));
        };
        let tls = tls.with(config).map_err(ConfigError::new)?;
        let access = Access { tls: Some(tls), ..self.target.1.clone() };
        Ok(self.with_access(access))
    }

    /// Replaces the logins and certificates, and opens new connections on the next call.
    fn with_access(self, access: Access) -> Self {
        let servers = self.target.0.clone();
        let link = Link::new(servers.clone(), &access);
        Self { link, target: Arc::new((servers, access)), ..self }.with_new_cas()
    }
}
