//! A replacement for [`Tls`] if no feature enables TLS.

use std::io;

use tokio::net::TcpStream;

use super::Paths;

/// Cannot be created without TLS features: a URL that needs TLS is rejected.
#[derive(Clone, Debug)]
pub(in crate::storage) enum Tls {}

impl Tls {
    pub(super) fn from_files(_: &Paths, _: Option<&'static [u8]>) -> Result<Self, String> {
        Err("TLS needs the feature \"redis-rustls\" or \"etcd-rustls\" of tower-ratelimit".to_owned())
    }

    #[allow(clippy::unused_async, reason = "the same signature as with TLS")]
    pub(in crate::storage) async fn over(&self, _: TcpStream, _: &str) -> io::Result<TcpStream> {
        match *self {}
    }
}
