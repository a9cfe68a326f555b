use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::networks::network;
use super::{Caveat, ClientIp, Head, KeyError, KeyExtractor, PeerIp};
use crate::ConfigError;
use crate::error::or_panic;

/// Takes an address out of a request: [`PeerIp`], [`ClientIp`], or one's own.
pub trait AddressSource: Send + Sync + 'static {
    /// The address that the request is judged by. An IPv4-mapped one is to be IPv4.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError>;

    /// What may be wrong with how it is set up, as [`KeyExtractor::caveats`].
    fn caveats(&self) -> Vec<Caveat> {
        Vec::new()
    }
}

impl AddressSource for PeerIp {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        self.address(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        KeyExtractor::caveats(self)
    }
}

impl AddressSource for ClientIp {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        self.address(head)
    }

    fn caveats(&self) -> Vec<Caveat> {
        KeyExtractor::caveats(self)
    }
}

/// Which clients are not limited, by the networks of their addresses.
///
/// Rules are tried in the order in which they were added, and the first one that has the address decides. When none has it,
/// or there is no address, the client is limited.
///
/// ```
/// use std::net::SocketAddr;
/// use tower_ratelimit::PeerIp;
/// use tower_ratelimit::extract::{AllowList, Head};
///
/// let list = AllowList::by(PeerIp::new()).limit("10.1.0.0/16").allow("10.0.0.0/8");
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
/// Behind proxies, judge by [`ClientIp`], and do not allow the proxies' own networks: a request about which they tell nothing
/// is known by their address.
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
    /// A list without rules, which allows nobody; `source` says by which address a request is judged.
    pub fn by(source: impl AddressSource) -> Self {
        Self { source: Arc::new(source), rules: Vec::new() }
    }

    pub(crate) fn caveats(&self) -> Vec<Caveat> {
        // Here each address is looked at by itself.
        let mut caveats = self.source.caveats();
        caveats.retain(|caveat| *caveat != Caveat::Ipv6PerAddress);
        caveats
    }

    /// Does not limit the clients in this network, unless an earlier rule does: `10.0.0.0/8`, `2001:db8::/32`, or one address.
    ///
    /// Bits after the prefix do not matter. An IPv4-mapped network, `::ffff:10.0.0.0/104`, is the IPv4 network.
    ///
    /// # Panics
    ///
    /// When the network cannot be read; [`try_allow`](Self::try_allow) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn allow(self, network: &str) -> Self {
        or_panic(self.try_allow(network))
    }

    /// As [`allow`](Self::allow).
    ///
    /// # Errors
    ///
    /// When the network cannot be read.
    pub fn try_allow(self, network: &str) -> Result<Self, ConfigError> {
        self.rule(network, true)
    }

    /// Limits the clients in this network, unless an earlier rule allows them: an exception from a larger network that is
    /// allowed after it.
    ///
    /// # Panics
    ///
    /// When the network cannot be read; [`try_limit`](Self::try_limit) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn limit(self, network: &str) -> Self {
        or_panic(self.try_limit(network))
    }

    /// As [`limit`](Self::limit).
    ///
    /// # Errors
    ///
    /// When the network cannot be read.
    pub fn try_limit(self, network: &str) -> Result<Self, ConfigError> {
        self.rule(network, false)
    }

    fn rule(mut self, text: &str, allows: bool) -> Result<Self, ConfigError> {
        self.rules.push(Rule { network: network(text)?, allows });
        Ok(self)
    }

    /// Whether the request is not to be limited.
    pub fn allows(&self, head: &Head<'_>) -> bool {
        let Ok(address) = self.source.address(head) else { return false };
        // A source of somebody else's may not have read the bits.
        let address = address.to_canonical();
        self.rules.iter().find(|rule| rule.network.contains(&address)).is_some_and(|rule| rule.allows)
    }
}

impl fmt::Debug for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllowList").field("rules", &self.rules).finish_non_exhaustive()
    }
}
