//! The address of the peer, and its conversion to a key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::allow_list::AddressSource;
use super::forwarded::FORWARDING;
use super::{Head, KeyError, KeyExtractor};
use crate::key::Key;
use crate::lint::Lint;

/// Uses the address of the peer, which is the other end of the connection, as the key.
///
/// Behind a proxy, this is the address of the proxy. Use [`ClientIp`](crate::ClientIp) there.
///
/// The server attaches the address to the extensions of the request. The first of these that is
/// present provides it:
///
/// 1. axum's `ConnectInfo<SocketAddr>` (feature `axum`)
/// 2. axum's `MockConnectInfo<SocketAddr>` (feature `axum`)
/// 3. tonic's `TcpConnectInfo` (feature `tonic`)
/// 4. a plain [`SocketAddr`](std::net::SocketAddr)
/// 5. tonic's `TlsConnectInfo<TcpConnectInfo>` (feature `tonic`)
///
/// If none is present, the key is missing. The cause is the setup of the server, so the response is
/// 500.
///
/// | address | key |
/// |---|---|
/// | IPv4 | the address |
/// | IPv4-mapped IPv6 (`::ffff:1.2.3.4`) | the IPv4 address |
/// | NAT64 (`64:ff9b::1.2.3.4`, RFC 6052) | the IPv4 address, because all IPv4 clients of a translator share a /64. See [`nat64`](Self::nat64) |
/// | any other IPv6 address | its /64, because one client usually has a whole /64. See [`ipv6_prefix`](Self::ipv6_prefix) |
///
/// ```
/// use std::net::SocketAddr;
/// use tower_ratelimit::extract::{Head, KeyExtractor};
/// use tower_ratelimit::PeerIp;
///
/// let key = |address: &str| {
///     let mut request = http::Request::get("/").body(()).unwrap();
///     request.extensions_mut().insert(address.parse::<SocketAddr>().unwrap());
///     PeerIp::new().extract(&Head::from_request(&request))
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
    /// Creates an extractor that truncates IPv6 addresses to their /64, and converts NAT64
    /// addresses to IPv4.
    pub const fn new() -> Self {
        Self { ipv6_prefix: Ipv6Prefix::DEFAULT }
    }

    /// Sets the number of bits of an IPv6 address that identify a client. Defaults to 64.
    ///
    /// Use 56 or 48 to treat a whole site as one client, and 128 for individual addresses. With 0,
    /// all IPv6 addresses have the same key. The prefix does not apply to IPv4-mapped addresses,
    /// nor to NAT64 addresses that are [converted to IPv4](Self::nat64).
    ///
    /// # Panics
    ///
    /// Panics if `bits` is more than 128.
    #[must_use]
    #[track_caller]
    pub const fn ipv6_prefix(self, bits: u8) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_bits(bits) }
    }

    /// Sets whether the key of a NAT64 address is the IPv4 address in it. Defaults to `true`.
    ///
    /// Only the well-known prefix `64:ff9b::/96` is recognized. With `false`, the key of such an
    /// address is its [prefix](Self::ipv6_prefix), as for any other IPv6 address.
    ///
    /// This option has no effect on [`address`](Self::address), and therefore none on an
    /// [`AllowList`](crate::extract::AllowList).
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

    /// Returns the full address of the peer. Converts an IPv4-mapped address to IPv4, but not a
    /// NAT64 address.
    ///
    /// # Errors
    ///
    /// Returns an error with status 500 if the server did not attach an address.
    pub fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        peer(head).ok_or_else(no_peer)
    }

    /// Returns the key of a client with this address. Use it to [peek](crate::RateLimiter::peek) at the
    /// limits of a client, or to [clear](crate::RateLimiter::clear) its key.
    ///
    /// The key depends on [`ipv6_prefix`](Self::ipv6_prefix) and [`nat64`](Self::nat64). So use an
    /// extractor with the same settings as that of the layer.
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
        match peer(head) {
            Some(address) => Ok(Some(self.ipv6_prefix.key(address))),
            None => Err(no_peer()),
        }
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let is_forwarded = |head: &Head<'_>| FORWARDING.iter().any(|name| head.headers.contains_key(name));
        match head {
            None => self.ipv6_prefix.lint().into_iter().collect(),
            Some(head) => is_forwarded(head).then_some(Lint::ForwardedPeer).into_iter().collect(),
        }
    }
}

impl AddressSource for PeerIp {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        self.address(head)
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        KeyExtractor::lints(self, head)
    }
}

/// The conversion of IPv6 addresses to keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ipv6Prefix {
    bits: u8,
    unwraps_nat64: bool,
}

impl Ipv6Prefix {
    pub(super) const DEFAULT: Self = Self { bits: 64, unwraps_nat64: true };

    #[track_caller]
    pub(super) const fn with_bits(self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 address has 128 bits: use a prefix of at most 128, for example 64");
        Self { bits, ..self }
    }

    pub(super) const fn with_nat64(self, unwraps_nat64: bool) -> Self {
        Self { unwraps_nat64, ..self }
    }

    pub(super) fn lint(self) -> Option<Lint> {
        (self.bits > 64).then_some(Lint::Ipv6PerAddress)
    }

    /// Returns the key for this address, which must not be IPv4-mapped.
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

/// Returns the IPv4 address in an address with the well-known NAT64 prefix `64:ff9b::/96` (RFC
/// 6052, section 2.1).
fn behind_nat64(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [.., a, b, c, d] = address.octets();
    (address.to_bits() >> 32 == 0x0064_ff9b << 64).then_some(Ipv4Addr::new(a, b, c, d))
}

impl Default for Ipv6Prefix {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Returns the address of the peer. Converts an IPv4-mapped address to IPv4.
#[inline]
pub(super) fn peer(head: &Head<'_>) -> Option<IpAddr> {
    attached(head).map(|address| address.ip().to_canonical())
}

#[inline]
fn attached(head: &Head<'_>) -> Option<SocketAddr> {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::ConnectInfo(address)) = head.extensions.get() {
        return Some(*address);
    }
    #[cfg(feature = "axum")]
    if let Some(axum::extract::connect_info::MockConnectInfo(address)) = head.extensions.get() {
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

/// Returns the address from tonic's `TlsConnectInfo`. That type exists only if tonic is built with
/// TLS, so the address is read through a `tonic::Request`, which needs a clone of the extensions.
/// tonic's own acceptor also attaches `TcpConnectInfo`, so only custom acceptors take this path.
#[cfg(feature = "tonic")]
#[cold]
fn through_tls(head: &Head<'_>) -> Option<SocketAddr> {
    tonic::Request::from_parts(tonic::metadata::MetadataMap::new(), head.extensions.clone(), ()).remote_addr()
}

/// Returns the error for a missing peer address. Its text lists the ways to attach one.
#[cold]
pub(super) fn no_peer() -> KeyError {
    let axum = if cfg!(feature = "axum") {
        "with axum, serve with into_make_service_with_connect_info::<SocketAddr>()"
    } else {
        "with axum, enable the feature \"axum\" of tower-ratelimit and serve with \
         into_make_service_with_connect_info::<SocketAddr>()"
    };
    let tonic = if cfg!(feature = "tonic") {
        "with tonic, serve over TCP"
    } else {
        "with tonic, enable the feature \"tonic\" of tower-ratelimit and serve over TCP"
    };
    KeyError::server(format!(
        "the peer's address is missing: {axum}; {tonic}; with another server, insert a SocketAddr into each \
         request's extensions; on a Unix socket no peer has an address, so limit by ClientIp::behind_hops(1) or \
         by another key"
    ))
}
