//! Replaces TLS in builds without a feature for it.

use std::io;

use tokio::net::TcpStream;

/// The settings of a TLS connection. This type has no values, because a URL that needs TLS is rejected.
#[derive(Clone, Debug)]
pub(in crate::storage) enum Tls {}

impl Tls {
    pub(super) fn from_files(
        _ca: Option<&str>,
        _client: Option<(&str, &str)>,
        _alpn: Option<&'static [u8]>,
    ) -> Result<Self, String> {
        Err("TLS needs the feature \"redis-rustls\", \"memcached-rustls\", \"etcd-rustls\" or \"postgres-rustls\" of \
             tower-ratelimit"
            .to_owned())
    }

    #[allow(clippy::unused_async, reason = "the same signature as with TLS")]
    pub(in crate::storage) async fn over(&self, _: TcpStream, _: &str) -> io::Result<TcpStream> {
        match *self {}
    }
}
