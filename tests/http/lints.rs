//! Lints: valid settings that are probably mistakes.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use common::{Inner, ask, get, policy, status, with};
use http::{HeaderName, Request};
use tower::Layer;
use tower_ratelimit::extract::AllowList;
use tower_ratelimit::{
    ClientIp, Event, Global, Header, KeyExtractor, Lint, MemoryStorage, OnError, PeerIp, RateLimitLayer, policy_by,
};

fn by_client(text: &str) -> RateLimitLayer {
    RateLimitLayer::new(policy(text), Header::new("x-client"))
}

/// Keeps the lints that are reported to it.
#[derive(Clone, Default)]
struct LintObserver(Arc<Mutex<Vec<Lint>>>);

impl LintObserver {
    /// Returns a closure that keeps lints.
    fn keep(&self) -> impl Fn(Lint) + Send + Sync + 'static {
        let lints = Arc::clone(&self.0);
        move |lint| lints.lock().unwrap().push(lint)
    }

    fn layer(&self, key: impl KeyExtractor) -> RateLimitLayer {
        RateLimitLayer::new(policy("5/day"), key).on_lint(self.keep())
    }

    fn take(&self) -> Vec<Lint> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

pub(crate) fn forwarded(name: &str) -> Request<()> {
    let mut request = with(name, "203.0.113.7");
    request.extensions_mut().insert(SocketAddr::from(([10, 0, 0, 1], 80)));
    request
}

#[tokio::test]
async fn ipv6_prefix_lint_is_reported_once() {
    let linted = LintObserver::default();
    for (prefix, expected) in
        [(48, vec![]), (64, vec![]), (65, vec![Lint::Ipv6PerAddress]), (128, vec![Lint::Ipv6PerAddress])]
    {
        let layer = linted.layer(Header::new("x-client").or(Global::new().and(PeerIp::new().ipv6_prefix(prefix))));
        for _ in 0..3 {
            let _ = layer.clone().layer(Inner::default());
        }
        assert_eq!(linted.take(), expected, "/{prefix}");
    }
}

#[tokio::test]
async fn trusts_every_address_lint_is_reported_once() {
    for (trusted, expected) in [
        (&["10.0.0.0/8"][..], vec![]),
        (&["0.0.0.0/0"], vec![Lint::TrustsEveryAddress]),
        (&["10.0.0.0/8", "::/0"], vec![Lint::TrustsEveryAddress]),
        (&["0.0.0.0/1", "128.0.0.0/1"], vec![Lint::TrustsEveryAddress]),
    ] {
        let linted = LintObserver::default();
        let layer = linted.layer(ClientIp::behind(trusted).unwrap().and(Global::new()));
        for _ in 0..3 {
            ask(&layer.layer(Inner::default()), forwarded("x-forwarded-for")).await;
        }
        assert_eq!(linted.take(), expected, "{trusted:?}");
    }
    let linted = LintObserver::default();
    let _ = linted.layer(ClientIp::behind_hops(1).ipv6_prefix(128)).layer(Inner::default());
    assert_eq!(linted.take(), [Lint::Ipv6PerAddress]);
}

#[tokio::test]
async fn forwarded_peer_lint_is_reported_once() {
    for name in ["x-forwarded-for", "forwarded", "x-real-ip", "cf-connecting-ip"] {
        let linted = LintObserver::default();
        let service = linted.layer(PeerIp::new()).layer(Inner::default());
        let mut direct = get("/");
        direct.extensions_mut().insert(SocketAddr::from(([10, 0, 0, 1], 80)));
        ask(&service, direct).await;
        assert_eq!(linted.take(), []);
        for _ in 0..3 {
            ask(&service, forwarded(name)).await;
        }
        assert_eq!(linted.take(), [Lint::ForwardedPeer], "{name}");
        let other = linted.layer(Header::new(name)).layer(Inner::default());
        ask(&other, forwarded(name)).await;
        assert_eq!(linted.take(), [], "{name} is the key");
    }
}

