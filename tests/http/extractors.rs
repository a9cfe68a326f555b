//! Key extractors, and the responses to missing keys.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::MockConnectInfo;
use axum::routing::get as on_get;
use common::{Inner, ask, get, numbers, policy, remaining, retry_after, status, with};
use http::{HeaderValue, Request};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::{Extension, Head, KeyError, MatchedPath, Method, Path, key_by};
use tower_ratelimit::{ClientIp, Global, Header, Key, KeyExtractor, PeerIp, RateLimit, RateLimitLayer};

/// Extracts a key that must exist.
fn key(extractor: &impl KeyExtractor, request: &Request<()>) -> Key {
    extractor.extract(&Head::from_request(request)).unwrap().unwrap()
}

/// A request with the peer's address as a plain extension, as without axum.
fn from(peer: &str) -> Request<()> {
    let mut request = get("/");
    request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
    request
}

fn once(extractor: impl KeyExtractor) -> RateLimit<Inner> {
    RateLimitLayer::new(policy("1/day"), extractor).layer(Inner::default())
}

fn missing_by_client(_: &Head<'_>) -> Result<Key, KeyError> {
    Err(KeyError::client("the field"))
}

fn missing_by_server(_: &Head<'_>) -> Result<Key, KeyError> {
    Err(KeyError::server("the table"))
}

fn not_limited(_: &Head<'_>) -> Option<Key> {
    None
}

fn alice(_: &Head<'_>) -> Key {
    Key::from("alice")
}

#[tokio::test]
async fn peer_key_ignores_the_port() {
    let service = once(PeerIp::new());
    for (peer, expected) in
        [("1.2.3.4:1", 200), ("1.2.3.4:2", 429), ("1.2.3.5:1", 200), ("[2001:db8::1]:1", 200), ("[2001:db8::1]:2", 429)]
    {
        assert_eq!(status(&service, from(peer)).await, expected, "{peer}");
    }
}

#[test]
fn connect_info_and_a_plain_address_give_the_same_key() {
    let peer: SocketAddr = "1.2.3.4:5".parse().unwrap();
    let by_axum = Request::get("/").extension(ConnectInfo(peer)).body(()).unwrap();
    assert_eq!(key(&PeerIp::new(), &by_axum), key(&PeerIp::new(), &from("1.2.3.4:5")));
}

/// Guards against this defect: 200 addresses of one /64 all pass.
#[tokio::test]
async fn addresses_of_one_ipv6_network_are_one_client() {
    let service = once(PeerIp::new());
    let mut admitted = 0;
    for host in 1..=200 {
        admitted += u32::from(status(&service, from(&format!("[2001:db8:1:2:{host:x}::{host:x}]:443"))).await == 200);
    }
    assert_eq!(admitted, 1);
    assert_eq!(status(&service, from("[2001:db8:1:3::1]:443")).await, 200, "the next /64 is another client");
}

#[test]
fn key_method_returns_the_key_of_requests_from_the_address() {
    for address in ["1.2.3.4", "::ffff:1.2.3.4", "2001:db8:1:2:3:4:5:6", "::1"] {
        let socket = SocketAddr::new(address.parse().unwrap(), 1).to_string();
        for bits in [0, 48, 64, 128] {
            let peer = PeerIp::new().ipv6_prefix(bits);
            let client = ClientIp::behind(["10.0.0.0/8"]).unwrap().ipv6_prefix(bits);
            let expected = key(&peer, &from(&socket));
            assert_eq!(peer.key(address.parse().unwrap()), expected, "{address}/{bits}");
            assert_eq!(
                (client.key(address.parse().unwrap()), key(&client, &from(&socket))),
                (expected.clone(), expected)
            );
        }
    }
}

