//! Rate limit fields that the inner service has written.

use std::convert::Infallible;
use std::future::ready;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::random::Numbers;
use common::{ask, get, memory_with_manual_clock, policy};
use http::{HeaderValue, Request, Response};
use sfv::{BareItem, List, ListEntry, Parser};
use tower::Layer;
use tower_ratelimit::{Global, Headers, OnError, Policy, RateLimitLayer};

/// The values of `names` in a response of a layer around a service that writes these fields.
pub(crate) async fn seen(headers: Headers, inner: &[(&'static str, &str)], names: &[&str]) -> Vec<String> {
    let inner: Vec<_> =
        inner.iter().map(|(name, value)| (*name, HeaderValue::from_bytes(value.as_bytes()).unwrap())).collect();
    let service = tower::service_fn(move |_: Request<()>| {
        let mut response = Response::new(String::new());
        for (name, value) in &inner {
            response.headers_mut().append(*name, value.clone());
        }
        ready(Ok::<_, Infallible>(response))
    });
    let policy = policy("fixed-window 10/second").with_name("free");
    let layer = RateLimitLayer::new(policy, Global::new()).storage(memory_with_manual_clock().0, OnError::Refuse);
    let response = ask(&layer.headers(headers).layer(service), get("/")).await;
    names.iter().map(|name| response.headers()[*name].to_str().unwrap().to_owned()).collect()
}

/// Returns the number of members of a list of strings, or `None` if a strict client rejects it.
fn members(line: &str) -> Option<usize> {
    let list: List = Parser::new(line).parse().ok()?;
    let is_string =
        |entry: &ListEntry| matches!(entry, ListEntry::Item(item) if matches!(item.bare_item, BareItem::String(_)));
    (!list.is_empty() && list.iter().all(is_string)).then_some(list.len())
}

const OURS: &str = "\"free\";r=9;t=1";

#[tokio::test]
async fn malformed_lists_of_the_inner_service_are_dropped() {
    for (inner, is_kept) in [
        ("\"a\" b", false),
        ("\"a\";q=", false),
        ("\"a\"x", false),
        ("\"a\" ;r=1", false),
        ("\"a\";R=1", false),
        ("\"a\";r=1.", false),
        ("\"a\";r=--1", false),
        ("\"a\";r=1234567890123456", false),
        ("\"a\\b\"", false),
        ("\"a\",", false),
        ("a;r=1", false),
        ("10;w=1", false),
        ("(\"a\" \"b\")", false),
        ("\"a\";pk=:YQ:", false),
        ("\"a\";s=%\"%C3\"", false),
        (" \"a\"; r=1;  t=2 ,\t\"b\" ", true),
        ("\"a\";r=-1.25;flag;no=?0;token=a/b:c;*k=*;at=@7;pk=:YQ==:;s=%\"%c3%bc\"", true),
    ] {
        let value = seen(Headers::draft11(), &[("ratelimit", inner)], &["ratelimit"]).await.remove(0);
        let expected = if is_kept { format!("{inner}, {OURS}") } else { OURS.to_owned() };
        assert_eq!(value, expected, "{inner}");
        assert!(members(&value).is_some(), "{value}");
    }
}

/// Exactly the lists that a parser of Structured Fields accepts are kept.
#[tokio::test]
async fn random_lists_of_the_inner_service_are_kept_if_they_parse() {
    const PIECES: [&str; 28] = [
        "\"a\"",
        "\"b\"",
        "\"",
        "\\\"",
        "\\\\",
        "\\",
        ";",
        ";",
        ";r",
        "=",
        "=1",
        "=-2.5",
        ".",
        ", ",
        ",",
        " ",
        "\t",
        "x",
        "*",
        "?1",
        "@3",
        "?",
        "=tok",
        "(",
        ")",
        "=%\"%c3%bc\"",
        "=%\"a",
        "=:YQ==:",
    ];
    let mut numbers = Numbers(20_261_124);
    let mut kept = 0;
    for _ in 0..6_000 {
        let mut inner = String::from("\"a\"");
        for _ in 0..numbers.below(8) {
            inner.push_str(numbers.one_of(&PIECES));
        }
        let value = seen(Headers::draft11(), &[("ratelimit", &inner)], &["ratelimit"]).await.remove(0);
        let parses = members(&inner).is_some();
        assert_eq!(value != OURS, parses, "{inner:?} became {value:?}");
        assert!(members(&value).is_some(), "{value:?}");
        kept += usize::from(parses);
    }
    assert!((600..5_400).contains(&kept), "{kept}");
}

/// The three fields of the inner service are kept only if all of them are valid, and at most as
/// many units remain as in the layer.
#[tokio::test]
async fn incomplete_or_invalid_numbers_of_the_inner_service_are_replaced() {
    for headers in [Headers::x_rate_limit().reset_in_seconds(), Headers::draft6()] {
        let names = if headers == Headers::draft6() {
            ["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"]
        } else {
            ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]
        };
        let [limit, remaining, reset] = names;
        for inner in [
            &[(remaining, "0")][..],
            &[(limit, "7"), (remaining, "0")],
            &[(remaining, "0"), (reset, "3")],
            &[(limit, "7"), (reset, "3")],
            &[(limit, "seven"), (remaining, "0"), (reset, "3")],
            &[(limit, "7"), (remaining, "0"), (reset, "Sun, 22 Nov 2026 06:31:00 GMT")],
            &[(limit, "7"), (remaining, "-1"), (reset, "3")],
            &[(limit, "7"), (remaining, "+1"), (reset, "3")],
            &[(limit, ""), (remaining, "0"), (reset, "3")],
            &[(limit, "20"), (remaining, "10"), (reset, "3")],
        ] {
            assert_eq!(seen(headers, inner, &names).await, ["10", "9", "1"], "{inner:?}");
        }
        for left in ["0", "9"] {
            let inner = [(limit, "7"), (remaining, left), (reset, "1728000060")];
            assert_eq!(seen(headers, &inner, &names).await, ["7", left, "1728000060"]);
        }
    }
}

#[test]
fn two_limits_with_the_same_name_are_an_error() {
    let text = "\"free\": 10/second; \"free-1\" 100/day";
    let error = text.parse::<Policy>().unwrap_err().to_string();
    assert!(error.contains("two limits") && error.contains("\"free-1\"") && error.contains("\"daily\""), "{error}");

    let unnamed: Policy = "10/second; \"free-1\" 100/day".parse().unwrap();
    assert!(unnamed.clone().try_with_name("free").is_err());
    let other = unnamed.try_with_name("other").unwrap();
    assert_eq!([other.limit_name(0), other.limit_name(1)], ["other-1", "free-1"]);

    let limit = || other.limits()[1].clone();
    let free = policy("10/second").with_name("free");
    assert_eq!(free.clone().try_with(limit()).unwrap_err().to_string(), error);
    assert!(other.clone().try_with(limit()).is_err(), "the same name twice");
    assert!(catch_unwind(AssertUnwindSafe(|| free.with(limit()))).is_err());
}
