//! Allow lists: clients that are not limited, by address.

use std::net::{IpAddr, SocketAddr};

use common::{get, with};
use http::Request;
use tower_ratelimit::extract::{AddressSource, AllowList, Head, KeyError};
use tower_ratelimit::{ClientIp, PeerIp};

fn from(peer: &str, mut request: Request<()>) -> Request<()> {
    request.extensions_mut().insert(SocketAddr::new(peer.parse().unwrap(), 443));
    request
}

fn allows(list: &AllowList, request: &Request<()>) -> bool {
    list.allows(&Head::from_request(request))
}

fn check(list: &AllowList, cases: &[(&str, bool)]) {
    for (peer, expected) in cases {
        assert_eq!(allows(list, &from(peer, get("/"))), *expected, "{peer}: {list:?}");
    }
}

#[test]
fn first_matching_rule_decides() {
    let by = || AllowList::new(PeerIp::new());
    check(
        &by().except("10.1.0.0/16").allow("10.0.0.0/8").except("10.2.0.0/16").allow("2001:db8::/32"),
        &[
            ("10.1.0.1", false),
            ("10.0.0.1", true),
            ("10.2.0.1", true),
            ("::ffff:10.2.0.1", true),
            ("::ffff:10.1.0.1", false),
            ("2001:db8:9::1", true),
            ("2001:db9::1", false),
            ("1.2.3.4", false),
        ],
    );
    check(&by().allow("10.0.0.0/8").except("10.1.0.0/16"), &[("10.1.0.1", true)]);
    check(
        &by().allow("192.0.2.7").allow("::1"),
        &[("192.0.2.7", true), ("192.0.2.8", false), ("::1", true), ("::2", false)],
    );
    check(
        &by().allow("::ffff:10.0.0.0/104").allow("10.20.30.40/0"),
        &[("10.0.0.1", true), ("9.9.9.9", true), ("::", false)],
    );
    check(&by(), &[("127.0.0.1", false), ("::1", false)]);
    check(&by().except("0.0.0.0/0"), &[("127.0.0.1", false)]);
}

#[test]
fn requests_without_an_address_are_never_allowed() {
    let all = AllowList::new(PeerIp::new()).allow("0.0.0.0/0").allow("::/0");
    assert!(!allows(&all, &get("/")));
    assert!(allows(&all, &from("1.2.3.4", get("/"))));
}

/// Guards against this defect: the leftmost `X-Forwarded-For` entry is trusted.
#[test]
fn client_behind_proxies_is_checked_by_its_resolved_address() {
    let list = AllowList::new(ClientIp::behind(["10.0.0.0/8"]).unwrap()).allow("192.0.2.0/24");
    for (peer, forwarded_for, expected) in [
        ("10.0.0.1", "192.0.2.1", true),
        ("10.0.0.1", "192.0.2.1, 1.2.3.4", false),
        ("10.0.0.1", "1.2.3.4, 192.0.2.1, 10.0.0.2", true),
        ("10.0.0.1", "192.0.2.1, unknown", false),
        ("1.2.3.4", "192.0.2.1", false),
        ("192.0.2.1", "1.2.3.4", true),
    ] {
        let request = from(peer, with("x-forwarded-for", forwarded_for));
        assert_eq!(allows(&list, &request), expected, "{peer} {forwarded_for}");
    }
}

/// Reads the address from an extension of the request.
struct Attached;

impl AddressSource for Attached {
    fn address(&self, head: &Head<'_>) -> Result<IpAddr, KeyError> {
        head.extensions.get().copied().ok_or_else(|| KeyError::server("no address is attached"))
    }
}

#[test]
fn allow_list_accepts_a_custom_address_source() {
    let list = AllowList::new(Attached).allow("10.0.0.0/8");
    let mut request = from("1.2.3.4", get("/"));
    assert!(!allows(&list, &request));
    request.extensions_mut().insert("::ffff:10.0.0.1".parse::<IpAddr>().unwrap());
    assert!(allows(&list, &request), "an IPv4-mapped address from a custom source matches");
}

#[test]
fn error_quotes_the_invalid_network_and_suggests_a_valid_one() {
    let list = AllowList::new(PeerIp::new());
    for error in
        [list.clone().try_allow("10.0.0.0/40").unwrap_err(), list.clone().try_except("10.0.0.0/40").unwrap_err()]
    {
        let message = error.to_string();
        assert!(message.contains("\"10.0.0.0/40\"") && message.contains("\"10.0.0.0/32\""), "{message}");
    }
    assert!(list.try_allow("everybody").unwrap_err().to_string().contains("\"everybody\""));
}

#[test]
#[should_panic = "invalid network \"10\""]
fn invalid_network_panics() {
    let _ = AllowList::new(PeerIp::new()).allow("10");
}
