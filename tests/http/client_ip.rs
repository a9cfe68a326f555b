//! The client's address behind proxies, and attempts to forge it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::extract::ConnectInfo;
use common::{Inner, get, policy, status};
use http::{HeaderValue, Request};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, Strategy, any};
use proptest::sample::select;
use proptest::{prop_assert, prop_assert_eq, prop_oneof, proptest};
use tower::Layer;
use tower_ratelimit::extract::Head;
use tower_ratelimit::{ClientIp, Key, KeyExtractor, PeerIp, RateLimit, RateLimitLayer};

const XFF: &str = "x-forwarded-for";
const PROXY: &str = "10.0.0.1:443";

/// Trusts 10.0.0.0/8 and `fd00::/8`.
fn behind() -> ClientIp {
    ClientIp::behind(["10.0.0.0/8", "fd00::/8"]).unwrap()
}

/// Returns a request from `peer` with these lines of one field.
fn request<T: AsRef<[u8]>>(peer: &str, field: &str, lines: impl IntoIterator<Item = T>) -> Request<()> {
    let mut request = with_lines(field, lines);
    request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
    request
}

/// Returns a request without a peer address, as over a Unix socket.
fn with_lines<T: AsRef<[u8]>>(field: &str, lines: impl IntoIterator<Item = T>) -> Request<()> {
    let mut request = get("/");
    for line in lines {
        let name: http::HeaderName = field.parse().unwrap();
        request.headers_mut().append(name, HeaderValue::from_bytes(line.as_ref()).unwrap());
    }
    request
}

fn address(by: &ClientIp, request: &Request<()>) -> IpAddr {
    by.address(&Head::from_request(request)).unwrap()
}

