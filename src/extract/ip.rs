use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::peer::{no_peer, peer};
use super::{Caveat, Head, KeyError, KeyExtractor};
use crate::{ConfigError, Key};

/// The address at the other end of the connection.
///
/// It is what the server attached to the request: axum's `ConnectInfo<SocketAddr>` (feature `axum`), else tonic's connect
/// info, of plain TCP or of TLS (feature `tonic`), else a plain [`SocketAddr`](std::net::SocketAddr) in the extensions. Behind a
/// proxy it is the proxy's address: use [`ClientIp`](crate::ClientIp) there.
///
/// 1. IPv4 addresses are keys as they are.
/// 2. An IPv4-mapped IPv6 address (`::ffff:1.2.3.4`) is the IPv4 address, decided by its bits, not by how it is written.
/// 3. A NAT64 address (`64:ff9b::1.2.3.4`, RFC 6052) is the IPv4 address too, because all IPv4 clients
///    of one translator share a /64; see [`nat64`](Self::nat64).
/// 4. Other IPv6 addresses are taken as their /64, since one client has all of one; see
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
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerIp {
    ipv6_prefix: Ipv6Prefix,
}

impl PeerIp {
    /// The peer's address, IPv6 as its /64.
    pub const fn new() -> Self {
        Self { ipv6_prefix: Ipv6Prefix::DEFAULT }
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
        Self { ipv6_prefix: self.ipv6_prefix.with_bits(bits) }
    }

    /// As [`ipv6_prefix`](Self::ipv6_prefix).
    ///
    /// # Errors
    ///
    /// When there are more than 128.
    pub fn try_ipv6_prefix(self, bits: u8) -> Result<Self, ConfigError> {
        Ok(Self { ipv6_prefix: self.ipv6_prefix.try_with_bits(bits)? })
    }

    /// Uses the IPv4 address in a NAT64 address as the key. Defaults to `true`.
    ///
    /// This is about the well-known prefix `64:ff9b::/96` only. With `false` such an address is keyed like
    /// any other IPv6 address. The [address](Self::address) itself stays as it is, and so do the networks
    /// of an [`AllowList`](crate::extract::AllowList).
    ///
    /// ```
    /// use tower_ratelimit::PeerIp;
    ///
    /// let keys = |peer: PeerIp| ["64:ff9b::192.0.2.1", "64:ff9b::192.0.2.2", "192.0.2.1"].map(|it| peer.key(it.parse().unwrap()));
    /// let [one, two, same] = keys(PeerIp::new());
    /// assert!(one != two && one == same);
    /// let [one, two, other] = keys(PeerIp::new().nat64(false));
    /// assert!(one == two && one != other);
    /// ```
    #[must_use]
    pub const fn nat64(self, unwrap: bool) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_nat64(unwrap) }
    }

    /// The address itself: all of its bits, an IPv4-mapped one as IPv4.
    ///
    /// # Errors
    ///
    /// When the server attached none: 500.
    pub fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        peer(head).ok_or_else(no_peer)
    }

    /// The key of a client with this address: what to peek at or to clear.
    ///
    /// ```
    /// use tower_ratelimit::PeerIp;
    ///
    /// let [one, same_network] = ["2001:db8::1", "2001:db8::2"].map(|text| PeerIp::new().key(text.parse().unwrap()));
    /// assert_eq!(one, same_network);
    /// ```
    pub fn key(&self, address: IpAddr) -> Key {
        self.ipv6_prefix.key(address.to_canonical())
    }
}

impl KeyExtractor for PeerIp {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        self.address(head).map(|address| Some(self.ipv6_prefix.key(address)))
    }

    fn caveats(&self) -> Vec<Caveat> {
        self.ipv6_prefix.caveat().into_iter().chain([Caveat::OnlyPeer]).collect()
    }
}

/// How many bits of an IPv6 address tell clients apart, and whether it may stand for an IPv4 address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ipv6Prefix {
    bits: u8,
    unwraps_nat64: bool,
}

impl Ipv6Prefix {
    pub(super) const DEFAULT: Self = Self { bits: 64, unwraps_nat64: true };

    #[track_caller]
    pub(super) const fn with_bits(self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 address has 128 bits: use a prefix of at most that, for example 64");
        Self { bits, ..self }
    }

    pub(super) fn try_with_bits(self, bits: u8) -> Result<Self, ConfigError> {
        if bits > 128 {
            return Err(ConfigError::new(format!(
                "an IPv6 address has 128 bits, so its prefix cannot have {bits}: use for example 64"
            )));
        }
        Ok(Self { bits, ..self })
    }

    pub(super) const fn with_nat64(self, unwraps_nat64: bool) -> Self {
        Self { unwraps_nat64, ..self }
    }

    pub(super) fn caveat(self) -> Option<Caveat> {
        (self.bits > 64).then_some(Caveat::Ipv6PerAddress)
    }

    /// The key of a client with this address, which is no IPv4-mapped one.
    #[inline]
    pub(super) fn key(self, address: IpAddr) -> Key {
        match address {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => {
                if let Some(v4) = behind_nat64(v6).filter(|_| self.unwraps_nat64) {
                    return v4.into();
                }
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
                Ipv6Addr::from_bits(v6.to_bits() & mask).into()
            }
        }
    }
}

/// The IPv4 address in one with the well-known prefix of NAT64, `64:ff9b::/96` (RFC 6052, section 2.1).
fn behind_nat64(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [.., a, b, c, d] = address.octets();
    (address.to_bits() >> 32 == 0x0064_ff9b << 64).then_some(Ipv4Addr::new(a, b, c, d))
}

impl Default for Ipv6Prefix {
    fn default() -> Self {
        Self::DEFAULT
    }
}
