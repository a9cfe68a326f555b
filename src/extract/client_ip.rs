use std::net::IpAddr;

use http::HeaderName;
use http::header::FORWARDED;

use super::forwarded::{Entries, FORWARDING, FORWARDING_NAMES, Grammar};
use super::header::field_name;
use super::ip::Ipv6Prefix;
use super::networks::Networks;
use super::peer::{no_peer, peer};
use super::{Caveat, Head, KeyError, KeyExtractor};
use crate::error::or_panic;
use crate::{ConfigError, Key};

/// The client's address behind proxies, as far as they can be trusted to tell it.
///
/// Each proxy writes into a header field, on the right of what is there, the address that it was asked from. What a client
/// sent in that field itself is on the left of that. The field is `X-Forwarded-For`, unless [`header`](Self::header) or
/// [`forwarded`](Self::forwarded) says another.
///
/// 1. The peer is found as [`PeerIp`](crate::PeerIp) finds it. If it is no trusted proxy it is the client, and the field is
///    not read.
/// 2. The list is walked from the right, over all lines of the field, the last line first. A trusted proxy is stepped over,
///    the first address that is none is the client. What is on the left of it changes nothing.
/// 3. An entry that is no address (empty, garbage, `unknown`, a name such as `_hidden`) ends the walk: it is never stepped
///    over, since what is behind it may be the client's own text. The client is then the hop that sent it: the last trusted
///    address, at first the peer.
/// 4. When all are trusted, the client is the leftmost. Without the field it is the peer.
/// 5. Exactly one field is read. What other fields say is not believed, also when this one is missing.
/// 6. An entry is an address as it is, or with a port: `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`, `[2001:db8::1]`,
///    `[2001:db8::1]:80`; each may stand in double quotes. IPv4-mapped IPv6 addresses are IPv4, by their bits.
///
/// The key is what [`PeerIp`](crate::PeerIp) makes of the same address: IPv4 as it is, IPv6 as its /64. Without a peer's
/// address the key is missing, and the answer is 500.
///
/// ```
/// use std::net::{IpAddr, SocketAddr};
/// use tower_ratelimit::ClientIp;
/// use tower_ratelimit::extract::Head;
///
/// let by_client = ClientIp::behind(["10.0.0.0/8", "fd00::/8"])?;
/// let client = |peer: &str, forwarded_for: &str| {
///     let mut request = http::Request::get("/").header("x-forwarded-for", forwarded_for).body(()).unwrap();
///     request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
///     by_client.address(&Head::of(&request)).unwrap().to_string()
/// };
/// assert_eq!(client("10.0.0.1:80", "1.2.3.4"), "1.2.3.4");
/// assert_eq!(client("10.0.0.1:80", "6.6.6.6, 1.2.3.4, 10.0.0.2"), "1.2.3.4", "what the client says is not believed");
/// assert_eq!(client("10.0.0.1:80", "6.6.6.6, unknown, 10.0.0.2"), "10.0.0.2", "nor when a proxy knows no address");
/// assert_eq!(client("5.6.7.8:80", "6.6.6.6"), "5.6.7.8", "nor when there is no proxy");
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Caveats
///
/// Every trusted proxy has to write the field, adding to it or putting its own in its place. One that passes it on as it came
/// lets each client say who it is. So does trusting more than the proxies: a client in a trusted network is taken for one.
///
/// A proxy that puts other text of the client's into `Forwarded`, as in `host="..."`, has to quote it and to escape what is
/// in the quotes. Then it changes nothing, whatever it says.
///
/// Clients whose proxies tell no address share the proxy's key, and with it one quota.
#[derive(Clone, Debug)]
pub struct ClientIp {
    proxies: Proxies,
    field: HeaderName,
    grammar: Grammar,
    ipv6_prefix: Ipv6Prefix,
}

/// Who may say where a request comes from.
#[derive(Clone, Debug)]
enum Proxies {
    In(Networks),
    Hops(u32),
}

impl ClientIp {
    /// Trusts the proxies in these networks: `10.0.0.0/8`, `2001:db8::/32`, or one address.
    ///
    /// Bits after the prefix do not matter. An IPv4-mapped network, `::ffff:10.0.0.0/104`, is the IPv4 network.
    ///
    /// ```
    /// use tower_ratelimit::ClientIp;
    ///
    /// let from_the_environment = "10.0.0.0/8, fd00::/8, 192.0.2.1";
    /// let by_client = ClientIp::behind(from_the_environment.split(','))?;
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When a network cannot be read, or there is none.
    pub fn behind(proxies: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, ConfigError> {
        let networks = Networks::parse(proxies)?;
        if networks.is_empty() {
            return Err(ConfigError::new(
                "no proxy is trusted, so the peer is the client: use PeerIp, or name the proxies' networks, \
                 for example \"10.0.0.0/8\"",
            ));
        }
        Ok(Self::by(Proxies::In(networks)))
    }

    /// Trusts this many proxies in front of the server, at least 1, whatever their addresses are. The peer is the first one.
    ///
    /// The client is the `proxies`-th entry from the right. If there are fewer, it is the leftmost; rule 3 holds as it does for
    /// networks. A peer without an address (a Unix socket) is no problem unless it would be the answer.
    ///
    /// Nobody may be able to reach the server past one of the proxies: who does is believed in its place. Where their addresses
    /// are known, [`behind`](Self::behind) is safer.
    ///
    /// ```
    /// use tower_ratelimit::ClientIp;
    /// use tower_ratelimit::extract::Head;
    ///
    /// let request = http::Request::get("/").header("x-forwarded-for", "6.6.6.6, 1.2.3.4, 10.0.0.2").body(()).unwrap();
    /// let client = ClientIp::behind_hops(2).address(&Head::of(&request)).unwrap();
    /// assert_eq!(client.to_string(), "1.2.3.4");
    /// ```
    ///
    /// # Panics
    ///
    /// When there are 0; [`try_behind_hops`](Self::try_behind_hops) returns an error instead.
    #[track_caller]
    pub fn behind_hops(proxies: u32) -> Self {
        or_panic(Self::try_behind_hops(proxies))
    }

    /// As [`behind_hops`](Self::behind_hops).
    ///
    /// # Errors
    ///
    /// When there are 0.
    pub fn try_behind_hops(proxies: u32) -> Result<Self, ConfigError> {
        if proxies == 0 {
            return Err(ConfigError::new(
                "behind 0 proxies the peer is the client: use PeerIp, or a number that is at least 1",
            ));
        }
        Ok(Self::by(Proxies::Hops(proxies)))
    }

    fn by(proxies: Proxies) -> Self {
        let field = HeaderName::from_static("x-forwarded-for");
        Self { proxies, field, grammar: Grammar::List, ipv6_prefix: Ipv6Prefix::default() }
    }

    /// Reads this field instead of `X-Forwarded-For`, with the same rules: `cf-connecting-ip`, `x-real-ip`.
    ///
    /// # Panics
    ///
    /// When the text cannot be the name of a field, or is `forwarded`, which is written in another way;
    /// [`try_header`](Self::try_header) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn header(self, name: &str) -> Self {
        or_panic(self.try_header(name))
    }