fn key(by: &impl KeyExtractor, request: &Request<()>) -> Key {
    by.extract(&Head::from_request(request)).unwrap().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Asserts the client of each list. The peer is the proxy.
fn check(by: &ClientIp, field: &str, cases: &[(&str, &str)]) {
    for (list, expected) in cases {
        assert_eq!(address(by, &request(PROXY, field, [list])), ip(expected), "{field}: {list}");
    }
}

fn once(by: ClientIp) -> RateLimit<Inner> {
    RateLimitLayer::new(policy("1/day"), by).layer(Inner::default())
}

#[test]
fn client_is_the_rightmost_address_that_is_not_a_proxy() {
    check(
        &behind(),
        XFF,
        &[
            ("1.2.3.4", "1.2.3.4"),
            ("1.2.3.4, 10.0.0.2", "1.2.3.4"),
            ("6.6.6.6, 1.2.3.4,10.0.0.2 ,\t10.255.255.255", "1.2.3.4"),
            ("10.0.0.9, 1.2.3.4, fd00::1", "1.2.3.4"),
            ("2001:db8::1, fdff::1", "2001:db8::1"),
            ("11.0.0.0", "11.0.0.0"),
            ("fe00::", "fe00::"),
        ],
    );
}

#[test]
fn header_of_an_untrusted_peer_is_ignored() {
    for by in [behind(), behind().header("x-real-ip"), behind().forwarded()] {
        for field in [XFF, "x-real-ip", "forwarded"] {
            let direct = request("1.2.3.4:5", field, ["6.6.6.6", "for=6.6.6.6"]);
            assert_eq!(address(&by, &direct), ip("1.2.3.4"));
            assert_eq!(key(&by, &direct), key(&PeerIp::new(), &direct));
        }
    }
}

#[test]
fn client_is_the_peer_without_the_field_and_the_leftmost_entry_if_all_are_proxies() {
    assert_eq!(address(&behind(), &request::<&str>(PROXY, XFF, [])), ip("10.0.0.1"));
    check(
        &behind(),
        XFF,
        &[("10.3.3.3", "10.3.3.3"), ("10.4.4.4, 10.0.0.3, 10.0.0.2", "10.4.4.4"), ("fd00::5", "fd00::5")],
    );
    assert_eq!(address(&behind(), &request(PROXY, XFF, ["10.5.5.5, 10.4.4.4", "10.3.3.3"])), ip("10.5.5.5"));
}

#[test]
fn last_field_line_is_read_first() {
    for (lines, expected) in [
        (&["1.2.3.4", "5.6.7.8"][..], "5.6.7.8"),
        (&["1.2.3.4", "10.0.0.2"], "1.2.3.4"),
        (&["6.6.6.6, 1.2.3.4, 10.0.0.4", "10.0.0.3, 10.0.0.2"], "1.2.3.4"),
        (&["6.6.6.6", "unknown", "10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6", "", "10.0.0.2"], "10.0.0.2"),
        (&["6.6.6.6", ""], "10.0.0.1"),
    ] {
        assert_eq!(address(&behind(), &request(PROXY, XFF, lines)), ip(expected), "{lines:?}");
    }
}

#[test]
fn addresses_with_ports_brackets_and_quotes_are_parsed() {
    for (text, expected) in [
        ("1.2.3.4", "1.2.3.4"),
        ("1.2.3.4:80", "1.2.3.4"),
        ("1.2.3.4:0", "1.2.3.4"),
        ("1.2.3.4:65535", "1.2.3.4"),
        ("\"1.2.3.4\"", "1.2.3.4"),
        ("\"1.2.3.4:80\"", "1.2.3.4"),
        (" \t 1.2.3.4 \t ", "1.2.3.4"),
        ("2001:db8::1", "2001:db8::1"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ("\"[2001:db8::1]:80\"", "2001:db8::1"),
        ("\"2001:db8::1\"", "2001:db8::1"),
        ("2001:db8::1.2.3.4", "2001:db8::102:304"),
        ("::", "::"),
    ] {
        check(&behind(), XFF, &[(text, expected)]);
        check(&behind().header("x-real-ip"), "x-real-ip", &[(text, expected)]);
        check(&behind().forwarded(), "forwarded", &[(&format!("for={}", text.trim()), expected)]);
    }
}

/// Guards against this defect: a header reader that splits on `:` refuses every IPv6 value.
#[tokio::test]
async fn ipv6_addresses_are_not_split_at_colons() {
    let service = once(behind());
    for (list, expected) in [
        ("2001:db8:0:1::1", 200),
        ("2001:db8:0:2::1", 200),
        ("[2001:db8:0:2::2]:443", 429),
        ("2001:db8:0:1:5:6:7:8", 429),
        ("2001:0db8:0000:0003:0000:0000:0000:0001", 200),
        ("1.2.3.4:80", 200),
        ("1.2.3.4", 429),
    ] {
        assert_eq!(status(&service, request(PROXY, XFF, [list])).await, expected, "{list}");
    }
}

const UNREADABLE: [&str; 36] = [
    "",
    " ",
    "unknown",
    "_hidden",
    "localhost",
    "1.2.3",
    "1.2.3.4.5",
    "01.2.3.4",
    "1.2.3.256",
    "1.2.3.4:",
    "1.2.3.4:+80",
    "1.2.3.4:65536",
    "1.2.3.4:000080",
    "1.2.3.4:http",
    "1.2.3.4:80:80",
    "1.2.3.4 5.6.7.8",
    "1.2.3.4;",
    "1.2.3.4/32",
    "[1.2.3.4]",
    "[2001:db8::1",
    "2001:db8::1]",
    "[2001:db8::1]80",
    "[2001:db8::1]:",
    "[2001:db8::1]:65536",
    "[2001:db8::1]:_p",
    "[[2001:db8::1]]",
    "[]",
    "fe80::1%eth0",
    "[fe80::1%1]",
    "[fe80::1%1]:80",
    "2001:db8:::1",
    "\"",
    "\"\"",
    "\"1.2.3.4",
    "1.2.3.4\"",
    "\" 1.2.3.4\"",
];

/// Guards against this defect: the search skips unreadable entries and returns text of the client.
#[test]
fn unparseable_entry_ends_the_search_at_the_hop_that_sent_it() {
    for entry in UNREADABLE {
        let cases = [
            (format!("6.6.6.6, {entry}"), "10.0.0.1"),
            (format!("6.6.6.6,{entry},10.0.0.2"), "10.0.0.2"),
            (format!("6.6.6.6, {entry}, 10.0.0.3, 10.0.0.2"), "10.0.0.3"),
        ];
        for (list, expected) in &cases {
            check(&behind(), XFF, &[(list, expected)]);
            check(&behind().header("x-real-ip"), "x-real-ip", &[(list, expected)]);
        }
    }
    for bytes in [
        &b"6.6.6.6, 1.2.3.\xff4, 10.0.0.2"[..],
        b"6.6.6.6, \xc2\xa01.2.3.4, 10.0.0.2",
        b"6.6.6.6, \xef\xbc\x91.2.3.4, 10.0.0.2",
    ] {
        assert_eq!(address(&behind(), &request(PROXY, XFF, [bytes])), ip("10.0.0.2"), "{}", bytes.escape_ascii());
    }
}

/// Guards against this defect: the leftmost `X-Forwarded-For` entry is trusted. Rotating it passed
/// 1,000 of 1,000 requests and stored 1,000 keys.
#[tokio::test]
async fn spoofed_prefixes_do_not_change_the_client() {
    let list = |spoofed: u32| format!("{}, 1.2.3.4, 10.0.0.2", Ipv4Addr::from(0x0606_0000 + spoofed));
    let elements = |spoofed: u32| format!("for={};x=\", for=1.2.3.4, for=10.0.0.2", Ipv4Addr::from(spoofed));
    for (by, field) in
        [(behind(), XFF), (behind().header("x-real-ip"), "x-real-ip"), (behind().forwarded(), "forwarded")]
    {
        let service = once(by);
        let mut admitted = 0;
        for spoofed in 0..1_000 {
            let line = if field == "forwarded" { elements(spoofed) } else { list(spoofed) };
            admitted += u32::from(status(&service, request(PROXY, field, [line])).await == 200);
        }
        assert_eq!(admitted, 1, "{field}");
    }
}

/// Guards against this defect: a second forwarding header is trusted.
#[test]
fn only_the_configured_field_is_read() {
    let fields = [
        ("x-forwarded-for", "6.6.6.1"),
        ("x-real-ip", "6.6.6.2"),
        ("forwarded", "for=6.6.6.3"),
        ("cf-connecting-ip", "6.6.6.4"),
        ("true-client-ip", "6.6.6.5"),
        ("x-client-ip", "6.6.6.6"),
    ];
    let readers = [
        (behind(), "x-forwarded-for", "6.6.6.1"),
        (behind().header("X-Real-IP"), "x-real-ip", "6.6.6.2"),
        (behind().forwarded(), "forwarded", "6.6.6.3"),
        (behind().header("cf-connecting-ip"), "cf-connecting-ip", "6.6.6.4"),
        (behind().forwarded().header("true-client-ip"), "true-client-ip", "6.6.6.5"),
        (behind().header("x-real-ip").forwarded(), "forwarded", "6.6.6.3"),
    ];
    for (by, own, expected) in readers {
        let mut all = request::<&str>(PROXY, XFF, []);
        for (name, value) in fields {
            all.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        assert_eq!(address(&by, &all), ip(expected), "{own}");
        all.headers_mut().insert(own, HeaderValue::from_static("unknown"));
        assert_eq!(address(&by, &all), ip("10.0.0.1"), "an empty {own} does not fall back to another field");
        all.headers_mut().remove(own);
        assert_eq!(address(&by, &all), ip("10.0.0.1"), "a missing {own} does not fall back to another field");
    }
}

/// Guards against this defect: all IPv4-mapped IPv6 addresses share one key
/// (CVE-2026-30827), or the notation of an address selects its key.
#[test]
fn ipv4_mapped_addresses_are_ipv4_in_any_notation() {
    check(
        &behind(),
        XFF,
        &[
            ("::ffff:1.2.3.4", "1.2.3.4"),
            ("::ffff:102:304", "1.2.3.4"),
            ("[::FFFF:1.2.3.4]:80", "1.2.3.4"),
            ("0:0:0:0:0:ffff:0102:0304", "1.2.3.4"),
            ("6.6.6.6, ::ffff:10.0.0.2", "6.6.6.6"),
            ("::1.2.3.4", "::102:304"),
            ("64:ff9b::10.0.0.2", "64:ff9b::a00:2"),
        ],
    );
    let mapped_peer = request("[::ffff:10.0.0.1]:443", XFF, ["1.2.3.4"]);
    assert_eq!(address(&behind(), &mapped_peer), ip("1.2.3.4"), "a mapped address of a proxy is trusted");
    let mapped_client = request("[::ffff:1.2.3.4]:443", XFF, ["6.6.6.6"]);
    assert_eq!(address(&behind(), &mapped_client), ip("1.2.3.4"));
    let mut by_axum = with_lines(XFF, ["1.2.3.4"]);
    by_axum.extensions_mut().insert(ConnectInfo("[::ffff:10.0.0.1]:443".parse::<SocketAddr>().unwrap()));
    assert_eq!(address(&behind(), &by_axum), ip("1.2.3.4"));
}

#[test]
fn networks_are_parsed_in_every_notation() {
    for (networks, trusted, not) in [
        (&["10.0.0.1"][..], "10.0.0.1", "10.0.0.2"),
        (&["10.0.0.77/24"], "10.0.0.1", "10.0.1.1"),
        (&[" 10.0.0.0/8 "], "10.9.9.9", "11.0.0.0"),
        (&["::ffff:10.0.0.0/104"], "10.9.9.9", "11.0.0.0"),
        (&["::ffff:a00:1"], "10.0.0.1", "10.0.0.0"),
        (&["0.0.0.0/0"], "9.9.9.9", "2001:db8::1"),
        (&["::/0"], "2001:db8::1", "9.9.9.9"),
        (&["2001:db8::1"], "2001:db8::1", "2001:db8::2"),
        (&["2001:db8::ffff/127"], "2001:db8::fffe", "2001:db8::1:0"),
        (&["192.0.2.0/25", "192.0.2.128/25", "fd00::/8"], "192.0.2.200", "192.0.3.0"),
    ] {
        let by = ClientIp::behind(networks).unwrap();
        for (peer, expected) in [(trusted, "7.7.7.7"), (not, not)] {
            let peer = SocketAddr::new(ip(peer), 1).to_string();
            assert_eq!(address(&by, &request(&peer, XFF, ["7.7.7.7"])), ip(expected), "{networks:?} {peer}");
        }
    }
    let several: Vec<String> = "10.0.0.0/8,fd00::/8".split(',').map(str::to_owned).collect();
    check(&ClientIp::behind(several).unwrap(), XFF, &[("1.2.3.4", "1.2.3.4")]);
}

#[test]
fn error_of_an_invalid_configuration_suggests_a_valid_one() {
    let error = |made: Result<ClientIp, tower_ratelimit::ConfigError>| made.unwrap_err().to_string();
    for (network, hint) in [
        ("", "\"10.0.0.0/8\""),
        ("*", "\"10.0.0.0/8\""),
        ("localhost", "\"10.0.0.0/8\""),
        ("10.0.0.0/33", "\"10.0.0.0/32\""),
        ("10.0.0.0/", "\"10.0.0.0/32\""),
        ("10.0.0.0/+8", "\"10.0.0.0/32\""),
        ("10.0.0.0/255.0.0.0", "\"10.0.0.0/32\""),
        ("fd00::/129", "\"fd00::/128\""),
        ("[fd00::]/8", "\"fd00::/8\""),
        ("fe80::1%eth0", "\"fd00::/8\""),
        ("010.0.0.0/8", "\"10.0.0.0/8\""),
        ("10.0.0.0/8/8", "\"10.0.0.0/32\""),
        ("::ffff:10.0.0.0/8", "\"10.0.0.0/8\""),
        ("::ffff:10.0.0.0/95", "\"10.0.0.0/32\""),
    ] {
        let message = error(ClientIp::behind(["10.0.0.0/8", network]));
        assert!(message.contains(&format!("{network:?}")) && message.contains(hint), "{network:?}: {message}");
    }
    assert!(error(ClientIp::behind([""; 0])).contains("PeerIp"));
    let message = error(behind().try_header("x forwarded"));
    assert!(message.contains("\"x forwarded\"") && message.contains("\"cf-connecting-ip\""), "{message}");
    assert!(error(behind().try_header("Forwarded")).contains("forwarded()"));
    assert!(std::panic::catch_unwind(|| behind().ipv6_prefix(129)).is_err());
}

#[test]
#[should_panic = "use PeerIp"]
fn zero_hops_panic() {
    let _ = ClientIp::behind_hops(0);
}

#[test]
fn number_of_hops_is_the_position_of_the_client_from_the_right() {
    let list = "9.9.9.4, 9.9.9.3, 9.9.9.2, 9.9.9.1";
    for (hops, expected) in [(1, "9.9.9.1"), (2, "9.9.9.2"), (4, "9.9.9.4"), (5, "9.9.9.4"), (u32::MAX, "9.9.9.4")] {
        check(&ClientIp::behind_hops(hops), XFF, &[(list, expected)]);
    }
    let two = ClientIp::behind_hops(2);
    check(&two, XFF, &[("", "10.0.0.1"), ("5.5.5.5, unknown", "10.0.0.1"), ("5.5.5.5, , 1.2.3.4", "1.2.3.4")]);
    check(&two, XFF, &[("6.6.6.6, 10.0.0.3, 10.0.0.2", "10.0.0.3"), ("_x, 7.7.7.7", "7.7.7.7")]);
    check(&two.clone().header("x-real-ip"), "x-real-ip", &[("1.2.3.4", "1.2.3.4")]);
    check(&two.clone().forwarded(), "forwarded", &[("for=6.6.6.6, for=1.2.3.4, for=5.5.5.5", "1.2.3.4")]);
    assert_eq!(address(&two, &request(PROXY, XFF, ["6.6.6.6", "1.2.3.4", "5.5.5.5"])), ip("1.2.3.4"));
    assert_eq!(address(&two, &request::<&str>(PROXY, XFF, [])), ip("10.0.0.1"));
    assert_eq!(address(&two, &request("9.9.9.9:1", XFF, ["1.2.3.4, 5.5.5.5"])), ip("1.2.3.4"), "for any peer");
}

#[test]
fn missing_peer_address_is_an_error_only_if_it_is_needed() {
    let by = ClientIp::behind_hops(2);
    for (list, expected) in
        [("6.6.6.6, 1.2.3.4, 5.5.5.5", "1.2.3.4"), ("5.5.5.5", "5.5.5.5"), ("unknown, 5.5.5.5", "5.5.5.5")]
    {
        assert_eq!(address(&by, &with_lines(XFF, [list])), ip(expected), "{list}");
    }
    let unread = with_lines(XFF, ["5.5.5.5, unknown"]);
    let nothing = with_lines::<&str>(XFF, []);
    let list = with_lines(XFF, ["1.2.3.4"]);
    for (by, request) in [(&by, unread), (&by, nothing), (&behind(), list)] {
        let missing = by.extract(&Head::from_request(&request)).unwrap_err();
        assert!(!missing.is_clients_fault() && missing.reason().contains("connect_info"), "{missing}");
        assert_eq!(PeerIp::new().address(&Head::from_request(&request)), Err(missing));
    }
}

#[test]
fn client_behind_a_proxy_has_the_same_key_as_a_direct_peer() {
    for client in ["1.2.3.4", "::ffff:1.2.3.4", "2001:db8::1", "2001:db8:1:2:3:4:5:6", "::1"] {
        let direct = request::<&str>(&SocketAddr::new(ip(client), 1).to_string(), XFF, []);
        let proxied = request(PROXY, XFF, [client]);
        assert_eq!(key(&behind(), &proxied), key(&PeerIp::new(), &direct), "{client}");
        for bits in [0, 32, 48, 56, 65, 128] {
            let (by, peer) = (behind().ipv6_prefix(bits), PeerIp::new().ipv6_prefix(bits));
            assert_eq!(key(&by, &proxied), key(&peer, &direct), "{client} /{bits}");
        }
        assert_eq!(address(&behind(), &proxied), ip(client).to_canonical(), "the address keeps all bits");
        assert_eq!(PeerIp::new().address(&Head::from_request(&direct)), Ok(ip(client).to_canonical()));
    }
}

/// Guards against this defect: 200 addresses of one /64 all pass.
#[tokio::test]
async fn addresses_of_one_ipv6_network_behind_a_proxy_are_one_client() {
    let service = once(behind());
    let mut admitted = 0;
    for host in 1..=200 {
        let list = format!("2001:db8:1:2:{host:x}::{host:x}");
        admitted += u32::from(status(&service, request(PROXY, XFF, [list])).await == 200);
    }
    assert_eq!(admitted, 1);
}

#[test]
fn forwarded_uses_the_for_parameter() {
    check(
        &behind().forwarded(),
        "forwarded",
        &[
            ("for=1.2.3.4", "1.2.3.4"),
            ("For=1.2.3.4;proto=http;by=203.0.113.43", "1.2.3.4"),
            ("proto=https ; FOR=1.2.3.4; by=_x", "1.2.3.4"),
            ("for=\"[2001:db8::1]:4711\"", "2001:db8::1"),
            ("for=\"1.2.3.4:_gazonk\"", "1.2.3.4"),
            ("for=\"[2001:db8::1]:_a.b-c_9\"", "2001:db8::1"),
            ("for=\"1\\.2.3\\.\\4\"", "1.2.3.4"),
            ("for=6.6.6.6, for=1.2.3.4;host=\"a, for=9.9.9.9\", for=10.0.0.2", "1.2.3.4"),
            ("for=1.2.3.4;host=\"\\\", for=9.9.9.9, x=\\\"\"", "1.2.3.4"),
            ("for=1.2.3.4;host=\"\\\\\"", "1.2.3.4"),
            ("for=1.2.3.4;host=\"\\\\\\\"\\\\\";proto=http", "1.2.3.4"),
            ("for=1.2.3.4;host=\"\"", "1.2.3.4"),
            ("host=\"for=9.9.9.9\";for=1.2.3.4", "1.2.3.4"),
            ("for=1.2.3.4;host=example.com:8080;sig=YQ==", "1.2.3.4"),
            (";;for=1.2.3.4;;", "1.2.3.4"),
            ("for=1.2.3.4;xfor=9.9.9.9;forx=9.9.9.9", "1.2.3.4"),
        ],
    );
}

#[test]
fn text_of_the_client_in_forwarded_does_not_hide_the_entry_of_the_proxy() {
    for left in [
        "\"",
        "for=\"",
        "for=6.6.6.6;x=\"",
        "for=6.6.6.6;x=\"\\",
        "for=6.6.6.6;x=\\",
        "for=6.6.6.6;x=\"\\\\",
        "for=\"6.6.6.6, for=\\\"",
        "\\",
        "for=6.6.6.6;",
        "for=6.6.6.6;x=",
        ",",
        "",
    ] {
        for right in
            ["for=1.2.3.4", "for=1.2.3.4;host=\"a\"", "host=\"\\\"\";for=\"1.2.3.4\"", "for=1.2.3.4, for=10.0.0.2"]
        {
            for joined in [format!("{left},{right}"), format!("{left}, {right}")] {
                check(&behind().forwarded(), "forwarded", &[(&joined, "1.2.3.4")]);
            }
        }
    }
}

#[test]
fn unreadable_element_of_forwarded_ends_the_search() {
    for element in [
        "",
        "proto=http",
        "for",
        "for=",
        "for=\"\"",
        "for=unknown",
        "for=_hidden",
        "for=\"_hidden:80\"",
        "for=1.2.3.4;for=1.2.3.4",
        "for=1.2.3.4;FOR=unknown",
        "for =1.2.3.4",
        "for= 1.2.3.4",
        "=1.2.3.4",
        "1.2.3.4",
        "for=1.2.3.4;secure",
        "for=1.2.3.4;=x",
        "for=1.2.3.4;a b=c",
        "for=1.2.3.4:_",
        "for=1.2.3.4:_a/b",
        "for=\"1.2.3.4\"x",
        "for=x\"1.2.3.4\"",
        "for=\"1.2.3.4\"\"\"",
        "for=\"1.2.3.4\\\"",
        "for=1.2.3.4\"",
        "for=1.2.3.4;host=a\"b",
        "for=1.2.3.4;host=\"a\"b\"",
        "for=1.2.3.4;host=a\"b\"",
        "for=1.2.3.4;host=a\"b\"c",
        "for=1.2.3.4;host=\"a\"\"b\"",
        "for=1.2.3.4;host=\"a\"b\"c\"",
        "for=1.2.3.4;host=\"a\\\\\"b\"",
        "for=1.2.3.4;host=\"a\\\"",
        "for=1.2.3.4;host=\"a\\\"b",
        "for=[fe80::1%1]",
        "for='1.2.3.4'",
    ] {
        let cases = [
            (format!("for=6.6.6.6, {element}, for=10.0.0.2"), "10.0.0.2"),
            (format!("for=6.6.6.6,{element}"), "10.0.0.1"),
        ];
        for (list, expected) in &cases {
            check(&behind().forwarded(), "forwarded", &[(list, expected)]);
        }
    }
    let bytes = b"for=6.6.6.6, for=1.2.3.\xff, for=10.0.0.2";
    assert_eq!(address(&behind().forwarded(), &request(PROXY, "forwarded", [bytes])), ip("10.0.0.2"));
}

/// An entry of a list as a proxy writes it, and its address.
type Entry = (Vec<u8>, Option<IpAddr>);

fn addresses() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).into()),
        any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).into()),
        (any::<u32>(), 0..4_u128).prop_map(|(low, high)| Ipv6Addr::from_bits(high << 126 | u128::from(low)).into()),
        any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).to_ipv6_mapped().into()),
    ]
}

