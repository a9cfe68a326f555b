//! The type [`Tls`] in builds without TLS.

use std::io;

use tokio::net::TcpStream;

use super::Paths;

/// The settings of a TLS connection. This type has no values, because a URL that needs TLS is
/// rejected.
#[derive(Clone, Debug)]
pub(in crate::storage) enum Tls {}

impl Tls {
    pub(super) fn from_files(_: &Paths, _: Option<&'static [u8]>) -> Result<Self, String> {
        Err("TLS needs the feature \"redis-rustls\", \"etcd-rustls\" or \"postgres-rustls\" of tower-ratelimit"
            .to_owned())
    }

    #[cfg_attr(
        not(any(feature = "redis", feature = "etcd")),
        allow(dead_code, reason = "the client of PostgreSQL does the handshake itself")
    )]
    #[allow(clippy::unused_async, reason = "the same signature as with TLS")]
    pub(in crate::storage) async fn over(&self, _: TcpStream, _: &str) -> io::Result<TcpStream> {
        match *self {}
    }
}
