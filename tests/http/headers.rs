//! The exact header fields, and the values that a client parses from them.

use std::panic::catch_unwind;
use std::time::Duration;

use common::{Inner, T0, ask, get, memory_with_manual_clock, numbers, policy, retry_after, status};
use http::{HeaderMap, Response};
use proptest::prelude::*;
use sfv::{BareItem, List, ListEntry, Parser};
use tower::{Layer, ServiceExt};
use tower_ratelimit::storage::{Clock, ManualClock, TokioClock};
use tower_ratelimit::strategy::Strategy;
use tower_ratelimit::{
    Decision, FixedWindow, Global, Headers, Limit, MemoryStorage, MovingWindow, OnError, Policy, Quota, RateLimit,
    RateLimitLayer, Timestamp,
};

fn layer(policy: Policy, storage: &MemoryStorage, headers: Headers) -> RateLimitLayer {
    RateLimitLayer::new(policy, Global::new()).storage(storage.clone(), OnError::Refuse).headers(headers)
}

fn limited(policy: Policy, headers: Headers) -> (RateLimit<Inner>, ManualClock) {
    let (storage, clock) = memory_with_manual_clock();
    (layer(policy, &storage, headers).layer(Inner::default()), clock)
}

/// All fields in the order of their names, one per line.
fn fields<B>(response: &Response<B>) -> String {
    let mut fields: Vec<String> =
        response.headers().iter().map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap())).collect();
    fields.sort();
    fields.concat()
}

fn free() -> Policy {
    Policy::named("free").limit(FixedWindow::new(), Quota::per_second(10))
}

fn free_and_daily() -> Policy {
    free().with(Limit::new(MovingWindow::new(), Quota::per_day(12)).named("daily"))
}

/// Guards against this defect: the reset is off by an hour after the wall clock was briefly an hour
/// ahead.
#[tokio::test]
async fn reset_is_in_wall_clock_time_for_any_storage_clock() {
    /// A clock that is an hour ahead of the wall clock.
    #[derive(Debug)]
    struct HourAhead;

    impl Clock for HourAhead {
        fn now(&self) -> Timestamp {
            Timestamp::from_micros((T0 + 3_600) * 1_000_000)
        }

        fn ahead_of_wall_clock(&self) -> u32 {
            3_600
        }
    }

    for shown in [Headers::x_rate_limit(), Headers::x_rate_limit().and(Headers::draft11())] {
        let storage = MemoryStorage::builder().clock(HourAhead).build().unwrap();
        let policy = Policy::new(FixedWindow::new(), Quota::per_minute(2));
        let service = layer(policy, &storage, shown).layer(Inner::default());
        for expected in [200, 200, 429, 429] {
            let response = ask(&service, get("/")).await;
            assert_eq!(response.status(), expected);
            assert_eq!(numbers(&response).unwrap()[2], T0 + 60, "{expected}");
        }
    }
}

#[tokio::test]
async fn ietf_fields_name_every_limit() {
    let (service, clock) = limited(free(), Headers::draft11());
    clock.advance(Duration::from_micros(1));
    assert_eq!(
        fields(&ask(&service, get("/")).await),
        "ratelimit-policy: \"free\";q=10;w=1\nratelimit: \"free\";r=9;t=1\n"
    );

    let (service, clock) = limited(free_and_daily(), Headers::draft11());
    ask(&service, get("/")).await;
    clock.advance(Duration::from_millis(999_999));
    assert_eq!(
        fields(&ask(&service, get("/")).await),
        "ratelimit-policy: \"free-1\";q=10;w=1, \"daily\";q=12;w=86400\n\
         ratelimit: \"free-1\";r=9;t=1, \"daily\";r=10;t=85401\n",
    );
}

#[tokio::test]
async fn window_in_ietf_fields_is_the_refill_time_of_the_capacity() {
    for (text, expected) in [
        ("fixed-window 3 per 1500ms", "q=3;w=2"),
        ("fixed-window 3/ms", "q=3;w=1"),
        ("token-bucket 10/second burst 50", "q=50;w=5"),
        ("token-bucket 10/second burst 51", "q=51;w=6"),
        ("leaky-bucket 10/second queue 20", "q=21;w=3"),
        ("sliding-window-counter 300/year", "q=300;w=31536000"),
        ("4294967295/year", "q=4294967295;w=31536000"),
        ("calendar 9/day", "q=9;w=86400"),
        ("calendar 9/month", "q=9;w=2678400"),
        // This October has an hour more in Berlin.
        ("calendar 9/month in Europe/Berlin", "q=9;w=2682000"),
    ] {
        let (service, _clock) = limited(policy(text).with_name("x"), Headers::draft11());
        let response = ask(&service, get("/")).await;
        assert_eq!(response.headers()["ratelimit-policy"], format!("\"x\";{expected}"), "{text}");
    }
}