fn proxies() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0..1_u32 << 24).prop_map(|low| Ipv4Addr::from_bits(10 << 24 | low).into()),
        any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(0xfd << 120 | bits >> 8).into()),
        (0..1_u32 << 24).prop_map(|low| Ipv4Addr::from_bits(10 << 24 | low).to_ipv6_mapped().into()),
    ]
}

fn clients() -> impl Strategy<Value = IpAddr> {
    addresses().prop_filter("no proxy", |address| match address.to_canonical() {
        IpAddr::V4(v4) => v4.octets()[0] != 10,
        IpAddr::V6(v6) => v6.octets()[0] != 0xfd,
    })
}

/// An address in any notation without spaces or quotes.
fn notations(address: IpAddr) -> impl Strategy<Value = String> {
    let plain = match address {
        IpAddr::V4(v4) => vec![v4.to_string()],
        IpAddr::V6(v6) => {
            let groups = v6.segments();
            let padded = groups.map(|group| format!("{group:04x}")).join(":");
            let short = groups.map(|group| format!("{group:X}")).join(":");
            let [.., a, b, c, d] = v6.octets();
            let dotted = format!(
                "{}:{a}.{b}.{c}.{d}",
                groups[..6].iter().map(|group| format!("{group:x}")).collect::<Vec<_>>().join(":")
            );
            let all = [v6.to_string(), v6.to_string().to_uppercase(), padded, short, dotted];
            all.iter().cloned().chain(all.iter().map(|text| format!("[{text}]"))).collect()
        }
    };
    (select(plain), option::of(any::<u16>())).prop_map(move |(text, port)| match port {
        Some(port) if text.starts_with('[') || address.is_ipv4() => format!("{text}:{port}"),
        _ => text,
    })
}

