use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::{Caveat, Head, KeyExtractor, Missing};
use crate::{ConfigError, Key};

/// The address at the other end of the connection.
///
/// It is what the server attached to the request: axum's `ConnectInfo<SocketAddr>` (feature `axum`), else tonic's connect
/// info, of plain TCP or of TLS (feature `tonic`), else a plain [`SocketAddr`] in the extensions. Behind a proxy it is the
/// proxy's address.
///
/// 1. IPv4 addresses are keys as they are.
/// 2. An IPv4-mapped IPv6 address (`::ffff:1.2.3.4`) is the IPv4 address, decided by its bits, not by how it is written.
/// 3. Other IPv6 addresses are taken as their /64, since one client has all of one; see
///    [`ipv6_prefix`](Self::ipv6_prefix).
///
/// Without an address the key is missing, and since no client can do anything about that the answer is 500.
///
/// ```
/// use std::net::SocketAddr;
/// use tower_ratelimit::extract::{Head, KeyExtractor};
/// use tower_ratelimit::PeerIp;
///
/// let key = |address: &str| {
///     let mut request = http::Request::get("/").body(()).unwrap();
///     request.extensions_mut().insert(address.parse::<SocketAddr>().unwrap());
///     PeerIp::new().extract(&Head::of(&request))
/// };
/// assert_eq!(key("1.2.3.4:80"), key("[::ffff:1.2.3.4]:8080"));
/// assert_eq!(key("[2001:db8::1]:80"), key("[2001:db8::2]:80"));
/// assert_ne!(key("[2001:db8::1]:80"), key("[2001:db8:0:1::1]:80"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PeerIp {
    ipv6_prefix: u8,
}

impl PeerIp {
    /// The peer's address, IPv6 as its /64.
    pub const fn new() -> Self {
        Self { ipv6_prefix: 64 }
    }

    /// How many bits of an IPv6 address tell clients apart: 64 unless said, 56 or 48 where whole sites are one client,
    /// 128 for each address by itself.
    ///
    /// # Panics
    ///
    /// When there are more than 128; [`try_ipv6_prefix`](Self::try_ipv6_prefix) returns an error instead.
    #[must_use]
    #[track_caller]
    pub const fn ipv6_prefix(self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 address has 128 bits: use a prefix of at most that, for example 64");
        Self { ipv6_prefix: bits }
    }

    /// As [`ipv6_prefix`](Self::ipv6_prefix).
    ///
    /// # Errors
    ///
    /// When there are more than 128.
    pub fn try_ipv6_prefix(self, bits: u8) -> Result<Self, ConfigError> {
        if bits > 128 {
            return Err(ConfigError::new(format!(
                "an IPv6 address has 128 bits, so its prefix cannot have {bits}: use for example 64"
            )));
        }
        Ok(self.ipv6_prefix(bits))
    }

    fn network(self, address: Ipv6Addr) -> Ipv6Addr {
        let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6_prefix)).unwrap_or(0);
        Ipv6Addr::from_bits(address.to_bits() & mask)
    }
}

impl Default for PeerIp {
    fn default() -> Self {
        Self::new()
    }
}

impl KeyExtractor for PeerIp {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, Missing> {
        match peer(head) {
            Some(peer) => match peer.ip().to_canonical() {
                IpAddr::V4(v4) => Ok(Some(v4.into())),
                IpAddr::V6(v6) => Ok(Some(self.network(v6).into())),
            },
            None => Err(Missing::server(
                "the peer's address is missing: with axum, enable the feature \"axum\" of tower-ratelimit and serve with \
                 into_make_service_with_connect_info::<SocketAddr>(); with tonic, enable the feature \"tonic\" and serve \
                 over TCP; with another server, insert a SocketAddr into the request's extensions",
            )),
        }
    }

    fn caveats(&self) -> Vec<Caveat> {
        let per_address = (self.ipv6_prefix > 64).then_some(Caveat::Ipv6PerAddress);
        per_address.into_iter().chain([Caveat::OnlyPeer]).collect()
    }
}

fn peer(head: &Head<'_>) -> Option<SocketAddr> {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::ConnectInfo(address)) = head.extensions.get() {
        return Some(*address);
    }
    #[cfg(feature = "tonic")]
    if let Some(address) = head.extensions.get().and_then(tonic::transport::server::TcpConnectInfo::remote_addr) {
        return Some(address);
    }
    let plain = head.extensions.get().copied();
    #[cfg(feature = "tonic")]
    let plain = plain.or_else(|| through_tls(head));
    plain
}

/// The address behind tonic's `TlsConnectInfo`, a type that exists only when tonic is built with TLS: a request of tonic's own
/// knows, and wants the extensions for itself. Tonic's own acceptor attaches the other type too, so only those who bring
/// an acceptor come here.
#[cfg(feature = "tonic")]
#[cold]
fn through_tls(head: &Head<'_>) -> Option<SocketAddr> {
    tonic::Request::from_parts(tonic::metadata::MetadataMap::new(), head.extensions.clone(), ()).remote_addr()
}
