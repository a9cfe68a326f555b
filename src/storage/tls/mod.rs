//! TLS connections. The certificates are loaded when the storage is created.
#![cfg_attr(
    not(any(feature = "redis", feature = "memcached", feature = "etcd")),
    allow(dead_code, reason = "the client of PostgreSQL does the handshake itself")
)]

#[cfg(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
))]
mod client;

#[cfg(not(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
)))]
use tokio::net::TcpStream;

#[cfg(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
))]
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

/// The settings of a TLS connection in builds without TLS. This type has no values, because a URL
/// that needs TLS is rejected.
#[cfg(not(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
)))]
#[derive(Clone, Debug)]
pub(super) enum Tls {}

#[cfg(not(any(
    feature = "redis-rustls",
    feature = "memcached-rustls",
    feature = "etcd-rustls",
    feature = "postgres-rustls"
)))]
impl Tls {
    fn from_files(_: &Paths, _: Option<&'static [u8]>) -> Result<Self, String> {
        Err("TLS needs the feature \"redis-rustls\", \"memcached-rustls\", \"etcd-rustls\" or \"postgres-rustls\" of \
             tower-ratelimit"
            .to_owned())
    }

    #[allow(clippy::unused_async, reason = "the same signature as with TLS")]
    pub(super) async fn over(&self, _: TcpStream, _: &str) -> std::io::Result<TcpStream> {
        match *self {}
    }
}

/// The paths of PEM files in a URL.
#[cfg_attr(
    not(any(
        feature = "redis-rustls",
        feature = "memcached-rustls",
        feature = "etcd-rustls",
        feature = "postgres-rustls"
    )),
    allow(dead_code, reason = "without TLS nothing reads the files")
)]
struct Paths {
    /// The certificates to trust.
    ca: Option<String>,
    /// The certificate and the private key of this client.
    client: Option<(String, String)>,
}

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
        Self::from_files(&Paths { ca, client }, alpn).map_err(wrong)
    }
}