fn spaces() -> impl Strategy<Value = &'static str> {
    select(vec!["", "", "", " ", "\t", " \t "])
}

/// A byte that is valid in a header field.
fn bytes() -> impl Strategy<Value = u8> {
    any::<u8>().prop_filter("no control character", |byte| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f))
}

/// Text that a client may write to confuse the parser.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    let words = [
        "\"",
        "\"",
        "\\",
        "\\",
        ",",
        ",",
        ";",
        "=",
        " ",
        "\t",
        ":",
        "[",
        "]",
        "_",
        "for=",
        "FOR=\"",
        "host=\"",
        "x=\"",
        "unknown",
        "6.6.6.6",
        "10.0.0.9",
        "[fd00::9]",
        "for=6.6.6.6",
        "for=10.0.0.9",
        "for=\"[fd00::9]:1\"",
        ";host=\"\\\"",
        "\",for=6.6.6.6",
    ];
    let piece =
        prop_oneof![4 => select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec()), 1 => vec(bytes(), 1..3)];
    vec(piece, 0..16).prop_map(|pieces| pieces.concat())
}

/// A quoted string with this text, escaped where necessary and at some other places.
fn quoted(text: &[u8], escapes: &[bool]) -> Vec<u8> {
    let mut quoted = vec![b'"'];
    for (at, byte) in text.iter().enumerate() {
        if matches!(byte, b'"' | b'\\') || escapes.get(at).copied().unwrap_or_default() {
            quoted.push(b'\\');
        }
        quoted.push(*byte);
    }
    quoted.push(b'"');
    quoted
}

