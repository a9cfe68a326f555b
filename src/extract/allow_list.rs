use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::networks::network;
use super::{ClientIp, Head, KeyError, KeyExtractor, PeerIp};
use crate::error::{ConfigError, or_panic};
use crate::lint::Lint;

/// Extracts the address of the client from a request, for an [`AllowList`]. Implemented by
/// [`PeerIp`] and [`ClientIp`].
pub trait AddressSource: Send + Sync + 'static {
    /// Returns the address of the client. The [`AllowList`] converts an IPv4-mapped address to
    /// IPv4.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is missing. Then the [`AllowList`] does not exempt the
    /// request from the limit.
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError>;

    /// Returns probable mistakes in the configuration of the source, as [`KeyExtractor::lints`]
    /// does. Defaults to none.
    ///
    /// An [`AllowList`] ignores [`Lint::Ipv6PerAddress`] and [`Lint::ForwardingFieldMissing`].
    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let _ = head;
        Vec::new()
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

impl AddressSource for ClientIp {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        self.address(head)
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        KeyExtractor::lints(self, head)
    }
}

/// A list of networks whose clients are exempt from the limit. An argument of
/// [`RateLimitLayer::allow_list`](crate::RateLimitLayer::allow_list).
///
/// [`allow`](Self::allow) and [`except`](Self::except) add rules. The rules are tried in the order in
/// which they were added. The first rule whose network contains the client's address decides. If no
/// rule matches, or if the address is missing, the client is limited.
///
/// ```
/// use std::net::SocketAddr;
/// use tower_ratelimit::PeerIp;
/// use tower_ratelimit::extract::{AllowList, Head};
///
/// let list = AllowList::new(PeerIp::new()).except("10.1.0.0/16").allow("10.0.0.0/8");
/// let allows = |peer: &str| {
///     let mut request = http::Request::get("/").body(()).unwrap();
///     request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
///     list.allows(&Head::of(&request))
/// };
/// assert!(allows("10.2.0.1:80"));
/// assert!(!allows("10.1.0.1:80"));
/// assert!(!allows("1.2.3.4:80"));
/// ```
///
/// # Caveats
///
/// Behind proxies, use [`ClientIp`] as the source, and do not allow the networks of the proxies. If
/// a request has no forwarded address, [`ClientIp`] returns the address of the proxy.
#[derive(Clone)]
pub struct AllowList {
    source: Arc<dyn AddressSource>,
    rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    network: IpNet,
    allows: bool,
}

impl AllowList {
    /// Creates a list without rules, which exempts no client from the limit. `source` extracts the
    /// client's address.
    pub fn new(source: impl AddressSource) -> Self {
        Self { source: Arc::new(source), rules: Vec::new() }
    }

    pub(crate) fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        // The list compares whole addresses, so an IPv6 prefix does not matter. A missing field is
        // reported by the lints of the key's extractor.
        let mut lints = self.source.lints(head);
        lints.retain(|lint| !matches!(lint, Lint::Ipv6PerAddress | Lint::ForwardingFieldMissing { .. }));
        lints
    }

    /// Exempts the clients in this network from the limit, except for those that an earlier rule
    /// limits.
    ///
    /// The network is written as `10.0.0.0/8`, as `2001:db8::/32`, or as a single address. Spaces
    /// around it are ignored, and so are the address bits after the prefix. An IPv4-mapped network
    /// such as `::ffff:10.0.0.0/104` is converted to IPv4, and needs a prefix of at least 96 bits.
    ///
    /// # Panics
    ///
    /// Panics if the network is invalid. [`try_allow`](Self::try_allow) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn allow(self, network: &str) -> Self {
        or_panic(self.try_allow(network))
    }

    /// Like [`allow`](Self::allow), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the network is invalid.
    pub fn try_allow(self, network: &str) -> Result<Self, ConfigError> {
        self.rule(network, true)
    }

    /// Limits the clients in this network, except for those that an earlier rule exempts. Call it
    /// before [`allow`](Self::allow) to keep the limit for a part of a larger network that is
    /// exempt. It is not needed otherwise, because clients that match no rule are limited anyway.
    ///
    /// The network is written as for [`allow`](Self::allow).
    ///
    /// # Panics
    ///
    /// Panics if the network is invalid. [`try_except`](Self::try_except) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn except(self, network: &str) -> Self {
        or_panic(self.try_except(network))
    }

    /// Like [`except`](Self::except), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the network is invalid.
    pub fn try_except(self, network: &str) -> Result<Self, ConfigError> {
        self.rule(network, false)
    }

    fn rule(mut self, text: &str, allows: bool) -> Result<Self, ConfigError> {
        self.rules.push(Rule { network: network(text)?, allows });
        Ok(self)
    }

    /// Returns `true` if the request is exempt from the limit: the first matching rule is one of
    /// [`allow`](Self::allow).
    pub fn allows(&self, head: &Head<'_>) -> bool {
        let Ok(address) = self.source.address(head) else { return false };
        // A custom source may return IPv4-mapped addresses.
        let address = address.to_canonical();
        self.rules.iter().find(|rule| rule.network.contains(&address)).is_some_and(|rule| rule.allows)
    }
}

impl fmt::Debug for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllowList").field("rules", &self.rules).finish_non_exhaustive()
    }
}
