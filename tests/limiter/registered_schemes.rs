//! URLs of storages in other crates.

use common::panic_message;
use tower_ratelimit::storage::{AnyStorage, StorageUrl};
use tower_ratelimit::{ConfigError, Key, LocalLimiter, MemoryStorage, Quota, RateLimiter};

/// Opens a storage that can keep one key, and no options.
fn tiny(url: &str) -> Result<MemoryStorage, ConfigError> {
    if url.contains('?') {
        return Err(ConfigError::new("the storage has no options; write tiny://"));
    }
    MemoryStorage::builder().max_keys(1).build()
}

#[tokio::test]
async fn registered_scheme_opens_its_storage() {
    AnyStorage::register("tiny", tiny);
    for url in ["tiny://", "tiny:", "TINY://host", "tiny+tls://host/path"] {
        let storage: AnyStorage = url.parse().unwrap();
        assert!(storage.downcast_ref::<MemoryStorage>().is_some(), "{url}");
        let limiter = RateLimiter::with_storage(Quota::per_minute(2), storage);
        assert_eq!(limiter.hit(&Key::from("alice")).await.unwrap().remaining(), 1);
    }
    let url: StorageUrl = "tiny://user:secret@host".parse().unwrap();
    assert_eq!(format!("{url}"), "tiny://...");
    assert!(url.open().is_ok());
    let error = url.with("timeout", "1s").unwrap_err().to_string();
    assert_eq!(error, "the storage has no options; write tiny://");
}

#[test]
fn last_registration_of_a_scheme_counts() {
    let max_keys = |max_keys| move |_: &str| MemoryStorage::builder().max_keys(max_keys).build();
    AnyStorage::register("replaced", max_keys(1));
    AnyStorage::register("replaced", max_keys(1_000_000));
    let storage: AnyStorage = "replaced://".parse().unwrap();
    let memory = storage.downcast_ref::<MemoryStorage>().unwrap().clone();
    let limiter = LocalLimiter::with_storage(Quota::per_minute(1), memory.clone());
    assert!((0..1_000_u64).all(|client| limiter.admit(&Key::from(client))));
    assert_eq!(memory.stats().keys, 1_000);
}

#[test]
fn schemes_that_cannot_be_registered_panic() {
    for scheme in ["", "Tiny", "1tiny", "ti ny", "tiny+tls", "tiny://", "caf\u{e9}"] {
        let message = panic_message(|| AnyStorage::register(scheme, tiny));
        assert!(message.contains("write lowercase letters and digits"), "{scheme}: {message}");
    }
    for scheme in [
        "memory",
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "memcached",
        "etcd",
        "etcds",
        "postgres",
        "postgresql",
        "sqlite",
    ] {
        let message = panic_message(|| AnyStorage::register(scheme, tiny));
        assert!(message.contains("belongs to tower-ratelimit"), "{scheme}: {message}");
    }
}

#[test]
fn unknown_scheme_is_an_error_that_hides_the_rest_of_the_url() {
    let error = "dynamo://user:secret@host".parse::<AnyStorage>().unwrap_err().to_string();
    assert!(error.contains("unknown scheme \"dynamo\"") && error.contains("AnyStorage::register"), "{error}");
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn text_without_a_scheme_is_an_error_that_hides_the_text() {
    for text in [
        "host=db user=app password=secret dbname=x",
        "host=db password=secret:x",
        "password=secret://host",
        "my secret",
    ] {
        let error = text.parse::<AnyStorage>().unwrap_err().to_string();
        assert!(error.contains("the scheme is missing; write memory://"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}
