//! TLS connections. The certificates are loaded when the storage is created.
#![cfg_attr(
    not(any(feature = "redis", feature = "memcached", feature = "etcd")),
    allow(dead_code, reason = "the client of PostgreSQL does the handshake itself")
)]

#[cfg_attr(
    not(any(
        feature = "redis-rustls",
        feature = "memcached-rustls",
        feature = "etcd-rustls",
        feature = "postgres-rustls"
    )),
    path = "missing.rs"
)]
mod client;

pub(super) use self::client::Tls;
#[cfg(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
))]
pub use self::client::TlsConfig;
use crate::error::ConfigError;
use crate::storage::url::{Options, Wrong};

impl Tls {
    /// Creates the TLS settings of a URL, from its options `ca`, `cert` and `key`. `alpn` is the
    /// protocol to negotiate, for servers that need one.
    pub(super) fn from_options(
        options: &mut Options<'_>,
        alpn: Option<&'static [u8]>,
        wrong: &Wrong<'_>,
    ) -> Result<Self, ConfigError> {
        let ca = options.take("ca");
        let client = match (options.take("cert"), options.take("key")) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert, key)),
            (Some(_), None) => {
                return Err(wrong("cert needs a private key: write key=/path/to/key.pem too".to_owned()));
            }
            (None, Some(_)) => {
                return Err(wrong("key needs a certificate: write cert=/path/to/cert.pem too".to_owned()));
            }
        };
        let client = client.as_ref().map(|(cert, key)| (&**cert, &**key));
        Self::from_files(ca.as_deref(), client, alpn).map_err(wrong)
    }
}
