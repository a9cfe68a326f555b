//! The cases of the Go package `realclientip-go` (its `realclientip_test.go`), for the rules that
//! [`ClientIp`] has too: trusted networks, a number of proxies, and a field with one address. Its rules
//! that take the leftmost entry have no counterpart here, because a client can write that entry.

use std::net::{IpAddr, SocketAddr};

use common::get;
use http::{HeaderName, HeaderValue, Request};
use tower_ratelimit::ClientIp;
use tower_ratelimit::extract::Head;

/// The peer, which is trusted in all cases but those of [`PEERS`].
const PROXY: &str = "10.0.0.1:443";

const XFF: &str = "x-forwarded-for";

/// The networks that the package calls private or local.
const PRIVATE: &[&str] = &[
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "127.0.0.0/8",
    "0.0.0.0/8",
    "169.254.0.0/16",
    "198.18.0.0/15",
    "100.64.0.0/10",
    "::/128",
    "::1/128",
    "2001:db8::/32",
    "fc00::/7",
    "fe80::/10",
];

/// A rule of the package.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Trusted(&'static [&'static str]),
    Count(u32),
    /// One address in a field, written by the peer.
    Single,
}

use Rule::{Count, Single, Trusted};

/// A rule, a field, its lines, and the client.
type Case = (Rule, &'static str, &'static [&'static str], &'static str);

/// Cases with the same result in both.
const SAME: &[Case] = &[
    // RightmostTrustedRange.
    (Trusted(&[]), XFF, &["2.2.2.2:3384, 3.3.3.3", "4.4.4.4"], "4.4.4.4"),
    (Trusted(&["4.4.4.0/24"]), XFF, &["2.2.2.2:3384, 3.3.3.3", "4.4.4.4"], "3.3.3.3"),
    (Trusted(&["4.4.4.4"]), XFF, &["2.2.2.2:3384, 3.3.3.3", "4.4.4.4"], "3.3.3.3"),
    (
        Trusted(&[
            "2.2.2.2/32",
            "2607:f8b0:4004:83f::200e/128",
            "3.3.0.0/16",
            "2001:db7::/64",
            "::ffff:4.4.4.4/124",
            "64:ff9b::188.0.2.128/112",
        ]),
        "forwarded",
        &[
            "For=99.99.99.99, For=4.4.4.8, For=\"[2607:f8b0:4004:83f::200e]:4747\"",
            "For=2.2.2.2:8883, For=64:ff9b::188.0.2.200, For=3.3.5.5, For=2001:db7::abcd",
        ],
        "99.99.99.99",
    ),
    (
        Trusted(&["2400:cb00::/32", "104.16.0.0/13"]),
        XFF,
        &["2.2.2.2:3384, 3.3.3.3", "4.4.4.4", "2400:cb00::1"],
        "4.4.4.4",
    ),
    (Trusted(&["10.0.0.0/8"]), XFF, &["3.3.3.3, 10.0.0.1"], "3.3.3.3"),
    // RightmostNonPrivate.
    (Trusted(PRIVATE), XFF, &["2.2.2.2:3384, 3.3.3.3", "4.4.4.4:39333"], "4.4.4.4"),
    (Trusted(PRIVATE), "forwarded", &["For=5.5.5.5", "For=6.6.6.6"], "6.6.6.6"),
    (Trusted(PRIVATE), XFF, &["[2607:f8b0:4004:83f::18]:3838"], "2607:f8b0:4004:83f::18"),
    (
        Trusted(PRIVATE),
        "forwarded",
        &["host=what;for=6.6.6.6;proto=https", "Host=blah;For=\"2607:f8b0:4004:83f::18\";Proto=https"],
        "2607:f8b0:4004:83f::18",
    ),
    (Trusted(PRIVATE), XFF, &["3.3.3.3", "4.4.4.4, ::ffff:188.0.2.128"], "188.0.2.128"),
    (Trusted(PRIVATE), XFF, &["3.3.3.3", "4.4.4.4,[::ffff:188.0.2.128]:48483"], "188.0.2.128"),
    (Trusted(PRIVATE), "forwarded", &["host=what;for=6.6.6.6;proto=https", "For=\"::ffff:bc15:0006\""], "188.21.0.6"),
    (Trusted(PRIVATE), XFF, &["3.3.3.3", "4.4.4.4, 64:ff9b::188.0.2.128"], "64:ff9b::bc00:280"),
    // 198.18.0.0/15 is for benchmarks, and 192.18.0.0/15 is public.
    (Trusted(PRIVATE), XFF, &["4.4.4.4, 198.18.5.5"], "4.4.4.4"),
    (Trusted(PRIVATE), XFF, &["4.4.4.4, 192.18.5.5"], "192.18.5.5"),
    // RightmostTrustedCount.
    (Count(1), "forwarded", &["For=\"::ffff:bc15:0006\"", "host=what;for=6.6.6.6;proto=https"], "6.6.6.6"),
    (
        Count(5),
        XFF,
        &[
            "4.4.4.4, 5.5.5.5",
            "::1, fe80::382b:141b:fa4a:2a16%28",
            "7.7.7.7.7, 8.8.8.8, 9.9.9.9, 10.10.10.10,11.11.11.11, 12.12.12.12",
        ],
        "8.8.8.8",
    ),
    // SingleIPHeader.
    (Single, "true-client-ip", &["2.2.2.2:49489"], "2.2.2.2"),
    (Single, "x-real-ip", &["1.1.1.1"], "1.1.1.1"),
    (Single, "x-real-ip", &["[2607:f8b0:4004:83f::18]:3838"], "2607:f8b0:4004:83f::18"),
    (Single, "x-real-ip", &["2607:f8b0:4004:83f::19"], "2607:f8b0:4004:83f::19"),
    (Single, "x-real-ip", &["::ffff:172.21.0.6"], "172.21.0.6"),
    (Single, "x-real-ip", &["[64:ff9b::188.0.2.128]:4747"], "64:ff9b::bc00:280"),
    (Single, "x-real-ip", &["2002:c000:204::"], "2002:c000:204::"),
    (Single, "x-real-ip", &["127.0.0.1"], "127.0.0.1"),
    // Elements of Forwarded.
    (Single, "forwarded", &["For=\"[2607:f8b0:4004:83f::200e]:4711\""], "2607:f8b0:4004:83f::200e"),
    (Single, "forwarded", &["fOR=\"[2607:f8b0:4004:83f::200e]\""], "2607:f8b0:4004:83f::200e"),
    (Single, "forwarded", &["for=\"2607:f8b0:4004:83f::200e\""], "2607:f8b0:4004:83f::200e"),
    (Single, "forwarded", &["FOR=[2607:f8b0:4004:83f::200e]"], "2607:f8b0:4004:83f::200e"),
    (Single, "forwarded", &["For=[2607:f8b0:4004:83f::200e]:4711"], "2607:f8b0:4004:83f::200e"),
    (Single, "forwarded", &["FoR=192.0.2.60:4711"], "192.0.2.60"),
    (Single, "forwarded", &["for=192.0.2.60"], "192.0.2.60"),
    (Single, "forwarded", &["for=\"192.0.2.60\""], "192.0.2.60"),
    (Single, "forwarded", &["for=\"192.0.2.60:4823\""], "192.0.2.60"),
    (Single, "forwarded", &["by=1.1.1.1; for=2.2.2.2;host=myhost; proto=https"], "2.2.2.2"),
    (Single, "forwarded", &["by=1::1;host=myhost;for=2::2;proto=https"], "2::2"),
    (Single, "forwarded", &["by=1::1;host=myhost;proto=https;for=2.2.2.2"], "2.2.2.2"),
    (Single, "forwarded", &["for=\"[::ffff:188.0.2.128]\""], "188.0.2.128"),
    (Single, "forwarded", &["for=\"[::ffff:188.0.2.128]:49428\""], "188.0.2.128"),
    (Single, "forwarded", &["for=\"[0:0:0:0:0:ffff:bc15:0006]\""], "188.21.0.6"),
    (Single, "forwarded", &["for=\"[64:ff9b::188.0.2.128]\""], "64:ff9b::bc00:280"),
    (Single, "forwarded", &["for=127.0.0.1"], "127.0.0.1"),
    (Single, "forwarded", &["for=\"[::1]\""], "::1"),
];

/// Cases in which the package finds no client. [`ClientIp`] falls back to the proxy that sent the
/// unreadable entry, or to the leftmost address if all are proxies. So these clients share one limit, and
/// never choose their key.
const NO_CLIENT: &[Case] = &[
    (Trusted(&["2.2.2.0/24"]), XFF, &["2.2.2.2:3384, 2.2.2.3", "2.2.2.4"], "2.2.2.2"),
    (Trusted(&["2.2.2.0/24"]), XFF, &["nope, 2.2.2.2:3384, 2.2.2.3", "2.2.2.4"], "2.2.2.2"),
    (Trusted(&["2.2.2.0/24"]), XFF, &[], "10.0.0.1"),
    (Trusted(PRIVATE), XFF, &["::1, nope", "192.168.1.1, !?!, ::, 0.0.0.0"], "::"),
    (
        Trusted(PRIVATE),
        "forwarded",
        &["For=\"\", For=\"::ffff:192.168.1.1\"", "host=what;for=:48485;proto=https,For=\"fe80::abcd%zone\""],
        "10.0.0.1",
    ),
    (Count(2), "forwarded", &["For=\"::ffff:bc15:0006\"", "For=nope", "host=what;for=6.6.6.6;proto=https"], "6.6.6.6"),
    (Count(1), "forwarded", &[], "10.0.0.1"),
    (Count(50), XFF, &["4.4.4.4, 5.5.5.5", "7.7.7.7.7, 8.8.8.8, 9.9.9.9"], "8.8.8.8"),
    (Single, "x-real-ip", &[], "10.0.0.1"),
    (Single, "x-real-ip", &["nope"], "10.0.0.1"),
    (Single, "forwarded", &["for=192.0.2.999"], "10.0.0.1"),
    (Single, "forwarded", &["for=\"2607:f8b0:4004:83f::999999\""], "10.0.0.1"),
    (Single, "forwarded", &["for=\"_test\""], "10.0.0.1"),
    (Single, "forwarded", &["for="], "10.0.0.1"),
    (Single, "forwarded", &["for=\"1.1.1.1"], "10.0.0.1"),
    (Single, "forwarded", &["for=\"::1]\""], "10.0.0.1"),
    (Single, "forwarded", &["for=\"[0:0:0:0:0:ffff:bc15:0006\"]"], "10.0.0.1"),
    (Single, "forwarded", &["ads jkl&#*(383fdljk"], "10.0.0.1"),
    (Single, "forwarded", &["for=1.1.1.\\1"], "10.0.0.1"),
];

/// Cases with another result, with that of the package and the reason.
const DIFFERENT: &[(Case, &str, &str)] = &[
    // An address with a zone is of a link, and no client is behind a proxy on it.
    ((Single, "a-b-c-d", &["fe80::1111%zone"], "10.0.0.1"), "fe80::1111%zone", "no zones"),
    ((Single, "a-b-c-d", &["[fe80::1111%zone]:4848"], "10.0.0.1"), "fe80::1111%zone", "no zones"),
    ((Single, "forwarded", &["For=\"[fe80::abcd%zone]:4711\""], "10.0.0.1"), "fe80::abcd%zone", "no zones"),
    ((Single, "forwarded", &["For=\"fe80::abcd%zone\""], "10.0.0.1"), "fe80::abcd%zone", "no zones"),
    (
        (
            Trusted(PRIVATE),
            "forwarded",
            &["For=\"[2607:f8b0:4004:83f::18%eth0]:3393\"", "For=\"[fe80::1111%zone]:9943\""],
            "10.0.0.1",
        ),
        "2607:f8b0:4004:83f::18%eth0",
        "no zones",
    ),
    // The package skips an entry that is not an address, whose left neighbour may be text of the client.
    (
        (Trusted(PRIVATE), XFF, &["4.4.4.4, 5.5.5.5", "::1, nope"], "10.0.0.1"),
        "5.5.5.5",
        "an unreadable entry ends the search",
    ),
    (
        (
            Trusted(PRIVATE),
            "forwarded",
            &["host=what;for=:48485;proto=https,For=2.2.2.2", "For=\"\", For=\"::ffff:192.168.1.1\""],
            "192.168.1.1",
        ),
        "2.2.2.2",
        "an unreadable entry ends the search",
    ),
    // No proxy has a peer with an unspecified address, so it does not matter which key this is.
    ((Count(2), "forwarded", &["For=0.0.0.0", "for=6.6.6.6"], "0.0.0.0"), "", "any address is one"),
    ((Single, "true-client-ip", &["0.0.0.0"], "0.0.0.0"), "", "any address is one"),
    ((Trusted(&["2.2.2.0/24"]), XFF, &["::, 2.2.2.2:3384, 2.2.2.3", "2.2.2.4"], "::"), "", "any address is one"),
    // The package names these as its deviations from RFC 7239.
    ((Single, "forwarded", &["for= 1.1.1.1"], "10.0.0.1"), "1.1.1.1", "RFC 7239"),
    ((Single, "forwarded", &["For=\"[1.1.1.1]\""], "10.0.0.1"), "1.1.1.1", "RFC 7239"),
    ((Single, "forwarded", &["For=\"3.3.3.\\3\""], "3.3.3.3"), "", "RFC 7239"),
    ((Count(2), "forwarded", &["For=1.1.1.1;@!=\u{1f600}, For=2.2.2.2"], "2.2.2.2"), "1.1.1.1", "RFC 7239"),
    ((Count(2), "forwarded", &["For=1.1.1.1;For=2.2.2.2, For=3.3.3.3"], "3.3.3.3"), "1.1.1.1", "RFC 7239"),
    (
        (
            Count(3),
            "forwarded",
            &["For=5.5.5.5, For=\"1.1.1.1, For=2.2.2.2, For=3.3.3.3\", For=\"4.4.4.4\""],
            "4.4.4.4",
        ),
        "2.2.2.2",
        "RFC 7239: a comma in quotes",
    ),
];

fn client(&(rule, field, lines, _): &Case, peer: Option<&str>) -> Option<IpAddr> {
    let by = match rule {
        Trusted(networks) => ClientIp::behind(networks.iter().chain(&["10.0.0.1"])).unwrap(),
        Count(proxies) => ClientIp::behind_hops(proxies),
        Single => ClientIp::behind_hops(1),
    };
    let by = if field == "forwarded" { by.forwarded() } else { by.header(field) };
    let mut request: Request<()> = get("/");
    for line in lines {
        let value = HeaderValue::from_bytes(line.as_bytes()).unwrap();
        request.headers_mut().append(HeaderName::from_static(field), value);
    }
    // Fields that are not selected.
    for (name, value) in [("cf-connecting-ip", "1.1.1.1"), ("x-client-ip", "3.3.3.3")] {
        request.headers_mut().append(name, HeaderValue::from_static(value));
    }
    if let Some(peer) = peer {
        request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
    }
    by.address(&Head::from_request(&request)).ok()
}

#[test]
fn clients_are_those_of_realclientip() {
    for case in SAME.iter().chain(NO_CLIENT) {
        assert_eq!(client(case, Some(PROXY)), Some(case.3.parse().unwrap()), "{case:?}");
    }
    for (case, theirs, reason) in DIFFERENT {
        assert_eq!(client(case, Some(PROXY)), Some(case.3.parse().unwrap()), "{case:?}: {reason}");
        assert_ne!(case.3, *theirs, "{case:?} is not different");
    }
}

/// A peer, the lines of the field, the client here, and that of the package.
type Peer = (Option<&'static str>, &'static [&'static str], Option<&'static str>, &'static str);

/// The package reads the field also if the peer is not an address. Here, only a number of proxies does not
/// need the peer.
const PEERS: &[Peer] = &[
    (Some("9.9.9.9:1234"), &["1.2.3.4, 10.0.0.1"], Some("9.9.9.9"), "9.9.9.9"),
    (Some("9.9.9.9:1"), &[], Some("9.9.9.9"), "9.9.9.9"),
    (Some("10.0.0.5:555"), &["3.3.3.3, 10.0.0.1"], Some("3.3.3.3"), "3.3.3.3"),
    (Some("[fe80::1%2]:9999"), &["1.2.3.4"], Some("fe80::1"), "fe80::1%eth0"),
    (Some("0.0.0.0:1"), &["3.3.3.3, 10.0.0.1"], Some("0.0.0.0"), "3.3.3.3"),
    (None, &["3.3.3.3, 10.0.0.1"], None, "3.3.3.3"),
];

#[test]
fn peers_are_judged_as_by_realclientip() {
    for (peer, lines, expected, _) in PEERS {
        let case = (Trusted(&["10.0.0.0/8"]), XFF, *lines, "");
        assert_eq!(client(&case, *peer), expected.map(|client| client.parse().unwrap()), "{peer:?} {lines:?}");
    }
    // Over a Unix socket.
    let case = (Count(2), XFF, &["3.3.3.3, 10.0.0.1"][..], "");
    assert_eq!(client(&case, None), Some("3.3.3.3".parse().unwrap()));
}

#[test]
fn networks_are_parsed_as_by_realclientip() {
    for network in [
        "1.1.1.1",
        "2607:f8b0:4004:83f::200e",
        "1.1.1.1/16",
        "2607:f8b0:4004:83f::200e/48",
        "::ffff:188.0.2.128/112",
        "::ffff:bc15:0006/104",
        "64:ff9b::188.0.2.128/112",
    ] {
        assert!(ClientIp::behind([network]).is_ok(), "{network}");
    }
    for network in ["2607:f8b0:4004:83f::200e/nope", "fe80::abcd%nope/64", "1.1.1.nope", ""] {
        assert!(ClientIp::behind([network]).is_err(), "{network}");
    }
}
