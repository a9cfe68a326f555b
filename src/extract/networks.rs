use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::ConfigError;

/// A set of addresses, as networks of which no two overlap, in order.
#[derive(Clone, Debug)]
pub(crate) struct Networks {
    v4: Vec<Ipv4Net>,
    v6: Vec<Ipv6Net>,
}

impl Networks {
    /// All addresses of these networks, each as [`network`] reads it.
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

    /// Whether this address, which is no IPv4-mapped one, is in one of them.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        // Only the last network that begins at or before an address can contain it: a walk may meet hundreds of addresses.
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

    /// Whether every IPv4 address is in them, or every IPv6 address, also when it takes several networks.
    pub(crate) fn covers_everything(&self) -> bool {
        self.v4.first().is_some_and(|net| net.prefix_len() == 0)
            || self.v6.first().is_some_and(|net| net.prefix_len() == 0)
    }
}

/// The network of a text like `10.0.0.0/8`, `2001:db8::/32` or `10.1.2.3`, which is a network of one address. Bits after the
/// prefix do not matter; an IPv4-mapped network is the IPv4 network.
pub(super) fn network(text: &str) -> Result<IpNet, ConfigError> {
    let error = |hint: String| ConfigError::new(format!("cannot read the network {text:?}: {hint}"));
    let (address, bits) = match text.trim().split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (text.trim(), None),
    };
    let address: IpAddr = address.parse().map_err(|_| {
        error("write an address, or an address and a prefix, for example \"10.0.0.0/8\" or \"fd00::/8\"".to_owned())
    })?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        None => most,
        Some(digits) => prefix(digits).filter(|bits| *bits <= most).ok_or_else(|| {
            error(format!("after \"/\" write how many bits it fixes, at most {most}, for example \"{address}/{most}\""))
        })?,
    };
    let (address, bits) = match (address, address.to_canonical()) {
        (IpAddr::V6(_), IpAddr::V4(v4)) => match bits.checked_sub(96) {
            Some(bits) => (v4.into(), bits),
            // Most likely the bits of the IPv4 network, which would be all of ::/8.
            None => return Err(error(format!("write an IPv4 network as one, for example \"{v4}/{}\"", bits.min(32)))),
        },
        _ => (address, bits),
    };
    IpNet::new(address, bits).map_err(|error| ConfigError::new(format!("cannot read the network {text:?}: {error}")))
}

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
    fn everything_is_covered_by_one_network_or_by_several() {
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
    fn networks_that_overlap_or_touch_contain_what_each_of_them_does() {
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