#[tokio::test]
async fn same_layer_twice_lint_is_reported_once() {
    let linted = LintObserver::default();
    let layer = linted.layer(Global::new());
    let twice = layer.layer(layer.clone().layer(Inner::default()));
    for _ in 0..2 {
        ask(&twice, get("/")).await;
    }
    assert_eq!(linted.take(), [Lint::SameLayerTwice]);

    let [outer, inner] = [linted.layer(Global::new()), linted.layer(Global::new())];
    let stacked = outer.layer(inner.layer(Inner::default()));
    for _ in 0..2 {
        ask(&stacked, get("/")).await;
    }
    assert_eq!(linted.take(), [], "two layers may charge the same request");
}

#[tokio::test]
async fn lints_are_reported_once_and_only_if_they_apply() {
    let linted = LintObserver::default();
    let all = ClientIp::behind(["0.0.0.0/0"]).unwrap().ipv6_prefix(128);
    let _ = linted.layer(all.clone().or(PeerIp::new().ipv6_prefix(128))).layer(Inner::default());
    assert_eq!(linted.take(), [Lint::Ipv6PerAddress, Lint::TrustsEveryAddress], "each is reported once");

    let _ = linted.layer(Global::new()).allow_list(AllowList::new(all).allow("10.0.0.0/8")).layer(Inner::default());
    assert_eq!(linted.take(), [Lint::TrustsEveryAddress], "a forged address may also match the allow list");

    for key in [
        Box::new(ClientIp::behind(["10.0.0.0/8"]).unwrap().or(PeerIp::new())) as Box<dyn KeyExtractor>,
        Box::new(Header::new("x-forwarded-for").or(PeerIp::new())),
    ] {
        ask(&linted.layer(key).layer(Inner::default()), forwarded("x-forwarded-for")).await;
        assert_eq!(linted.take(), [], "`ClientIp` reads the header");
    }
    ask(&linted.layer(Header::new("x-api-key").or(PeerIp::new())).layer(Inner::default()), forwarded("forwarded"))
        .await;
    assert_eq!(linted.take(), [Lint::ForwardedPeer], "`PeerIp` is the fallback of a missing key");

    let skipping = linted.layer(PeerIp::new()).skip(|_| true);
    let twice = skipping.layer(skipping.layer(Inner::default()));
    ask(&twice, forwarded("forwarded")).await;
    assert_eq!(linted.take(), [], "an unlimited request is not charged");
}

/// Guards against this defect: a proxy sends another field than the configured one.
#[tokio::test]
async fn forwarding_field_missing_lint_is_reported_once() {
    let linted = LintObserver::default();
    let from = |peer: &str, name: Option<&str>| {
        let mut request = get("/");
        request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
        if let Some(name) = name {
            request.headers_mut().insert(HeaderName::try_from(name).unwrap(), "1.2.3.4".parse().unwrap());
        }
        request
    };
    let missing = |found| Lint::ForwardingFieldMissing { found };
    for (peer, name, expected) in [
        ("10.0.0.1:80", None, vec![missing(None)]),
        ("10.0.0.1:80", Some("x-real-ip"), vec![missing(Some("x-real-ip"))]),
        ("10.0.0.1:80", Some("forwarded"), vec![missing(Some("forwarded"))]),
        ("10.0.0.1:80", Some("x-forwarded-for"), vec![]),
        ("5.6.7.8:80", Some("x-real-ip"), vec![]),
    ] {
        let layer = linted.layer(ClientIp::behind(["10.0.0.0/8"]).unwrap().or(Global::new()));
        let service = layer.layer(Inner::default());
        for _ in 0..2 {
            ask(&service, from(peer, name)).await;
        }
        assert_eq!(linted.take(), expected, "{peer} {name:?}");
    }
    let lint = missing(Some("x-real-ip"));
    assert!(lint.to_string().contains("it sent \"x-real-ip\""), "{lint}");
}

#[tokio::test]
async fn elastic_window_refunded_lint_is_reported_once() {
    let linted = LintObserver::default();
    let charged = |layer: RateLimitLayer| layer.on_lint(linted.keep()).charge_when(|_| true);
    let elastic = || policy("10/second; elastic-window 5/minute");
    let _ = charged(RateLimitLayer::new(elastic(), Global::new())).layer(Inner::default());
    assert_eq!(linted.take(), [Lint::ElasticWindowRefunded], "before the first request");

    let chosen = charged(RateLimitLayer::new(policy_by(move |_| elastic()), Global::new())).layer(Inner::default());
    assert_eq!(linted.take(), [], "the policy is not known yet");
    for _ in 0..2 {
        ask(&chosen, get("/")).await;
    }
    assert_eq!(linted.take(), [Lint::ElasticWindowRefunded]);

    let _ = charged(RateLimitLayer::new(policy("moving-window 5/minute"), Global::new())).layer(Inner::default());
    let _ = RateLimitLayer::new(policy("elastic-window 5/minute"), Global::new())
        .on_lint(linted.keep())
        .layer(Inner::default());
    assert_eq!(linted.take(), []);
}