#[tokio::test]
async fn reset_is_zero_for_a_full_quota() {
    let (storage, _clock) = memory_with_manual_clock();
    let layer = layer(free(), &storage, Headers::draft11().and(Headers::draft6())).cost(|_| 0);
    assert_eq!(
        fields(&ask(&layer.layer(Inner::default()), get("/")).await),
        "ratelimit-limit: 10\nratelimit-policy: \"free\";q=10;w=1\nratelimit-remaining: 10\n\
         ratelimit-reset: 0\nratelimit: \"free\";r=10;t=0\n",
    );
}

#[tokio::test]
async fn unnamed_policy_is_named_by_its_text() {
    let (service, _clock) = limited(Policy::from(Quota::per_minute(60).burst(5)), Headers::draft11());
    assert_eq!(ask(&service, get("/")).await.headers()["ratelimit"], "\"token-bucket 60/minute burst 5\";r=4;t=1",);
    let quoted = policy("fixed-window 10/second; \"a \\\"b\\\" \\\\\" fixed-window 10/minute");
    let (service, _clock) = limited(quoted, Headers::draft11());
    let response = ask(&service, get("/")).await;
    let names: Vec<_> = members(response.headers(), "ratelimit").into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[1], "a \"b\" \\");
    assert!(names[0].ends_with("-1"), "{names:?}");
}

#[tokio::test]
async fn refusal_lists_every_limit_and_forbids_caching() {
    let (service, clock) = limited(free_and_daily(), Headers::draft11());
    for _ in 0..2 {
        for _ in 0..6 {
            assert_eq!(status(&service, get("/")).await, 200);
        }
        clock.advance(Duration::from_secs(2));
    }
    assert_eq!(
        fields(&ask(&service, get("/")).await),
        "cache-control: no-store\ncontent-type: text/plain; charset=utf-8\n\
         ratelimit-policy: \"free-1\";q=10;w=1, \"daily\";q=12;w=86400\n\
         ratelimit: \"free-1\";r=10;t=0, \"daily\";r=0;t=86396\nretry-after: 86396\n",
    );
}

#[tokio::test]
async fn draft_6_has_three_numbers_with_a_relative_reset() {
    let (service, clock) = limited(free_and_daily(), Headers::draft6());
    for _ in 0..10 {
        ask(&service, get("/")).await;
    }
    clock.advance(Duration::from_millis(100));
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (429, Some(1)));
    assert_eq!(
        fields(&refused),
        "cache-control: no-store\ncontent-type: text/plain; charset=utf-8\nratelimit-limit: 10\n\
         ratelimit-remaining: 0\nratelimit-reset: 1\nretry-after: 1\n",
    );
}

#[tokio::test]
async fn header_families_combine_in_any_order() {
    let x = "x-ratelimit-limit: 10\nx-ratelimit-remaining: 9\nx-ratelimit-reset: 1728000001\n";
    let x_from_now = "x-ratelimit-limit: 10\nx-ratelimit-remaining: 9\nx-ratelimit-reset: 1\n";
    let draft6 = "ratelimit-limit: 10\nratelimit-remaining: 9\nratelimit-reset: 1\n";
    let draft11 = "ratelimit-policy: \"free\";q=10;w=1\nratelimit: \"free\";r=9;t=1\n";
    let sorted = |texts: &[&str]| {
        let mut lines: Vec<&str> = texts.iter().flat_map(|text| text.split_inclusive('\n')).collect();
        lines.sort_unstable();
        lines.concat()
    };
    for (headers, expected) in [
        (Headers::none(), sorted(&[])),
        (Headers::x_rate_limit(), sorted(&[x])),
        (Headers::default(), sorted(&[x])),
        (Headers::x_rate_limit().reset_in_seconds(), sorted(&[x_from_now])),
        (Headers::none().reset_in_seconds(), sorted(&[])),
        (Headers::draft11().reset_in_seconds().and(Headers::x_rate_limit()), sorted(&[x_from_now, draft11])),
        (Headers::none().and(Headers::draft6()), sorted(&[draft6])),
        (Headers::draft11().and(Headers::x_rate_limit()), sorted(&[x, draft11])),
        (Headers::x_rate_limit().reset_in_seconds().and(Headers::draft11()), sorted(&[x_from_now, draft11])),
        (Headers::draft11().and(Headers::draft6()), sorted(&[draft6, draft11])),
        (Headers::draft11().and(Headers::draft6()).and(Headers::x_rate_limit()), sorted(&[x, draft6, draft11])),
        (Headers::draft11().and(Headers::none()), sorted(&[draft11])),
    ] {
        let (service, _clock) = limited(free(), headers);
        assert_eq!(fields(&ask(&service, get("/")).await), expected, "{headers:?}");
    }
}