#[test]
fn ipv6_prefix_is_configurable() {
    let same = |bits: u8, other: &str| {
        let peer = PeerIp::new().ipv6_prefix(bits);
        key(&peer, &from("[2001:db8:1:200::1]:1")) == key(&peer, &from(&format!("[{other}]:1")))
    };
    assert!(same(128, "2001:db8:1:200::1") && !same(128, "2001:db8:1:200::2"));
    assert!(same(127, "2001:db8:1:200::") && !same(127, "2001:db8:1:200::2"));
    assert!(same(56, "2001:db8:1:2ff::9") && !same(56, "2001:db8:1:300::1"));
    assert!(same(48, "2001:db8:1:ffff::9") && !same(48, "2001:db8:2:200::1"));
    assert!(same(0, "fe80::1"));
    assert!(std::panic::catch_unwind(|| PeerIp::new().ipv6_prefix(129)).is_err());
    let sites = PeerIp::new().ipv6_prefix(0);
    assert_ne!(key(&sites, &from("1.2.3.4:1")), key(&sites, &from("1.2.3.5:1")), "the prefix does not apply to IPv4");
}

/// Guards against this defect: all IPv4-mapped IPv6 addresses share one key
/// (CVE-2026-30827).
#[tokio::test]
async fn ipv4_mapped_clients_are_separate_clients() {
    let service = once(PeerIp::new());
    for (peer, expected) in [
        ("[::ffff:1.2.3.4]:1", 200),
        ("[::ffff:1.2.3.5]:1", 200),
        ("[::ffff:1.2.3.4]:2", 429),
        ("1.2.3.4:3", 429),
        ("1.2.3.5:3", 429),
    ] {
        assert_eq!(status(&service, from(peer)).await, expected, "{peer}");
    }
}

/// Guards against this defect: the notation of an address selects its key, so the client can choose
/// one.
#[test]
fn mapped_addresses_are_detected_by_their_bits() {
    let peer = PeerIp::new();
    let [mapped, hex, plain] =
        ["[::ffff:1.2.3.4]:1", "[::ffff:102:304]:1", "1.2.3.4:1"].map(|text| key(&peer, &from(text)));
    assert!(mapped == plain && hex == plain);
    let [dotted, sibling] = ["[2001:db8::1.2.3.4]:1", "[2001:db8::9]:1"].map(|text| key(&peer, &from(text)));
    assert!(dotted == sibling && dotted != plain, "an IPv6 address with dots is IPv6");
    assert_ne!(key(&peer, &from("[::1.2.3.4]:1")), plain, "an IPv4-compatible address is not mapped");
    assert_ne!(key(&peer.nat64(false), &from("[64:ff9b::1.2.3.4]:1")), plain, "a NAT64 address is not mapped");
}

/// Guards against this defect: the leftmost `X-Forwarded-For` entry is trusted. Rotating it passed
/// 1,000 of 1,000 requests.
#[tokio::test]
async fn peer_ip_ignores_forwarding_headers() {
    let service = once(PeerIp::new());
    let mut admitted = 0;
    for spoofed in 0..1_000_u32 {
        let mut request = from("1.2.3.4:1");
        for name in ["x-forwarded-for", "x-real-ip", "forwarded", "cf-connecting-ip"] {
            let value = format!("10.0.{}.{}", spoofed / 250, spoofed % 250);
            request.headers_mut().insert(name, HeaderValue::from_str(&value).unwrap());
        }
        admitted += u32::from(status(&service, request).await == 200);
    }
    assert_eq!(admitted, 1);
}

/// The body contains the reason of a 400. It contains that of a 500 in builds with debug
/// assertions.
#[tokio::test]
async fn missing_keys_are_400_or_500_with_the_reason() {
    async fn check(extractor: impl KeyExtractor, expected: u16, reason: &str) {
        let service = once(extractor);
        let response = ask(&service, get("/")).await;
        assert_eq!(response.status(), expected);
        assert_eq!((numbers(&response), retry_after(&response)), (None, None));
        let is_shown = expected == 400 || cfg!(debug_assertions);
        assert_eq!(response.body().contains(reason), is_shown, "{}", response.body());
        assert_eq!(service.get_ref().calls(), 0);
    }
    check(PeerIp::new(), 500, "into_make_service_with_connect_info").await;
    check(Header::new("x-api-key"), 400, "x-api-key").await;
    check(missing_by_client, 400, "the field").await;
    check(missing_by_server, 500, "the table").await;
}