#[tokio::test]
async fn small_storage_lint_is_reported_once_with_the_number_of_clients() {
    for (text, max_bytes, clients) in [
        ("moving-window 10000/day", 128_000_000, Some(900..1_100)),
        ("moving-window 10000/day", 2_000_000_000, None),
        ("fixed-window 10000/day", 128_000_000, None),
        ("fixed-window 10000/day", 80_000, Some(2_000..2_001)),
    ] {
        let storage = MemoryStorage::builder().max_bytes(max_bytes).build().unwrap();
        let linted = LintObserver::default();
        let with_storage = RateLimitLayer::new(policy(text), Global::new()).storage(storage.clone(), OnError::Refuse);
        let set_later = RateLimitLayer::new(policy(text), Global::new()).storage(storage, OnError::Refuse);
        for layer in [with_storage, set_later] {
            let layer = layer.on_lint(linted.keep());
            for _ in 0..2 {
                let _ = layer.clone().layer(Inner::default());
            }
            match (&linted.take()[..], &clients) {
                ([], None) => {}
                ([Lint::SmallStorage { clients: reported }], Some(clients)) => {
                    assert!(clients.contains(reported), "{text}: {reported}");
                }
                (lints, _) => panic!("{text} on {max_bytes} bytes: {lints:?}"),
            }
        }
    }
    let lint = Lint::SmallStorage { clients: 980 };
    assert_eq!((lint.code(), lint.to_string().starts_with("980 clients")), ("RL007", true));
    assert!(lint.docs().ends_with("#variant.SmallStorage"));
}

#[tokio::test]
async fn aligned_calendar_lint_is_reported_once() {
    for (text, is_reported) in [
        ("fixed-window-aligned 10/week", true),
        ("fixed-window-aligned 10/month", true),
        ("10/second; sliding-window-counter-aligned 10/2 weeks", true),
        ("fixed-window-aligned 10/year", true),
        ("fixed-window-aligned 10/day", false),
        ("fixed-window-aligned 10/3 days", false),
        ("calendar 10/month", false),
        ("fixed-window 10/week", false),
        ("sliding-window-counter 10/month", false),
    ] {
        let linted = LintObserver::default();
        let expected = if is_reported { vec![Lint::AlignedCalendar] } else { vec![] };
        let fixed = RateLimitLayer::new(policy(text), Global::new()).on_lint(linted.keep());
        for _ in 0..2 {
            let _ = fixed.clone().layer(Inner::default());
        }
        assert_eq!(linted.take(), expected, "{text}: before the first request");
        let chosen = RateLimitLayer::new(policy_by(move |_| policy(text)), Global::new()).on_lint(linted.keep());
        for _ in 0..2 {
            ask(&chosen.layer(Inner::default()), get("/")).await;
        }
        assert_eq!(linted.take(), expected, "{text}: chosen for each request");
    }
}

#[tokio::test]
async fn lockout_by_header_lint_is_reported_once() {
    let account = || Header::new("x-account");
    let cases: [(&str, Box<dyn KeyExtractor>, bool); 8] = [
        ("lockout 5/10m for 15m", Box::new(account()), true),
        ("10/s; lockout 100 refusals/m for 1h", Box::new(account()), true),
        ("lockout 5/10m for 15m", Box::new(account().or(PeerIp::new())), true),
        ("lockout 5/10m for 15m", Box::new(account().and(Header::new("x-device"))), true),
        ("lockout 5/10m for 15m", Box::new(account().and(PeerIp::new())), false),
        ("lockout 5/10m for 15m", Box::new(PeerIp::new()), false),
        ("lockout 5/10m for 15m", Box::new(Header::new("x-real-ip")), false),
        ("moving-window 5/10m", Box::new(account()), false),
    ];
    for (text, key, is_reported) in cases {
        let linted = LintObserver::default();
        let expected = if is_reported { vec![Lint::LockoutByHeader] } else { vec![] };
        let key: Arc<dyn KeyExtractor> = key.into();
        let fixed = RateLimitLayer::new(policy(text), Arc::clone(&key)).on_lint(linted.keep());
        for _ in 0..2 {
            let _ = fixed.clone().layer(Inner::default());
        }
        assert_eq!(linted.take(), expected, "{text}: before the first request");
        let chosen = RateLimitLayer::new(policy_by(move |_| policy(text)), key).on_lint(linted.keep());
        for _ in 0..2 {
            let mut request = with("x-account", "alice");
            request.headers_mut().insert("x-device", "phone".parse().unwrap());
            ask(&chosen.layer(Inner::default()), request).await;
        }
        assert_eq!(linted.take(), expected, "{text}: chosen for each request");
    }
}

