//! The URLs of Redis, and the builder methods that check the same values.

use std::time::Duration;

use tower_ratelimit::storage::{RedisStorage, StorageError};

use super::LITTLE;

#[test]
fn invalid_url_is_rejected_with_a_correction() {
    for (url, parts) in [
        ("", &["\"\"", "redis://host:6379"][..]),
        ("localhost:6379", &["\"localhost:6379\"", "redis://host:6379"]),
        ("http://localhost", &["\"http\"", "redis://host:6379"]),
        ("redis+tcp://localhost", &["\"redis+tcp\"", "redis+cluster://host:6379,host:6379"]),
        ("Redis://localhost", &["\"Redis\"", "redis://host:6379"]),
        ("rediss+unix:///s", &["\"rediss+unix\"", "redis+unix:///path"]),
        ("redis://", &["host is missing"]),
        ("redis:///1", &["host is missing"]),
        ("redis://:6379", &["\":6379\"", "host:6379"]),
        ("redis://host:", &["\"host:\"", "host:6379"]),
        ("redis://host:0", &["\"host:0\""]),
        ("redis://host:65536", &["\"host:65536\""]),
        ("redis://host:+1", &["\"host:+1\""]),
        ("redis://ho st", &["\"ho st\""]),
        ("redis://2001:db8::1", &["\"2001:db8::1\"", "[2001:db8::1]:6379"]),
        ("redis://[::1", &["\"[::1\""]),
        ("redis://[::1]6379", &["\"[::1]6379\""]),
        ("redis://a,b", &["several hosts", "redis+cluster://"]),
        ("redis+cluster://a,,b", &["\"\"", "host:6379"]),
        ("redis://host/one", &["\"one\"", "/0"]),
        ("redis://host/-1", &["\"-1\""]),
        ("redis://host/0/1", &["\"0/1\""]),
        ("redis+cluster://host/1", &["only database 0"]),
        ("redis+unix://host/s", &["redis+unix:///path/to.sock"]),
        ("redis+unix://", &["redis+unix:///path/to.sock"]),
        ("redis+unix:///s?db=x", &["\"x\""]),
        ("redis+sentinel://host", &["the service", "redis+sentinel://host:26379/mymaster"]),
        ("redis+sentinel://host/s/x", &["\"x\""]),
        ("redis+sentinel://host/s?sentinel-user=me", &["sentinel-password"]),
        ("redis://host#insecure", &["#", "%23"]),
        ("redis://host?db=1", &["\"db\"", "prefix, timeout, combine"]),
        ("redis://host?ca=x", &["\"ca\""]),
        ("redis://host?timeout", &["\"timeout\"", "timeout=100ms"]),
        ("redis://host?timeout=1s&prefix", &["an option has no value", "%26"]),
        ("redis://host?prefix=shop?timeout=50ms", &["a second ?", "&", "%3F"]),
        ("redis://host?timeout=100", &["\"100\"", "100ms"]),
        ("redis://host?timeout=0s", &["\"0s\"", "at least 1ms"]),
        ("redis://host?timeout=2h", &["\"2h\"", "100ms or 2s"]),
        ("redis://host?timeout=1s&timeout=2s", &["\"timeout\"", "twice"]),
        ("redis://host?combine=no", &["\"no\"", "combine=true or combine=false or combine=always"]),
        ("redis://host?combine=", &["\"\"", "combine=false"]),
        ("redis://host?prefix=", &["\"\"", "\"rl\""]),
        ("redis://host?prefix=a{b}", &["\"a{b}\"", "{ and }"]),
        ("redis://host?prefix=a%", &["\"prefix\"", "%25"]),
    ] {
        let error = RedisStorage::new(url).expect_err(url).to_string();
        assert!(error.starts_with("cannot read the URL "), "{url:?}: {error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{url:?}: {error}");
        assert!(["write", "written", "leave"].iter().any(|help| error.contains(help)), "{url:?}: {error}");
    }
}

#[test]
fn error_of_an_invalid_url_hides_the_login() {
    for url in [
        "redis://secret@host",
        "redis://:secret@",
        "redis://:secret@host:x",
        "redis://me:secret@host/x",
        "redis://me:sec%zzret@host",
        "redis://me:pa/secret@host",
        "redis://me:secret/pa@host",
        "redis://me:pa?secret@host",
        "redis://me:secret?pa@host",
        "redis://me:secret#pa@host",
        "redis://me:pa@secret@host",
        "redis://me:secret@host,other",
        "http://me:secret@host",
        "me:secret@host",
        "redis://me:secret",
        "redis://me:secrethost:6379",
        "redis+cluster://host,:secret",
        "me:secret",
        "host=db user=app password=secret",
        "redis+cluster://me:secret@host/4",
        "redis+sentinel://host/s?sentinel-password=secret&x=1",
        "redis+sentinel://host/s?sentinel-password=secret%zz",
        "redis+sentinel://host/s?password=secret",
    ] {
        let error = RedisStorage::new(url).expect_err(url);
        assert!(!format!("{error} {error:?}").contains("secret"), "{url}: {error}");
    }
    let valid = RedisStorage::new("redis+sentinel://me:secret@host/s?sentinel-password=secret").unwrap();
    assert!(!format!("{valid:?}").contains("secret"), "{valid:?}");
}

#[test]
fn valid_urls_are_accepted() {
    for url in [
        "redis://localhost",
        "valkey://localhost:1/0",
        "redis://127.0.0.1/15?prefix=a:b&timeout=2s",
        "redis://[::1]:6379/",
        "redis://user:p%40%2F%3F%23@host",
        "redis+unix:///var/run/redis%20a.sock?db=3",
        "valkey+unix://:pass@/s",
        "redis+cluster://a,b:1,[::1]:2/0",
        "valkey+cluster://:pass@a",
        "redis+sentinel://a,b/service",
        "valkey+sentinel://u:p@a,b:1/service/3?sentinel-user=x&sentinel-password=y",
    ] {
        RedisStorage::new(url).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn invalid_prefixes_and_timeouts_are_rejected() {
    let storage = |option: &str| RedisStorage::new(&format!("redis://h?{option}"));
    for prefix in ["", "a b", "a{", "}", "caf\u{e9}", &"a".repeat(65)] {
        assert!(storage(&format!("prefix={prefix}")).unwrap_err().to_string().contains(prefix));
    }
    assert!(format!("{:?}", storage("prefix=shop").unwrap()).contains("\"shop\""));
    for timeout in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        let error = storage(&format!("timeout={timeout:?}")).unwrap_err().to_string();
        assert!(error.contains("at least 1ms and at most 3600s"), "{error}");
    }
    assert!(format!("{:?}", storage(&format!("timeout={LITTLE:?}")).unwrap()).contains("60ms"));
}

#[test]
fn storage_and_error_can_be_shared_between_threads() {
    fn shared<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    shared::<RedisStorage>();
    shared::<StorageError>();
}
