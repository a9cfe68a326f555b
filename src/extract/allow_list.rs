//! The clients that are exempt from a limit, and the networks that describe them.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Head, KeyError};
use crate::error::{ConfigError, or_panic};
use crate::lint::Lint;

/// Extracts the address of the client from a request, for an [`AllowList`]. Implemented by
/// [`PeerIp`](crate::PeerIp) and [`ClientIp`](crate::ClientIp).
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not return the address of the client",
    label = "expected `PeerIp::new()`, or `ClientIp::behind([..])?` behind proxies"
)]
pub trait AddressSource: Send + Sync + 'static {
    /// Returns the address of the client. The [`AllowList`] converts an IPv4-mapped address to
    /// IPv4.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is missing. Then the [`AllowList`] does not exempt the
    /// request from the limit.
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError>;

    /// Returns probable mistakes in the configuration of the source, as
    /// [`KeyExtractor::lints`](crate::KeyExtractor::lints) does. Defaults to none.
    ///
    /// An [`AllowList`] ignores [`Lint::Ipv6PerAddress`] and [`Lint::ForwardingFieldMissing`].
    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        let _ = head;
        Vec::new()
    }
}

/// A list of networks whose clients are exempt from the limit. An argument of
/// [`RateLimitLayer::allow_list`](crate::RateLimitLayer::allow_list).
///
/// [`allow`](Self::allow) and [`except`](Self::except) add rules. The rules are tried in the order
/// in which they were added. The first rule whose network contains the client's address decides. If
/// no rule matches, or if the address is missing, the client is limited.
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
///     list.allows(&Head::from_request(&request))
/// };
/// assert!(allows("10.2.0.1:80"));
/// assert!(!allows("10.1.0.1:80"));
/// assert!(!allows("1.2.3.4:80"));
/// ```
///
/// # Caveats
///
/// Behind proxies, use [`ClientIp`](crate::ClientIp) as the source, and do not allow the networks
/// of the proxies. If a request has no forwarded address, `ClientIp` returns the address of the
/// proxy.
#[doc(alias("exempt", "whitelist"))]
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

/// A set of addresses, as sorted networks that do not overlap.
#[derive(Clone, Debug)]
pub(super) struct Networks {
    v4: Vec<Ipv4Net>,
    v6: Vec<Ipv6Net>,
}

impl Networks {
    /// Parses networks, each as [`network`] does.
    pub(super) fn parse(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, ConfigError> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for text in texts {
            match network(text.as_ref())? {
                IpNet::V4(net) => v4.push(net),
                IpNet::V6(net) => v6.push(net),
            }
        }
        Ok(Self { v4: Ipv4Net::aggregate(&v4), v6: Ipv6Net::aggregate(&v6) })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Returns `true` if one of the networks contains the address, which must not be IPv4-mapped.
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        // This is a binary search, because a forwarding field can have hundreds of addresses. Only
        // the last network that starts at or before the address can contain it.
        match address {
            IpAddr::V4(v4) => {
                let after = self.v4.partition_point(|net| net.network() <= v4);
                after.checked_sub(1).is_some_and(|last| self.v4[last].contains(&v4))
            }
            IpAddr::V6(v6) => {
                let after = self.v6.partition_point(|net| net.network() <= v6);
                after.checked_sub(1).is_some_and(|last| self.v6[last].contains(&v6))
            }
        }
    }

    /// Returns `true` if the networks together contain all IPv4 addresses or all IPv6 addresses.
    pub(super) fn covers_everything(&self) -> bool {
        self.v4.first().is_some_and(|net| net.prefix_len() == 0)
            || self.v6.first().is_some_and(|net| net.prefix_len() == 0)
    }
}

/// Parses a network such as `10.0.0.0/8` or `2001:db8::/32`, or a single address such as
/// `10.1.2.3`. Ignores white space around it, and the address bits after the prefix. Converts an
/// IPv4-mapped network to IPv4.
fn network(text: &str) -> Result<IpNet, ConfigError> {
    let error = |hint: String| ConfigError::new(format!("invalid network {text:?}: {hint}"));
    let (address, bits) = match text.trim().split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (text.trim(), None),
    };
    let address: IpAddr = address.parse().map_err(|_| {
        error("use an address, or an address and a prefix, for example \"10.0.0.0/8\" or \"fd00::/8\"".to_owned())
    })?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        None => most,
        Some(digits) => prefix(digits).filter(|bits| *bits <= most).ok_or_else(|| {
            error(format!("the number of bits after \"/\" must be at most {most}, for example \"{address}/{most}\""))
        })?,
    };
    let (address, bits) = match (address, address.to_canonical()) {
        (IpAddr::V6(_), IpAddr::V4(v4)) => match bits.checked_sub(96) {
            Some(bits) => (v4.into(), bits),
            // The bits are probably meant as an IPv4 prefix. As an IPv6 prefix, they would make the
            // network far too large.
            None => return Err(error(format!("use the IPv4 form, for example \"{v4}/{}\"", bits.min(32)))),
        },
        _ => (address, bits),
    };
    IpNet::new(address, bits).map_err(|error| ConfigError::new(format!("invalid network {text:?}: {error}")))
}

/// Parses the number of bits after the slash. Rejects a sign, which `u8::from_str` accepts.
fn prefix(digits: &str) -> Option<u8> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::Networks;

    fn networks(texts: &[&str]) -> Networks {
        Networks::parse(texts).unwrap()
    }

    #[test]
    fn one_or_several_networks_can_cover_all_addresses() {
        for all in [
            &["0.0.0.0/0"][..],
            &["10.0.0.0/8", "1.2.3.4/0"],
            &["::/0"],
            &["0.0.0.0/1", "128.0.0.0/1"],
            &["128.0.0.0/1", "0.0.0.0/2", "64.0.0.0/2", "10.0.0.0/8"],
            &["::ffff:0:0/96"],
            &["::ffff:128.0.0.0/97", "0.0.0.0/1"],
            &["10.0.0.0/8", "::/1", "8000::/1"],
        ] {
            assert!(networks(all).covers_everything(), "{all:?}");
        }
        for some in [
            &["10.0.0.0/8"][..],
            &["0.0.0.0/1"],
            &["0.0.0.0/1", "::/1"],
            &["0.0.0.0/1", "128.0.0.0/2", "192.0.0.0/3", "224.0.0.0/4", "240.0.0.0/5"],
            &["::/1", "8000::/2"],
            &["0.0.0.0", "::"],
        ] {
            assert!(!networks(some).covers_everything(), "{some:?}");
        }
    }

    #[test]
    fn overlapping_and_adjacent_networks_contain_the_union_of_their_addresses() {
        let texts = ["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8", "192.168.7.9/24", "fd00::/8", "2001:db8::/32", "::1"];
        let several = networks(&texts);
        let inside =
            ["10.0.0.0", "10.1.2.3", "11.255.255.255", "192.168.7.0", "192.168.7.255", "fdff::1", "::1", "2001:db8::"];
        for address in inside {
            assert!(several.contains(address.parse().unwrap()), "{address}");
        }
        for address in ["9.255.255.255", "12.0.0.0", "192.168.6.255", "192.168.8.0", "::", "::2", "fe00::", "0.0.0.1"] {
            assert!(!several.contains(address.parse().unwrap()), "{address}");
        }
    }
}