/// On a Unix socket the peer has no address. The error names extractors that work there.
#[tokio::test]
async fn missing_peer_error_names_alternatives() {
    let missing = PeerIp::new().extract(&Head::from_request(&get("/"))).unwrap_err();
    assert!(!missing.is_clients_fault());
    for way in
        ["into_make_service_with_connect_info::<SocketAddr>()", "insert a SocketAddr", "ClientIp::behind_hops(1)"]
    {
        assert!(missing.reason().contains(way), "{way}: {missing}");
    }
    let service = once(ClientIp::behind_hops(1));
    for (client, expected) in [("1.2.3.4", 200), ("1.2.3.4", 429), ("1.2.3.5", 200)] {
        assert_eq!(status(&service, with("x-forwarded-for", client)).await, expected, "{client}");
    }
}

#[tokio::test]
async fn peer_ip_reads_the_address_of_mock_connect_info() {
    let app = Router::new()
        .route("/", on_get(|| async {}))
        .layer(RateLimitLayer::new(policy("1/day"), PeerIp::new()))
        .layer(MockConnectInfo(SocketAddr::from(([1, 2, 3, 4], 5))));
    let request = || Request::get("/").body(Body::empty()).unwrap();
    assert_eq!(status(&app, request()).await, 200);
    assert_eq!(status(&app, request()).await, 429);
    let real: SocketAddr = "5.6.7.8:9".parse().unwrap();
    let real = Request::get("/").extension(ConnectInfo(real)).body(Body::empty()).unwrap();
    assert_eq!(status(&app, real).await, 200, "the real address comes first");
}