/// An entry of a list with this address.
fn listed(address: IpAddr) -> impl Strategy<Value = Entry> {
    (notations(address), any::<bool>(), spaces(), spaces()).prop_map(move |(text, quotes, before, after)| {
        let text = if quotes { format!("\"{text}\"") } else { text };
        (format!("{before}{text}{after}").into_bytes(), Some(address.to_canonical()))
    })
}

/// An element of `Forwarded` with these `for` parameters, and others that contain text of the
/// client.
fn element(values: Vec<String>) -> impl Strategy<Value = Vec<u8>> {
    let fors = (vec(any::<bool>(), 48), any::<bool>(), select(vec!["for", "For", "FOR"])).prop_map(
        move |(escapes, always, name)| {
            let parameter = |value: &String| {
                let token = value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
                    && !value.is_empty();
                let value =
                    if token && !always { value.as_bytes().to_vec() } else { quoted(value.as_bytes(), &escapes) };
                [name.as_bytes(), b"=", &value].concat()
            };
            values.iter().map(parameter).collect::<Vec<_>>()
        },
    );
    let hosts =
        (junk(), vec(any::<bool>(), 8)).prop_map(|(text, escapes)| [b"host=", &*quoted(&text, &escapes)].concat());
    let other = prop_oneof![Just(b"proto=https".to_vec()), Just(b"by=_secret".to_vec()), hosts];
    let spaces = (spaces(), spaces());
    (fors, vec((other, any::<bool>()), 0..4), spaces).prop_map(|(fors, others, (before, after))| {
        let (front, back): (Vec<_>, Vec<_>) = others.into_iter().partition(|(_, front)| *front);
        let parameters: Vec<Vec<u8>> =
            front.into_iter().map(|(text, _)| text).chain(fors).chain(back.into_iter().map(|(text, _)| text)).collect();
        [before.as_bytes(), &parameters.join(&b';'), after.as_bytes()].concat()
    })
}