#[tokio::test]
async fn stacked_layers_write_one_list_that_names_every_limit() {
    let (storage, _clock) = memory_with_manual_clock();
    let headers = Headers::draft11().and(Headers::x_rate_limit());
    let inner = layer(free_and_daily(), &storage, headers).layer(Inner::default());
    let all = Policy::named("all").limit(FixedWindow::new(), Quota::per_minute(1_000));
    let service = layer(all, &storage, headers).layer(inner);
    let response = ask(&service, get("/")).await;
    assert_eq!(numbers(&response), Some([10, 9, T0 + 1]));
    assert_eq!(response.headers().get_all("ratelimit").iter().count(), 1);
    assert_eq!(response.headers()["ratelimit"], "\"free-1\";r=9;t=1, \"daily\";r=11;t=86400, \"all\";r=999;t=60",);
    assert_eq!(
        response.headers()["ratelimit-policy"],
        "\"free-1\";q=10;w=1, \"daily\";q=12;w=86400, \"all\";q=1000;w=60",
    );
    for _ in 0..9 {
        ask(&service, get("/")).await;
    }
    let refused = ask(&service, get("/")).await;
    assert_eq!((refused.status().as_u16(), numbers(&refused)), (429, Some([10, 0, T0 + 1])));
    assert_eq!(
        refused.headers()["ratelimit"],
        "\"free-1\";r=0;t=1, \"daily\";r=2;t=86400, \"all\";r=989;t=60",
        "the refusing layer's numbers stay, and the list includes the admitting layer's"
    );
}

#[tokio::test]
async fn valid_lists_of_an_inner_service_are_extended_and_invalid_ones_dropped() {
    for (inner, expected) in [
        (&["\"up\";r=1;t=2"][..], "\"up\";r=1;t=2, \"free\";r=9;t=1"),
        (&["\"a\";r=1", "\"b, \\\"\";r=2"], "\"a\";r=1, \"b, \\\"\";r=2, \"free\";r=9;t=1"),
        (&[""], "\"free\";r=9;t=1"),
        (&["limit=10, remaining=3, reset=5"], "\"free\";r=9;t=1"),
        (&["\"abc"], "\"free\";r=9;t=1"),
        (&["\"abc\\\""], "\"free\";r=9;t=1"),
        (&["\"a\";r=1,"], "\"free\";r=9;t=1"),
    ] {
        let service = tower::service_fn(move |_: http::Request<()>| {
            let mut response = Response::new(String::new());
            for line in inner {
                response.headers_mut().append("ratelimit", line.parse().unwrap());
            }
            std::future::ready(Ok::<_, std::convert::Infallible>(response))
        });
        let (storage, _clock) = memory_with_manual_clock();
        let response = ask(&layer(free(), &storage, Headers::draft11()).layer(service), get("/")).await;
        assert_eq!(response.headers()["ratelimit"], expected, "{inner:?}");
        members(response.headers(), "ratelimit");
    }
}