/// The policies of all keys are inspected, each with its own key.
#[tokio::test]
async fn lints_of_each_key_are_reported() {
    let linted = LintObserver::default();
    let fixed = || RateLimitLayer::new(policy("10/s").with_name("all"), Global::new());
    let request = || with("x-account", "alice");
    let lockout = |_: &tower_ratelimit::extract::Head<'_>| policy("lockout 5/10m for 15m").with_name("account");
    let chosen = fixed().and(policy_by(lockout), Header::new("x-account")).on_lint(linted.keep());
    assert_eq!(status(&chosen.layer(Inner::default()), request()).await, 200);
    assert_eq!(linted.take(), [Lint::LockoutByHeader]);
    let by_address = RateLimitLayer::new(policy("lockout 5/10m for 15m").with_name("address"), PeerIp::new())
        .and(policy("10/s").with_name("account"), Header::new("x-account"))
        .on_lint(linted.keep());
    let _ = by_address.layer(Inner::default());
    assert_eq!(linted.take(), []);
}

/// The outer key is a part of each key.
#[tokio::test]
async fn lints_of_the_outer_key_are_reported_once() {
    let linted = LintObserver::default();
    let layer = linted.layer(Header::new("x-client")).within(PeerIp::new().ipv6_prefix(128));
    for _ in 0..2 {
        let _ = layer.clone().layer(Inner::default());
    }
    assert_eq!(linted.take(), [Lint::Ipv6PerAddress], "before the first request");
    let request = || {
        let mut request = forwarded("x-forwarded-for");
        request.headers_mut().insert("x-client", "a".parse().unwrap());
        request
    };
    let service = linted.layer(Header::new("x-client")).within(PeerIp::new()).layer(Inner::default());
    for _ in 0..2 {
        assert_eq!(status(&service, request()).await, 200);
    }
    assert_eq!(linted.take(), [Lint::ForwardedPeer]);
    let client = ClientIp::behind(["10.0.0.0/8"]).unwrap();
    let service = linted.layer(PeerIp::new()).within(client).layer(Inner::default());
    assert_eq!(status(&service, request()).await, 200);
    assert_eq!(linted.take(), [], "the outer key reads the field");
    let lockout = || {
        let account = Header::new("x-account");
        RateLimitLayer::new(policy("lockout 5/10m for 15m"), account).on_lint(linted.keep())
    };
    let _ = lockout().within(PeerIp::new()).layer(Inner::default());
    assert_eq!(linted.take(), [], "an account of one address");
    let _ = lockout().within(Header::new("x-tenant")).layer(Inner::default());
    assert_eq!(linted.take(), [Lint::LockoutByHeader]);
}

#[tokio::test]
async fn layers_can_share_an_observer_as_a_trait_object() {
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&outcomes);
    let observer: Arc<dyn Fn(&Event<'_>) + Send + Sync> =
        Arc::new(move |event| kept.lock().unwrap().push(event.policy.to_string()));
    let [one, two] = ["1/day", "2/day"].map(|text| {
        let observer = Arc::clone(&observer);
        by_client(text).observer(move |event| observer(event)).skip(|_| false)
    });
    let service = one.layer(two.layer(Inner::default()));
    assert_eq!(status(&service, with("x-client", "a")).await, 200);
    assert_eq!(*outcomes.lock().unwrap(), ["1/day", "2/day"].map(|text| policy(text).to_string()));
}