fn forwarded(address: IpAddr) -> impl Strategy<Value = Entry> {
    notations(address)
        .prop_flat_map(|text| element(vec![text]))
        .prop_map(move |text| (text, Some(address.to_canonical())))
}

/// A well-formed element without an address.
fn without_address() -> impl Strategy<Value = Entry> {
    let values =
        [&[][..], &["unknown"], &["_hidden"], &["1.2.3.4", "1.2.3.4"], &["10.0.0.3", "unknown"], &["1.2.3.256"]];
    select(values.map(|values| values.iter().map(ToString::to_string).collect::<Vec<_>>()).to_vec())
        .prop_flat_map(element)
        .prop_map(|text| (text, None))
}

/// The entries of proxies: the one at which the search ends, and the proxies to its right.
fn added_to_list() -> impl Strategy<Value = (Entry, Vec<Entry>)> {
    let unreadable = select(UNREADABLE.to_vec()).prop_map(|text| (text.as_bytes().to_vec(), None));
    let stop = prop_oneof![2 => clients().prop_flat_map(listed), 1 => unreadable];
    (stop, vec(proxies().prop_flat_map(listed), 0..4))
}

/// Like [`added_to_list`], but for `Forwarded`.
fn added_to_forwarded() -> impl Strategy<Value = (Entry, Vec<Entry>)> {
    let stop = prop_oneof![2 => clients().prop_flat_map(forwarded), 1 => without_address()];
    (stop, vec(proxies().prop_flat_map(forwarded), 0..4))
}