/// axum's `nest` removes the prefix from the request. Costs, skips and keys still see it.
#[tokio::test]
async fn layers_in_nested_routers_see_the_whole_path() {
    let limited = || {
        let layer = RateLimitLayer::new(policy("fixed-window 10/day"), Path::new());
        layer
            .cost(|head| if head.uri().path() == "/a/dear" { 7 } else { 1 })
            .skip(|head| head.uri().path() == "/b/free" && head.routed_uri().path() == "/free")
    };
    let routes = || Router::new().route("/{*rest}", on_get(|| async {}));
    let inner = routes().layer(limited());
    let app = Router::new().nest("/a", inner.clone()).nest("/b", Router::new().nest("/c", inner.clone()).merge(inner));
    for (path, left) in [
        ("/a/x", Some(9)),
        ("/b/x", Some(9)),
        ("/b/c/x", Some(9)),
        ("/a/x", Some(8)),
        ("/a/dear", Some(3)),
        ("/b/dear", Some(9)),
        ("/b/free", None),
        ("/a/free", Some(9)),
    ] {
        let response = ask(&app, Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!((response.status().as_u16(), remaining(&response)), (200, left), "{path}");
    }
}

#[tokio::test]
async fn missing_extension_is_rejected_with_500() {
    #[derive(Clone)]
    struct User(&'static str);
    let by_user = || Extension::new(|user: &User| (user.0 != "admin").then(|| Key::from(user.0)));
    let with_user = |name| {
        let mut request = get("/");
        request.extensions_mut().insert(User(name));
        request
    };
    let service = once(by_user());
    for (request, expected) in [
        (with_user("alice"), 200),
        (with_user("alice"), 429),
        (with_user("bob"), 200),
        (with_user("admin"), 200),
        (with_user("admin"), 200),
        (get("/"), 500),
    ] {
        assert_eq!(status(&service, request).await, expected);
    }
    let missing = by_user().extract(&Head::from_request(&get("/"))).unwrap_err();
    assert!(missing.reason().contains("User: add the layer that inserts it outside"), "{missing}");
    assert_eq!(status(&once(by_user().or(Global::new())), get("/")).await, 200);
}

#[tokio::test]
async fn key_by_infers_the_types_of_a_closure() {
    let service = once(key_by(|head| head.headers.get("x-client").map(|value| Key::from(value.as_bytes()))));
    for (request, expected) in [(with("x-client", "a"), 200), (with("x-client", "a"), 429), (get("/"), 200)] {
        assert_eq!(status(&service, request).await, expected);
    }
}

/// Guards against this defect: a header reader that splits on `:` refuses every IPv6 value.
#[test]
fn header_value_is_used_unchanged() {
    let header = Header::new("X-Client");
    let all = ["a", "A", "2001:db8::1", "2001:db8::2", "a,b", "a, b", "1.2.3.4:80"];
    let keys = HashSet::from(all.map(|value| key(&header, &with("x-client", value))));
    assert_eq!(keys.len(), all.len());

    let mut bytes = get("/");
    bytes.headers_mut().append("x-client", HeaderValue::from_bytes(b"\xff\xfe").unwrap());
    bytes.headers_mut().append("x-client", HeaderValue::from_static("a"));
    assert_ne!(
        key(&header, &bytes),
        key(&header, &with("x-client", "a")),
        "the first field is used, even if it is not text"
    );
    assert_eq!(key(&header, &with("x-client", "2001:db8::1")), Key::from("2001:db8::1"));
}

#[test]
fn global_is_one_key_and_each_path_and_method_has_its_own_key() {
    let post = Request::post("/a?x=1").body(()).unwrap();
    assert_eq!(key(&Global::new(), &post), key(&Global::new(), &get("/b")));
    assert_eq!(key(&Path::new(), &post), key(&Path::new(), &get("/a?x=2")), "the path does not include the query");
    assert_ne!(key(&Path::new(), &get("/users/7")), key(&Path::new(), &get("/users/8")));
    for (one, other) in [("/a%2Fb", "/a/b"), ("/a//b", "/a/b")] {
        assert_ne!(key(&Path::new(), &get(one)), key(&Path::new(), &get(other)), "neither decoded nor normalized");
    }
    assert_ne!(key(&Method::new(), &post), key(&Method::new(), &get("/a")));
    assert_eq!(key(&Method::new(), &get("/a")), key(&Method::new(), &get("/b")));
}

#[tokio::test]
async fn route_is_one_key_and_unrouted_requests_share_another() {
    let app = Router::new()
        .route("/", on_get(|| async { "home" }))
        .route("/users/{id}", on_get(|| async { "user" }))
        .nest("/api", Router::new().route("/users/{id}", on_get(|| async { "api" })))
        .fallback(|| async { "nothing here" })
        .layer(RateLimitLayer::new(policy("2/day"), MatchedPath::new()));
    for (path, expected) in [
        ("/users/7", Some(1)),
        ("/users/8", Some(0)),
        ("/api/users/7", Some(1)),
        ("/", Some(1)),
        ("/nowhere", Some(1)),
        ("/else", Some(0)),
        ("/", Some(0)),
    ] {
        let response = ask(&app, Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!((response.status().as_u16(), remaining(&response)), (200, expected), "{path}");
    }
    for path in ["/users/9", "/third", "/"] {
        assert_eq!(status(&app, Request::get(path).body(Body::empty()).unwrap()).await, 429, "{path}");
    }
}

#[tokio::test]
async fn key_closures_may_return_a_key_an_option_or_a_result() {
    let maybe = |head: &Head<'_>| head.headers.get("x-key").map(|value| Key::from(value.as_bytes()));
    let or_free = |head: &Head<'_>| match head.uri().path() {
        "/free" => Ok(None),
        "/missing" => Err(KeyError::client("path")),
        path => Ok(Some(Key::from(path))),
    };
    let service = once(alice);
    assert_eq!([status(&service, get("/a")).await, status(&service, get("/b")).await], [200, 429]);

    let service = once(maybe);
    assert_eq!([status(&service, with("x-key", "a")).await, status(&service, with("x-key", "a")).await], [200, 429]);
    for _ in 0..3 {
        let response = ask(&service, get("/")).await;
        assert_eq!((response.status().as_u16(), response.headers().len()), (200, 0), "not limited, so no fields");
    }

    let service = once(or_free);
    for (path, expected) in [("/a", 200), ("/a", 429), ("/b", 200), ("/free", 200), ("/free", 200), ("/missing", 400)] {
        assert_eq!(status(&service, get(path)).await, expected, "{path}");
    }
}

#[test]
fn or_uses_the_second_extractor_only_if_the_first_returns_an_error() {
    let never = |_: &Head<'_>| -> Option<Key> { panic!("called without need") };
    let request = get("/");
    let head = Head::from_request(&request);
    assert_eq!(alice.or(never).extract(&head), Ok(Some(Key::from("alice"))));
    assert_eq!(not_limited.or(never).extract(&head), Ok(None), "`None` does not fall back");
    assert_eq!(missing_by_client.or(alice).extract(&head), Ok(Some(Key::from("alice"))));
    assert_eq!(missing_by_server.or(not_limited).extract(&head), Ok(None));
    assert_eq!(missing_by_client.or(missing_by_server).or(alice).extract(&head), Ok(Some(Key::from("alice"))));
    assert!(missing_by_client.or(missing_by_server).extract(&head).is_err());
}

#[test]
fn and_returns_an_error_even_if_the_other_extractor_returns_none() {
    let request = get("/");
    let head = Head::from_request(&request);
    let client = Err(KeyError::client("the field"));
    assert_eq!(missing_by_client.and(alice).extract(&head), client);
    assert_eq!(alice.and(missing_by_client).extract(&head), client);
    assert_eq!(missing_by_client.and(not_limited).extract(&head), client);
    assert_eq!(not_limited.and(missing_by_client).extract(&head), client, "an error takes precedence over `None`");
    assert_eq!(not_limited.and(alice).extract(&head), Ok(None));
    assert_eq!(alice.and(not_limited).extract(&head), Ok(None));
    assert!(alice.and(alice).extract(&head).unwrap().is_some());
}

/// Guards against this defect: different composite keys are equal after joining with a separator.
#[test]
fn parts_of_a_composite_key_stay_separate() {
    let [a, b, c] = ["x-a", "x-b", "x-c"].map(Header::new);
    let pair = a.clone().and(b.clone());
    let left = pair.clone().and(c.clone());
    let right = a.and(b.and(c));
    // Separators, lengths, and text that looks like a joined key.
    let texts = ["a|bca|bca|bc", "1:a1:b1:a1:b", "\t\t\t\t\t\t\t\t", "aaaaaaaa"];
    for text in texts {
        let mut lefts = HashSet::new();
        let mut rights = HashSet::new();
        let mut pairs = HashSet::new();
        let mut splits = 0;
        for i in 0..=text.len() {
            pairs.insert(key(&pair, &parts([&text[..i], &text[i..], ""])));
            for j in i..=text.len() {
                let request = parts([&text[..i], &text[i..j], &text[j..]]);
                lefts.insert(key(&left, &request));
                rights.insert(key(&right, &request));
                splits += 1;
            }
        }
        assert_eq!((pairs.len(), lefts.len(), rights.len()), (text.len() + 1, splits, splits), "{text}");
    }
}

fn parts([a, b, c]: [&str; 3]) -> Request<()> {
    Request::get("/").header("x-a", a).header("x-b", b).header("x-c", c).body(()).unwrap()
}

#[tokio::test]
async fn composite_key_counts_each_pair_separately() {
    let service = once(Header::new("x-client").and(Path::new()));
    let request = |client: &str, path: &str| Request::get(path).header("x-client", client).body(()).unwrap();
    for (client, path, expected) in
        [("a", "/b", 200), ("a", "/c", 200), ("b", "/b", 200), ("a", "/b", 429), ("/b", "/a", 200), ("/a", "/b", 200)]
    {
        assert_eq!(status(&service, request(client, path)).await, expected, "{client} {path}");
    }
    assert_ne!(
        key(&Header::new("x-client").and(Path::new()), &request("/a", "/b")),
        key(&Path::new().and(Header::new("x-client")), &request("/a", "/b"))
    );
}

#[tokio::test]
async fn extractor_may_be_chosen_at_run_time() {
    for (boxed, expected) in [(Box::new(Global::new()) as Box<dyn KeyExtractor>, 429), (Box::new(Path::new()), 200)] {
        let service = once(boxed);
        assert_eq!([status(&service, get("/a")).await, status(&service, get("/b")).await], [200, expected]);
    }
    let shared: Arc<dyn KeyExtractor> = Arc::new(Path::new());
    let inner =
        service_fn(|_: Request<()>| async { Ok::<_, std::convert::Infallible>(http::Response::new(String::new())) });
    let service = RateLimitLayer::new(policy("1/day"), shared).layer(inner);
    assert_eq!([status(&service, get("/a")).await, status(&service, get("/a")).await], [200, 429]);
}