#[tokio::test]
async fn response_that_carries_an_admitted_decision_gets_the_numbers() {
    let service = tower::service_fn(|request: http::Request<()>| {
        let mut response = Response::new(String::new());
        let decision = request.extensions().get::<Decision>().unwrap().clone();
        response.extensions_mut().insert(decision);
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let (storage, _clock) = memory_with_manual_clock();
    let service = layer(free(), &storage, Headers::x_rate_limit()).share_decision().layer(service);
    assert_eq!(numbers(&ask(&service, get("/")).await), Some([10, 9, T0 + 1]));
}

/// A `HeaderMap` has a maximum size. Fields that do not fit are not written.
#[tokio::test]
async fn response_with_too_many_fields_is_unchanged() {
    let service = tower::service_fn(|_: http::Request<()>| {
        let mut response = Response::new(String::new());
        let names = (0..).map(|number| http::HeaderName::try_from(format!("x-{number}")).unwrap());
        for name in names {
            if response.headers_mut().try_insert(name, http::HeaderValue::from_static("")).is_err() {
                break;
            }
        }
        std::future::ready(Ok::<_, std::convert::Infallible>(response))
    });
    let (storage, _clock) = memory_with_manual_clock();
    let all = Headers::x_rate_limit().and(Headers::draft11()).and(Headers::draft6());
    let response = ask(&layer(free(), &storage, all).layer(service), get("/")).await;
    assert_eq!(numbers(&response), None);
}

#[tokio::test(start_paused = true)]
async fn delayed_response_reports_the_state_after_the_delay() {
    let storage = MemoryStorage::builder().clock(TokioClock::new()).build().unwrap();
    let queue = policy("leaky-bucket 1/minute queue 2").with_name("q");
    let headers = Headers::x_rate_limit().and(Headers::draft11());
    let service = layer(queue, &storage, headers).layer(Inner::default());
    assert_eq!(common::remaining(&ask(&service, get("/")).await), Some(2));
    let waited = ask(&service, get("/")).await;
    assert_eq!(common::remaining(&waited), Some(2), "its slot is free again");
    assert_eq!(waited.headers()["ratelimit"], "\"q\";r=2;t=60");
}

#[tokio::test]
async fn draft_6_shows_the_stacked_layer_with_fewer_remaining_units() {
    for (outer, inner) in [(5, 7), (7, 5)] {
        let (storage, _clock) = memory_with_manual_clock();
        let layer = |amount| layer(policy(&format!("fixed-window {amount}/minute")), &storage, Headers::draft6());
        let service = layer(outer).layer(layer(inner).layer(Inner::default()));
        let response = ask(&service, get("/")).await;
        let shown = ["ratelimit-limit", "ratelimit-remaining"].map(|name| response.headers()[name].to_str().unwrap());
        assert_eq!(shown, ["5", "4"], "{outer} around {inner}");
    }
}

#[cfg(feature = "partition-key")]
#[tokio::test]
async fn partition_key_differs_per_client_and_hides_the_key() {
    async fn partition(secret: [u8; 16], client: &str) -> [Vec<u8>; 2] {
        let (storage, _clock) = memory_with_manual_clock();
        let service = RateLimitLayer::new(free_and_daily(), tower_ratelimit::Header::new("x-client"))
            .storage(storage, OnError::Refuse)
            .headers(Headers::draft11().partition_key(secret))
            .layer(Inner::default());
        let response = ask(&service, common::with("x-client", client)).await;
        ["ratelimit", "ratelimit-policy"].map(|name| {
            let members = members(response.headers(), name);
            let hashes: Vec<&Vec<u8>> = members
                .iter()
                .map(|(_, parameters)| match &parameters.iter().find(|(name, _)| name == "pk").unwrap().1 {
                    BareItem::ByteSequence(hash) => hash,
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(hashes.windows(2).all(|pair| pair[0] == pair[1]) && hashes.len() == 2);
            hashes[0].clone()
        })
    }
    let [alice, again] = partition(*b"0123456789abcdef", "alice").await;
    assert_eq!(alice, again, "the same in both fields");
    assert_eq!(alice, partition(*b"0123456789abcdef", "alice").await[0], "the same on every machine");
    assert_ne!(alice, partition(*b"0123456789abcdef", "bob").await[0]);
    assert_ne!(alice, partition(*b"0123456789abcdeF", "alice").await[0]);
    assert_eq!(alice.len(), 16);
    let reference = u128::from_be_bytes(alice.try_into().unwrap());
    assert_eq!(
        reference, 0x8ec3_65d2_7665_5ca5_9d2e_f30f_c34d_a2a5,
        "SipHash-2-4 of the key's bytes, computed by another program"
    );
    assert!(
        !format!("{:?}", Headers::draft11().partition_key(*b"0123456789abcdef")).contains("48"),
        "no secret in Debug"
    );
    let (secret, draft11) = ([7; 16], Headers::draft11());
    for combined in [draft11.partition_key(secret), draft11.and(Headers::none().partition_key(secret))] {
        assert_eq!(combined, Headers::none().partition_key(secret).and(draft11), "in any order");
    }
}

/// Guards against this defect: the name of a policy injects a header field.
#[test]
fn policy_name_that_is_invalid_in_a_header_is_rejected() {
    for name in ["", "a\nb", "a\r\nx: y", "caf\u{e9}", "\u{7f}", "a\tb"] {
        assert!(catch_unwind(|| Policy::named(name)).is_err(), "{name:?}");
        assert!(Policy::from(Quota::per_minute(1)).try_with_name(name).is_err(), "{name:?}");
        assert!(catch_unwind(|| Limit::from(Quota::per_minute(1)).named(name)).is_err(), "{name:?}");
    }
}

/// A strategy whose name would add a field to the response.
#[derive(Clone, Copy, Debug)]
struct Injecting;

impl Strategy for Injecting {
    fn name(&self) -> &'static str {
        "rude\r\nset-cookie: a=b"
    }

    common::decides_like_a_fixed_window!();
}

/// Guards against this defect: the name of a strategy injects a header field.
#[test]
fn strategy_name_that_is_invalid_in_a_header_is_rejected() {
    let error = Policy::try_new(Injecting, Quota::per_minute(1)).unwrap_err().to_string();
    assert!(error.contains("rude") && error.contains("header"), "{error}");
}

/// Parses the names and parameters of a list as a client would.
fn members(headers: &HeaderMap, name: &str) -> Vec<(String, Vec<(String, BareItem)>)> {
    let lines: Vec<&[u8]> = headers.get_all(name).iter().map(http::HeaderValue::as_bytes).collect();
    let list: List = Parser::new(&lines.join(&b","[..])).parse().unwrap();
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("an inner list: {entry:?}") };
            let BareItem::String(name) = item.bare_item else { panic!("not a string: {item:?}") };
            let parameters = item.params.into_iter().map(|(name, value)| (name.as_str().to_owned(), value)).collect();
            (name.as_str().to_owned(), parameters)
        })
        .collect()
}