/// Asserts that text on the left does not change the client, for each way to join the text.
fn assert_left_is_ignored(
    by: &ClientIp,
    field: &str,
    left: &[u8],
    (stop, proxies): (Entry, Vec<Entry>),
) -> Result<(), proptest::test_runner::TestCaseError> {
    let hop = proxies.first().map_or(ip("10.0.0.1"), |(_, address)| address.unwrap());
    let expected = stop.1.unwrap_or(hop);
    let entries: Vec<&[u8]> = std::iter::once(&stop).chain(&proxies).map(|(text, _)| &**text).collect();
    let right = entries.join(&b","[..]);
    let ways: [Vec<Vec<u8>>; 6] = [
        vec![right.clone()],
        vec![[left, b",", &right].concat()],
        vec![[left, b", ", &right].concat()],
        vec![left.to_vec(), right.clone()],
        vec![left.to_vec(), [left, b", ", &right].concat()],
        [vec![left.to_vec()], entries.iter().map(|entry| entry.to_vec()).collect()].concat(),
    ];
    for lines in ways {
        let request = request(PROXY, field, &lines);
        let shown = || lines.iter().map(|line| line.escape_ascii().to_string()).collect::<Vec<_>>();
        prop_assert_eq!(address(by, &request), expected, "{:?}", shown());
        let peer = self::request::<&str>(&SocketAddr::new(expected, 1).to_string(), field, []);
        prop_assert_eq!(key(by, &request), key(&PeerIp::new(), &peer));
    }
    Ok(())
}

