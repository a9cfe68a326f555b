use std::net::IpAddr;

use http::HeaderName;
use http::header::FORWARDED;

use super::allow_list::{AddressSource, Networks};
use super::forwarded::{FORWARDING, FORWARDING_NAMES, ForwardedEntries, Grammar};
use super::parts::field_name;
use super::peer_ip::{Ipv6Prefix, no_peer, peer};
use super::{Head, KeyError, KeyExtractor};
use crate::error::{ConfigError, or_panic};
use crate::key::Key;
use crate::lint::Lint;

/// Uses the address of the client behind trusted proxies as the key.
///
/// [`behind`](Self::behind) trusts the proxies in given networks.
/// [`behind_hops`](Self::behind_hops) trusts a number of proxies, whatever their addresses are.
///
/// Each proxy appends the address of its peer to a header field. Entries that the client itself
/// sent in this field are further left. The field defaults to `X-Forwarded-For`.
/// [`header`](Self::header) and [`forwarded`](Self::forwarded) select another field.
///
/// The client is found by these rules:
///
/// 1. The peer is the address that [`PeerIp`](crate::PeerIp) finds. If it is not a trusted proxy,
///    it is the client, and the field is not read.
/// 2. The entries are read from the right, over all lines of the field, starting with the last
///    line. Trusted proxies are skipped. The first address that is not trusted is the client.
///    Entries further left are ignored.
/// 3. An entry that is not an address (empty, garbage, `unknown`, a name such as `_hidden`) ends
///    the search, because entries further left may come from the client. The client is then the
///    proxy that sent this entry: the last trusted address, or the peer.
/// 4. If all entries are trusted, the client is the leftmost one. Without the field, the client is
///    the peer.
///
/// Other forwarding fields are ignored, even if the selected one is missing.
///
/// An entry is an address, optionally with a port: `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`,
/// `[2001:db8::1]`, `[2001:db8::1]:80`. It may be in double quotes. IPv4-mapped IPv6 addresses are
/// converted to IPv4.
///
/// The key is the same as that of [`PeerIp`](crate::PeerIp) for this address. If the server did not
/// attach the address of the peer, the key is missing and the response is 500, unless
/// [`behind_hops`](Self::behind_hops) finds the client in the field.
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
///     by_client.address(&Head::from_request(&request)).unwrap().to_string()
/// };
/// assert_eq!(client("10.0.0.1:80", "1.2.3.4"), "1.2.3.4");
/// assert_eq!(client("10.0.0.1:80", "6.6.6.6, 1.2.3.4, 10.0.0.2"), "1.2.3.4", "text of the client is ignored");
/// assert_eq!(client("10.0.0.1:80", "6.6.6.6, unknown, 10.0.0.2"), "10.0.0.2", "also if a proxy sends no address");
/// assert_eq!(client("5.6.7.8:80", "6.6.6.6"), "5.6.7.8", "also without a proxy");
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// For nginx, Apache, Caddy, Traefik, Cloudflare, AWS, Google, Azure, Fly, Heroku and others,
/// [Proxies by name](crate::guide::proxies_by_name) has the field, the networks and the code.
///
/// # Caveats
///
/// - Every trusted proxy has to append an entry to the field, or replace the field. If a proxy
///   forwards the field unchanged, clients can choose their own keys.
/// - A client in a trusted network counts as a proxy, and can choose its own key.
/// - A proxy that copies text of the client into `Forwarded`, as in `host="..."`, has to quote and
///   escape this text. Otherwise the client can choose its own key.
/// - If a proxy sends no addresses, all of its clients share the key of the proxy, and so one
///   quota.
#[doc(alias("nginx", "Cloudflare", "load balancer", "X-Forwarded-For", "X-Real-IP"))]
#[derive(Clone, Debug)]
pub struct ClientIp {
    proxies: Proxies,
    field: HeaderName,
    grammar: Grammar,
    ipv6_prefix: Ipv6Prefix,
}

/// The trusted proxies.
#[derive(Clone, Debug)]
enum Proxies {
    In(Networks),
    /// The number of the proxies, at least 1.
    Hops(u32),
}

impl ClientIp {
    /// Creates an extractor that trusts the proxies in these networks.
    ///
    /// A network is written as `10.0.0.0/8`, as `2001:db8::/32`, or as a single address. Spaces
    /// around it are ignored, and so are the address bits after the prefix. An IPv4-mapped network
    /// such as `::ffff:10.0.0.0/104` is converted to IPv4, and needs a prefix of at least 96 bits.
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
    /// Returns an error if a network is invalid, or if `proxies` is empty.
    pub fn behind(proxies: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, ConfigError> {
        let networks = Networks::parse(proxies)?;
        if networks.is_empty() {
            return Err(ConfigError::new(
                "no proxy is trusted, so the peer is the client: use PeerIp, or list the networks of the proxies, \
                 for example \"10.0.0.0/8\"",
            ));
        }
        Ok(Self::by(Proxies::In(networks)))
    }

    /// Creates an extractor that trusts a number of proxies in front of the server, whatever their
    /// addresses are. The peer is the first of these proxies.
    ///
    /// - The client is the entry at position `proxies` from the right. `1` selects the rightmost
    ///   entry.
    /// - If there are fewer entries, the client is the leftmost one. Without entries, the client is
    ///   the peer.
    /// - An entry that is not an address ends the search, as in rule 3 of [`ClientIp`].
    ///
    /// The address of the peer is needed only if the peer is the client. So this extractor also
    /// works on a Unix socket.
    ///
    /// Clients must not be able to bypass any of the proxies, because a client that does can choose
    /// its own key. If the addresses of the proxies are known, [`behind`](Self::behind) is safer.
    ///
    /// ```
    /// use tower_ratelimit::ClientIp;
    /// use tower_ratelimit::extract::Head;
    ///
    /// let request = http::Request::get("/").header("x-forwarded-for", "6.6.6.6, 1.2.3.4, 10.0.0.2").body(()).unwrap();
    /// let client = ClientIp::behind_hops(2).address(&Head::from_request(&request)).unwrap();
    /// assert_eq!(client.to_string(), "1.2.3.4");
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `proxies` is 0.
    #[track_caller]
    pub fn behind_hops(proxies: u32) -> Self {
        assert!(proxies > 0, "behind 0 proxies the peer is the client: use PeerIp, or a number of at least 1");
        Self::by(Proxies::Hops(proxies))
    }

    fn by(proxies: Proxies) -> Self {
        let field = HeaderName::from_static("x-forwarded-for");
        Self { proxies, field, grammar: Grammar::List, ipv6_prefix: Ipv6Prefix::default() }
    }

    /// Sets the header field that contains the addresses, for example `cf-connecting-ip` or
    /// `x-real-ip`. The rules are the same. Defaults to `x-forwarded-for`.
    ///
    /// Replaces an earlier call of [`forwarded`](Self::forwarded).
    ///
    /// # Panics
    ///
    /// Panics if `name` is not a valid field name, or if it is `forwarded`. That field has another
    /// syntax, and [`forwarded`](Self::forwarded) selects it. [`try_header`](Self::try_header)
    /// returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn header(self, name: &str) -> Self {
        or_panic(self.try_header(name))
    }

