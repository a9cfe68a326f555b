//! IPv4 clients that reach an IPv6 server through NAT64 (RFC 6052).

use std::net::{IpAddr, SocketAddr};

use common::{Inner, ask, memory_with_manual_clock, policy};
use http::Request;
use tower::Layer;
use tower_ratelimit::{ClientIp, Key, KeyExtractor, OnError, PeerIp, RateLimitLayer};

const MALLORY: &str = "64:ff9b::192.0.2.1";
const ALICE: &str = "64:ff9b::192.0.2.2";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The statuses of two requests by Mallory and one by Alice. Each client may send one.
async fn statuses(key: impl KeyExtractor, request: impl Fn(&str) -> Request<()>) -> [u16; 3] {
    let storage = memory_with_manual_clock().0;
    let layer = RateLimitLayer::new(policy("1/minute"), key).storage(storage, OnError::Refuse);
    let service = layer.layer(Inner::default());
    let mut statuses = [0; 3];
    for (status, client) in statuses.iter_mut().zip([MALLORY, MALLORY, ALICE]) {
        *status = ask(&service, request(client)).await.status().as_u16();
    }
    statuses
}

fn from_peer(client: &str) -> Request<()> {
    Request::get("/").extension(SocketAddr::new(ip(client), 40_000)).body(()).unwrap()
}

fn through_proxy(client: &str) -> Request<()> {
    let proxy = SocketAddr::new(ip("10.0.0.1"), 443);
    Request::get("/").extension(proxy).header("x-forwarded-for", client).body(()).unwrap()
}

#[tokio::test]
async fn clients_behind_nat64_are_separate_clients_by_default() {
    let behind = || ClientIp::behind(["10.0.0.0/8"]).unwrap();
    assert_eq!(statuses(PeerIp::new(), from_peer).await, [200, 429, 200]);
    assert_eq!(statuses(PeerIp::default(), from_peer).await, [200, 429, 200]);
    assert_eq!(statuses(behind(), through_proxy).await, [200, 429, 200]);
    // The IPv6 prefix length does not apply to NAT64 addresses.
    assert_eq!(statuses(PeerIp::new().ipv6_prefix(48), from_peer).await, [200, 429, 200]);
    assert_eq!(statuses(behind().ipv6_prefix(48), through_proxy).await, [200, 429, 200]);

    assert_eq!(statuses(PeerIp::new().nat64(false), from_peer).await, [200, 429, 429]);
    assert_eq!(statuses(PeerIp::new().nat64(false).ipv6_prefix(96), from_peer).await, [200, 429, 429]);
    assert_eq!(statuses(behind().nat64(false), through_proxy).await, [200, 429, 429]);
}

#[test]
fn only_the_well_known_prefix_maps_to_ipv4() {
    for (address, maps_to_ipv4) in [
        ("64:ff9b::192.0.2.1", true),
        ("64:ff9b::c000:201", true),
        ("64:ff9b:1::192.0.2.1", false),
        ("64:ff9b::1:c000:201", false),
        ("65:ff9b::192.0.2.1", false),
        ("64:ff9a::192.0.2.1", false),
        ("::192.0.2.1", false),
    ] {
        assert_eq!(PeerIp::new().key(ip(address)) == Key::from(ip("192.0.2.1")), maps_to_ipv4, "{address}");
    }
}

/// Trust depends on the IPv6 address, because a translator could embed any IPv4 address.
#[tokio::test]
async fn nat64_address_of_a_trusted_network_is_not_trusted() {
    let behind = ClientIp::behind(["192.0.2.0/24"]).unwrap();
    let request = |client: &str| {
        let peer = SocketAddr::new(ip(MALLORY), 40_000);
        Request::get("/").extension(peer).header("x-forwarded-for", client).body(()).unwrap()
    };
    assert_eq!(statuses(behind, request).await, [200, 429, 429]);
}
