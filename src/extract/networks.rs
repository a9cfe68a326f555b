use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::error::ConfigError;

/// A set of addresses, as sorted networks that do not overlap.
#[derive(Clone, Debug)]
pub(crate) struct Networks {
    v4: Vec<Ipv4Net>,
    v6: Vec<Ipv6Net>,
}

impl Networks {
    /// Parses networks, each as [`network`] does.
    pub(crate) fn parse(texts: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, ConfigError> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for text in texts {
            match network(text.as_ref())? {
                IpNet::V4(net) => v4.push(net),
                IpNet::V6(net) => v6.push(net),
            }
        }
        Ok(Self { v4: Ipv4Net::aggregate(&v4), v6: Ipv6Net::aggregate(&v6) })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Returns `true` if one of the networks contains the address, which must not be IPv4-mapped.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
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
    pub(crate) fn covers_everything(&self) -> bool {
        self.v4.first().is_some_and(|net| net.prefix_len() == 0)
            || self.v6.first().is_some_and(|net| net.prefix_len() == 0)
    }
}

/// Parses a network such as `10.0.0.0/8` or `2001:db8::/32`, or a single address such as
/// `10.1.2.3`. Ignores white space around it, and the address bits after the prefix. Converts an
/// IPv4-mapped network to IPv4.
pub(super) fn network(text: &str) -> Result<IpNet, ConfigError> {
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