    /// Like [`header`](Self::header), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if `name` is not a valid field name, or if it is `forwarded`.
    pub fn try_header(self, name: &str) -> Result<Self, ConfigError> {
        let field = field_name(name, "cf-connecting-ip")?;
        if field == FORWARDED {
            return Err(ConfigError::new(format!(
                "the header field {name:?} is not a list of addresses: use forwarded() instead of header({name:?})"
            )));
        }
        Ok(Self { field, grammar: Grammar::List, ..self })
    }

    /// Reads the addresses from the header field `Forwarded` (RFC 7239), by the same rules.
    ///
    /// Each element of the field is one entry, and its parameter `for` is the address. The name of
    /// the parameter may be in upper or lower case. The port may be obfuscated, as in
    /// `for="1.2.3.4:_x"`. An element is not an address if it has no `for`, more than one `for`, or
    /// an invalid parameter.
    ///
    /// Replaces an earlier call of [`header`](Self::header).
    #[must_use]
    pub fn forwarded(self) -> Self {
        Self { field: FORWARDED, grammar: Grammar::Forwarded, ..self }
    }

    /// Sets the number of bits of an IPv6 address that identify a client, as
    /// [`PeerIp::ipv6_prefix`](crate::PeerIp::ipv6_prefix) does. Defaults to 64.
    ///
    /// # Panics
    ///
    /// Panics if `bits` is more than 128.
    #[must_use]
    #[track_caller]
    pub fn ipv6_prefix(self, bits: u8) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_bits(bits), ..self }
    }

    /// Sets whether the key of a NAT64 address is the IPv4 address in it, as
    /// [`PeerIp::nat64`](crate::PeerIp::nat64) does. Defaults to `true`.
    ///
    /// This option has no effect on [`address`](Self::address), nor on the networks of the trusted
    /// proxies, which are compared with the unconverted address.
    #[must_use]
    pub fn nat64(self, unwrap: bool) -> Self {
        Self { ipv6_prefix: self.ipv6_prefix.with_nat64(unwrap), ..self }
    }

    /// Returns the full address of the client. Converts an IPv4-mapped address to IPv4, but not a
    /// NAT64 address.
    ///
    /// # Errors
    ///
    /// Returns an error with status 500 if the server did not attach the address of the peer,
    /// unless [`behind_hops`](Self::behind_hops) finds the client in the field.
    pub fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        let lines = head.headers.get_all(&self.field).iter().rev();
        let mut entries = lines.flat_map(|line| ForwardedEntries::of(line.as_bytes(), self.grammar));
        let mut hop = peer(head);
        let mut passed = 0;
        while self.trusts(hop, passed) {
            let Some(Some(address)) = entries.next() else { break };
            hop = Some(address);
            passed += 1;
        }
        hop.ok_or_else(no_peer)
    }

    /// Returns the key of a client with this address. Use it to [peek](crate::RateLimiter::peek) at the
    /// limits of a client, or to [clear](crate::RateLimiter::clear) its key.
    ///
    /// The key depends on [`ipv6_prefix`](Self::ipv6_prefix) and [`nat64`](Self::nat64). So use an
    /// extractor with the same settings as that of the layer.
    pub fn key(&self, address: IpAddr) -> Key {
        self.ipv6_prefix.key(address.to_canonical())
    }

    /// Returns `true` if this hop, the peer or an entry of the field, is a trusted proxy. `passed`
    /// is the number of trusted hops before it.
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

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let Some(head) = head else {
            // A number of hops that is too large cannot be detected.
            let trusts_all = matches!(&self.proxies, Proxies::In(networks) if networks.covers_everything());
            return self.ipv6_prefix.lint().into_iter().chain(trusts_all.then_some(Lint::TrustsEveryAddress)).collect();
        };
        if !self.trusts(peer(head), 0) || head.headers.contains_key(&self.field) {
            return Vec::new();
        }
        let found = FORWARDING.into_iter().position(|name| head.headers.contains_key(name));
        vec![Lint::ForwardingFieldMissing { found: found.map(|at| FORWARDING_NAMES[at]) }]
    }

    fn reads_forwarding(&self) -> bool {
        true
    }
}

impl AddressSource for ClientIp {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        self.address(head)
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        KeyExtractor::lints(self, head)
    }
}