    /// As [`header`](Self::header).
    ///
    /// # Errors
    ///
    /// When the text cannot be the name of a field, or is `forwarded`.
    pub fn try_header(self, name: &str) -> Result<Self, ConfigError> {
        let field = field_name(name, "cf-connecting-ip")?;
        if field == FORWARDED {
            return Err(ConfigError::new(format!(
                "the header field {name:?} cannot be read as a list of addresses: write forwarded() instead of header({name:?})"
            )));
        }
        Ok(Self { field, grammar: Grammar::List, ..self })
    }

    /// Reads `Forwarded` (RFC 7239) instead of `X-Forwarded-For`, with the same rules: an entry is the `for` of an element, in
    /// any case.
    ///
    /// An element without `for`, or with two, is no address. A port may also be hidden: `for="1.2.3.4:_x"`.
    #[must_use]
    pub fn forwarded(self) -> Self {
        Self { field: FORWARDED, grammar: Grammar::Forwarded, ..self }
    }

    /// How many bits of an IPv6 address tell clients apart, as for [`PeerIp`](crate::PeerIp::ipv6_prefix): 64 unless said.
    ///
    /// # Panics
    ///
    /// When there are more than 128; [`try_ipv6_prefix`](Self::try_ipv6_prefix) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn ipv6_prefix(self, bits: u8) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_bits(bits), ..self }
    }

    /// As [`ipv6_prefix`](Self::ipv6_prefix).
    ///
    /// # Errors
    ///
    /// When there are more than 128.
    pub fn try_ipv6_prefix(self, bits: u8) -> Result<Self, ConfigError> {
        Ok(Self { ipv6_prefix: self.ipv6_prefix.try_with_bits(bits)?, ..self })
    }

    /// Uses the IPv4 address in a NAT64 address as the key, as for [`PeerIp`](crate::PeerIp::nat64).
    /// Defaults to `true`.
    ///
    /// Which proxies are trusted is decided by the address as it is.
    #[must_use]
    pub fn nat64(self, unwrap: bool) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_nat64(unwrap), ..self }
    }

    /// The client's address itself: all of its bits, an IPv4-mapped one as IPv4.
    ///
    /// # Errors
    ///
    /// When the server attached no peer's address, and it is needed: 500.
    pub fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        let lines = head.headers.get_all(&self.field).iter().rev();
        let mut entries = lines.flat_map(|line| Entries::of(line.as_bytes(), self.grammar));
        let mut hop = peer(head);
        let mut passed = 0;
        while self.trusts(hop, passed) {
            let Some(Some(address)) = entries.next() else { break };
            hop = Some(address);
            passed += 1;
        }
        hop.ok_or_else(no_peer)
    }

    /// The key of a client with this address: what to peek at or to clear.
    pub fn key(&self, address: IpAddr) -> Key {
        self.ipv6_prefix.key(address.to_canonical())
    }

    /// Whether this hop, before which `passed` others have been, may say where it was asked from.
    fn trusts(&self, hop: Option<IpAddr>, passed: u32) -> bool {
        match &self.proxies {
            Proxies::In(networks) => hop.is_some_and(|address| networks.contains(address)),
            Proxies::Hops(proxies) => passed < *proxies,
        }
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        self.address(head).map(|address| Some(self.ipv6_prefix.key(address)))
    }

    fn caveats(&self) -> Vec<Caveat> {
        // Whether hops are few enough cannot be known.
        let trusts_all = matches!(&self.proxies, Proxies::In(networks) if networks.covers_everything());
        let trust = trusts_all.then_some(Caveat::TrustsEveryAddress);
        self.ipv6_prefix.caveat().into_iter().chain(trust).chain([Caveat::ReadsForwarding]).collect()
    }

    fn caveats_of(&self, head: &Head<'_>) -> Vec<Caveat> {
        if !self.trusts(peer(head), 0) || head.headers.contains_key(&self.field) {
            return Vec::new();
        }
        let found = FORWARDING.into_iter().position(|name| head.headers.contains_key(name));
        vec![Caveat::ForwardingFieldMissing { found: found.map(|at| FORWARDING_NAMES[at]) }]
    }
}
