//! Configuration types as strings.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tower_ratelimit::storage::StorageUrl;
use tower_ratelimit::{ConfigError, Headers, OnError, Policy, Quota};

/// Reads the text as a value, and returns the text that is written for it.
fn rewritten<T: DeserializeOwned + Serialize>(text: &str) -> String {
    let value: T = serde_json::from_value(text.into()).unwrap();
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

/// The error of reading the text, and that of parsing it.
fn errors<T>(text: &str) -> (String, String)
where
    T: DeserializeOwned + std::fmt::Debug + std::str::FromStr<Err = ConfigError>,
{
    let error = serde_json::from_value::<T>(text.into()).unwrap_err();
    (error.to_string(), text.parse::<T>().unwrap_err().to_string())
}

#[test]
fn values_are_written_as_the_texts_that_they_parse_from() {
    for text in ["10/minute", "5/3 seconds burst 20", "1/7ms"] {
        assert_eq!(rewritten::<Quota>(text), text);
    }
    for text in [
        "token-bucket 100/second burst 200",
        "\"free\": fixed-window 10/second; \"daily\" moving-window 10000/day; shadow token-bucket 1/second",
        "leaky-bucket 5/second queue 3",
    ] {
        assert_eq!(rewritten::<Policy>(text), text);
    }
    assert_eq!(rewritten::<Policy>("10 per min"), "sliding-window-counter 10/minute");
    for text in [
        "none",
        "x",
        "draft11",
        "draft6",
        "x, reset-in-seconds, draft11, draft6",
        "reset-in-seconds",
        "x, suffix=tokens, retry-jitter=20",
    ] {
        assert_eq!(rewritten::<Headers>(text), text);
    }
    assert_eq!(rewritten::<Headers>(" DRAFT11,X "), "x, draft11");
    for text in ["admit", "refuse"] {
        assert_eq!(rewritten::<OnError>(text), text);
    }
    assert_eq!(rewritten::<StorageUrl>("memory://"), "memory://");
}

#[test]
fn invalid_text_returns_the_error_of_the_parser() {
    for (read, parsed) in [
        errors::<Quota>("10/fortnight"),
        errors::<Policy>("fixd-window 1/s"),
        errors::<Headers>("x, y"),
        errors::<Headers>("none, x"),
        errors::<OnError>("allow"),
        errors::<StorageUrl>("memory"),
        errors::<StorageUrl>("mysql://user:secret@host"),
    ] {
        assert_eq!(read, parsed);
        assert!(!read.contains("secret"), "{read}");
    }
    assert!(serde_json::from_str::<Policy>("10").is_err());
    assert_eq!(
        errors::<Headers>("x, y").0,
        "cannot read the header fields \"y\" in \"x, y\": expected x, reset-in-seconds, suffix=tokens, draft11, \
         draft6, retry-jitter=20 or none, for example \"x, draft11\""
    );
    assert_eq!(errors::<OnError>("allow").0, "cannot read the action \"allow\": write \"admit\" or \"refuse\"");
}

#[test]
fn values_without_a_text_are_not_written() {
    assert!(serde_json::to_string(&Quota::per(1, Duration::from_micros(7))).is_err());
    assert!(serde_json::to_string(&common::foreign(5)).is_err());
}

#[cfg(feature = "partition-key")]
#[test]
fn secret_of_a_partition_key_is_not_written() {
    let error = serde_json::to_string(&Headers::draft11().partition_key([7; 16])).unwrap_err();
    assert!(error.to_string().contains("\"draft11\""), "{error}");
}

#[test]
fn storage_url_hides_the_part_after_its_scheme() {
    let url: StorageUrl = "memory://".parse().unwrap();
    assert_eq!(
        (url.to_string(), format!("{url:?}")),
        ("memory://...".to_owned(), "StorageUrl(memory://...)".to_owned())
    );
    assert!(url.open().is_ok());
}

#[test]
fn policy_headers_and_on_error_can_be_fields_of_a_configuration() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Config {
        policy: Policy,
        headers: Headers,
        on_error: OnError,
    }
    let config = Config {
        policy: Policy::from(Quota::per_minute(10)).with_name("api"),
        headers: Headers::x_rate_limit().and(Headers::draft11()),
        on_error: OnError::Refuse,
    };
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(
        text,
        r#"{"policy":"\"api\": sliding-window-counter 10/minute","headers":"x, draft11","on_error":"refuse"}"#
    );
    assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
}