proptest! {
    /// A client parses the numbers of the decision for any names and quotas.
    #[test]
    fn ietf_fields_are_structured_fields(
        name in "[ -~]{1,20}",
        limit_name in "[ -~]{1,20}",
        amounts in prop::collection::vec(1_u32.., 1..6),
        period in 1_u64..1 << 52,
        cost in 0_u32..5,
    ) {
        let mut limits = amounts.iter().map(|&amount| {
            Limit::new(FixedWindow::new(), Quota::per(amount, Duration::from_micros(period)))
        });
        let first = limits.next().unwrap().named(&limit_name);
        let policy = limits.fold(Policy::named(&name).with(first), Policy::with);
        let (storage, _clock) = memory_with_manual_clock();
        let service = layer(policy.clone(), &storage, Headers::draft11().and(Headers::x_rate_limit()))
            .share_decision()
            .cost(move |_| cost)
            .layer(Inner::default());
        let response = tokio::runtime::Builder::new_current_thread().build().unwrap()
            .block_on(service.oneshot(get("/"))).unwrap();
        let [limits, policies] = ["ratelimit", "ratelimit-policy"].map(|name| members(response.headers(), name));
        prop_assert_eq!(limits.len(), amounts.len());
        let integer = |number: u64| BareItem::Integer(i64::try_from(number).unwrap().try_into().unwrap());
        let left_to_wait = period.div_ceil(1_000_000);
        for (position, amount) in amounts.iter().enumerate() {
            let admitted = amounts.iter().all(|&amount| cost <= amount);
            let spent = if admitted { cost } else { 0 };
            let name = policy.limit_name(position).into_owned();
            let reset = if spent == 0 { 0 } else { left_to_wait };
            prop_assert_eq!(&policies[position], &(name.clone(), vec![
                ("q".to_owned(), integer(u64::from(*amount))), ("w".to_owned(), integer(left_to_wait)),
            ]));
            prop_assert_eq!(&limits[position], &(name, vec![
                ("r".to_owned(), integer(u64::from(amount - spent))), ("t".to_owned(), integer(reset)),
            ]));
        }
    }
}