/// Parses a well-formed value of `Forwarded` from the left.
fn model(value: &[u8]) -> Vec<Option<IpAddr>> {
    let (mut elements, mut fors) = (Vec::new(), Vec::new());
    let (mut name, mut text, mut in_value, mut in_quotes) = (Vec::new(), Vec::new(), false, false);
    let mut bytes = value.iter().copied().chain([b',']);
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' if in_quotes => text.push(bytes.next().unwrap()),
            b'"' => in_quotes = !in_quotes,
            _ if in_quotes => text.push(byte),
            b' ' | b'\t' => {}
            b'=' if !in_value => (name, in_value) = (std::mem::take(&mut text).to_ascii_lowercase(), true),
            b';' | b',' => {
                let value = std::mem::take(&mut text);
                if std::mem::take(&mut name) == b"for" {
                    fors.push(String::from_utf8(value).unwrap());
                }
                in_value = false;
                if byte == b',' {
                    elements.push(match &*std::mem::take(&mut fors) {
                        [one] => node(one),
                        _ => None,
                    });
                }
            }
            _ => text.push(byte),
        }
    }
    elements
}

/// The address of a node with an optional valid port.
fn node(text: &str) -> Option<IpAddr> {
    let without_port = match text.strip_prefix('[') {
        Some(bracketed) => bracketed.split(']').next(),
        None if text.matches(':').count() == 1 => text.split(':').next(),
        None => Some(text),
    };
    Some(without_port?.parse::<IpAddr>().ok()?.to_canonical())
}

proptest! {
    #[test]
    fn text_on_the_left_does_not_change_the_client_of_x_forwarded_for(left in junk(), added in added_to_list()) {
        assert_left_is_ignored(&behind(), XFF, &left, added)?;
    }

    #[test]
    fn text_on_the_left_does_not_change_the_client_of_a_named_field(left in junk(), added in added_to_list()) {
        assert_left_is_ignored(&behind().header("cf-connecting-ip"), "cf-connecting-ip", &left, added)?;
    }

    #[test]
    fn text_on_the_left_does_not_change_the_client_of_forwarded(left in junk(), added in added_to_forwarded()) {
        assert_left_is_ignored(&behind().forwarded(), "forwarded", &left, added)?;
    }

    #[test]
    fn address_is_found_in_every_notation(
        (entry, element, expected) in addresses().prop_flat_map(|address| (listed(address), forwarded(address), Just(address.to_canonical())))
    ) {
        let by = ClientIp::behind_hops(1);
        prop_assert_eq!(address(&by, &with_lines(XFF, [&entry.0])), expected);
        prop_assert_eq!(address(&by.clone().header("x-real-ip"), &with_lines("x-real-ip", [&entry.0])), expected);
        prop_assert_eq!(address(&by.forwarded(), &with_lines("forwarded", [&element.0])), expected);
    }

    #[test]
    fn parsing_forwarded_from_the_right_agrees_with_parsing_from_the_left(
        elements in vec(prop_oneof![6 => addresses().prop_flat_map(forwarded), 1 => without_address()], 1..6)
    ) {
        let value = elements.iter().map(|(text, _)| &**text).collect::<Vec<_>>().join(&b","[..]);
        let expected = model(&value);
        prop_assert_eq!(&expected, &elements.iter().map(|(_, address)| *address).collect::<Vec<_>>());
        let mut hop = Some(ip("10.0.0.1"));
        for (hops, entry) in (1..).zip(expected.iter().rev()) {
            let Some(address) = entry else { break };
            hop = Some(*address);
            let by = ClientIp::behind_hops(hops).forwarded();
            prop_assert_eq!(by.address(&Head::from_request(&request(PROXY, "forwarded", [&value]))).ok(), hop, "{}", value.escape_ascii());
        }
        let all = ClientIp::behind_hops(u32::MAX).forwarded();
        prop_assert_eq!(all.address(&Head::from_request(&request(PROXY, "forwarded", [&value]))).ok(), hop, "{}", value.escape_ascii());
    }

    #[test]
    fn client_is_the_peer_or_an_address_in_the_field(lines in vec(junk(), 0..4), hops in 1..4_u32) {
        let text: Vec<u8> = lines.join(&b","[..]).into_iter().filter(|byte| *byte != b'\\').collect();
        let is_in_field = |address: IpAddr| {
            let words = text.split(|byte| !byte.is_ascii_hexdigit() && !b".:".contains(byte));
            words.filter_map(|word| str::from_utf8(word).ok()).any(|word| {
                let v4 = word.split(':').next().unwrap();
                [word, v4].iter().any(|word| word.parse::<IpAddr>().is_ok_and(|found| found.to_canonical() == address))
            })
        };
        for by in [behind(), ClientIp::behind_hops(hops), behind().forwarded(), ClientIp::behind_hops(hops).forwarded()] {
            for field in [XFF, "forwarded"] {
                let found = address(&by, &request(PROXY, field, &lines));
                prop_assert!(found == ip("10.0.0.1") || is_in_field(found), "{found}");
            }
        }
    }
}
