//! The URLs of memcached, and their options.

use std::time::Duration;

use common::message;
use tower_ratelimit::Storage;
use tower_ratelimit::storage::{AnyStorage, MemcachedStorage, StorageError, StorageErrorKind, StorageUrl};

use super::LITTLE;

#[test]
fn invalid_url_is_rejected_with_a_correction() {
    for (url, parts) in [
        ("", &["\"\"", "memcached://host:11211"][..]),
        ("localhost:11211", &["\"localhost:11211\"", "memcached://host:11211"]),
        ("http://localhost", &["\"http\"", "memcached+unix:///path/to.sock"]),
        ("memcached+cluster://a,b", &["\"memcached+cluster\"", "memcached://host:11211,host:11211"]),
        ("Memcached://localhost", &["\"Memcached\""]),
        ("memcached://", &["the host is missing"]),
        ("memcached:///0", &["the host is missing"]),
        ("memcached://:11211", &["\":11211\"", "host:11211"]),
        ("memcached://host:0", &["\"host:0\""]),
        ("memcached://host:65536", &["\"host:65536\""]),
        ("memcached://ho st", &["\"ho st\""]),
        ("memcached://2001:db8::1", &["\"2001:db8::1\"", "[2001:db8::1]:11211"]),
        ("memcached://a,,b", &["\"\"", "host:11211"]),
        ("memcached://a,b:1,a:11211", &["the host a:11211 occurs twice"]),
        ("memcached://host/0", &["\"/0\"", "leave it out"]),
        ("memcached://:p@host", &["the password has no user", "write user:password@"]),
        ("memcached://user@host", &["there is no password before @"]),
        ("memcached://user:p%20w@host", &["separates user and password by a space; choose ones without"]),
        ("memcached://us%0Aer:p@host", &["without spaces and control characters"]),
        ("memcached://host?ca=/path", &["unknown option \"ca\""]),
        ("memcacheds://host?cert=/path", &["write key=/path/to/key.pem"]),
        ("memcacheds+unix:///s", &["\"memcacheds+unix\"", "memcacheds://host:11211"]),
        ("memcached+unix://host/s", &["memcached+unix:///path/to.sock"]),
        ("memcached+unix://", &["memcached+unix:///path/to.sock"]),
        ("memcached://host#x", &["%23"]),
        ("memcached://host?db=1", &["\"db\"", "prefix, timeout"]),
        ("memcached://host?timeout", &["timeout=100ms"]),
        ("memcached://host?timeout=100", &["\"100\"", "100ms"]),
        ("memcached://host?timeout=1s&timeout=2s", &["twice"]),
        ("memcached://host?prefix=", &["\"\"", "\"rl\""]),
        ("memcached://host?prefix=a%20b", &["\"a b\""]),
        ("memcached://host?prefix=a%0D%0Ab", &["without white space"]),
    ] {
        let error = MemcachedStorage::new(url).expect_err(url).to_string();
        assert!(error.starts_with("cannot read the URL "), "{url:?}: {error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{url:?}: {error}");
        assert!(["write", "written", "leave", "choose"].iter().any(|help| error.contains(help)), "{url:?}: {error}");
    }
}

#[test]
fn error_of_an_invalid_url_hides_the_login() {
    for url in [
        "memcached://secret@host",
        "memcached://me:a%20secret@host",
        "memcached://me:secret@host/0",
        "memcached://:secret@host",
        "memcached://me:pa/secret@host",
        "memcached://me:secret?pa@host",
        "memcached+unix://me:secret@host/s",
        "memcache://me:secret@host",
    ] {
        let error = MemcachedStorage::new(url).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("secret"), "{url}: {error}");
    }
}

#[test]
fn valid_urls_are_accepted() {
    for url in [
        "memcached://localhost",
        "memcached://localhost/",
        "memcached://127.0.0.1:1?prefix=a:b&timeout=2s",
        "memcached://[::1]:11211",
        "memcached://user:p%40ss%3Aword@a,b",
        "memcached+unix://user:password@/s",
        "memcacheds://user:password@host",
        "memcached://a,b:1,[::1]:2,[::1]",
        "memcached+unix:///var/run/memcached%20a.sock?prefix=x",
    ] {
        let storage = MemcachedStorage::new(url).unwrap_or_else(|error| panic!("{error}"));
        let debug = format!("{storage:?}");
        assert!(debug.len() < 500 && !debug.contains("word"), "{debug}");
        assert!(
            matches!(url.parse::<AnyStorage>(), Ok(storage) if format!("{storage:?}").starts_with("MemcachedStorage"))
        );
    }
}

#[test]
fn prefix_and_timeout_are_checked() {
    let url: StorageUrl = "memcached://h".parse().unwrap();
    for prefix in ["", "a b", "a\r\n", "caf\u{e9}", &"a".repeat(65)] {
        assert!(url.with("prefix", prefix).unwrap_err().to_string().contains("invalid prefix"), "{prefix:?}");
    }
    // All characters of a prefix can be passed, because `with` encodes them.
    let prefix = "a&b=c%20#@/?+";
    let storage = MemcachedStorage::new(url.with("prefix", prefix).unwrap().as_str()).unwrap();
    assert!(format!("{storage:?}").contains(&format!("{prefix:?}")));
    for timeout in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        let error = url.with("timeout", format_args!("{timeout:?}")).unwrap_err().to_string();
        assert!(error.contains("write at least 1ms and at most 3600s"), "{error}");
    }
    for timeout in [LITTLE, Duration::from_micros(1_500), Duration::from_secs(3_600)] {
        let storage = MemcachedStorage::new(url.with("timeout", format_args!("{timeout:?}")).unwrap().as_str());
        assert!(format!("{:?}", storage.unwrap()).contains(&format!("timeout: {timeout:?}")));
    }
    let twice = url.with("timeout", "1s").and_then(|url| url.with("timeout", "2s"));
    assert!(twice.unwrap_err().to_string().contains("twice"));
}

#[test]
fn storage_and_error_can_be_shared_between_threads() {
    fn shared<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    shared::<MemcachedStorage>();
    shared::<StorageError>();
}

#[tokio::test]
async fn clear_all_is_an_error_with_an_alternative() {
    let storage: AnyStorage = "memcached://127.0.0.1:1".parse().unwrap();
    let error = storage.clear_all().await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unsupported);
    assert!(message(error).contains("use another prefix"));
}
