//! The log of a layer.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    Behavior, FAILURE, FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, policy, status, with,
};
use http::Request;
use tower::Layer;
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::{Breaker, RefusalCache};
use tower_ratelimit::{Header, Key, Lint, OnError, PeerIp, Policy, PolicyLookup, RateLimitLayer, RateLimiter};
use tracing::field::{Field, Visit};
use tracing::span;

/// Keeps the events of this crate as lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

/// Returns the lines that `work` logs.
///
/// The second subscriber prevents `tracing` from caching that an event has no subscriber, if
/// another thread logs it first.
pub(crate) fn log_of(work: impl FnOnce()) -> Vec<String> {
    let (log, _another) = (Log::default(), tracing::Dispatch::new(Log::default()));
    tracing::subscriber::with_default(log.clone(), work);
    let lines = log.0.lock().unwrap();
    lines.clone()
}

/// Returns the lines that a future logs, with a paused clock that advances only while it sleeps.
fn log_in_paused_time(work: impl Future<Output = ()>) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    log_of(|| runtime.block_on(work))
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("tower_ratelimit")
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = event.metadata().level().to_string();
        event.record(&mut Fields(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        panic!("no spans")
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

/// Returns the log of a layer that handles these requests.
pub(crate) fn logged<R>(layer: &RateLimitLayer<R>, requests: Vec<Request<()>>) -> Vec<String>
where
    R: tower_ratelimit::Rejection<String>,
{
    log_of(|| {
        let service = layer.layer(Inner::default());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for request in requests {
            runtime.block_on(ask(&service, request));
        }
    })
}

#[test]
fn refusals_are_logged_at_debug_and_storage_failures_at_warn_without_keys() {
    let alice = || with("x-client", "alice@example.org");
    let layer = RateLimitLayer::new(policy("fixed-window 1/minute").with_name("api"), Header::new("x-client"))
        .storage(memory_with_manual_clock().0, OnError::Refuse);
    let lines = logged(&layer, vec![alice(), alice(), get("/")]);
    assert_eq!(lines.len(), 2, "admitted requests are not logged: {lines:?}");
    for part in ["DEBUG", "refused", "policy=\"api\"", "60s"] {
        assert!(lines[0].contains(part), "{part}: {lines:?}");
    }
    assert!(lines[1].contains("DEBUG") && lines[1].contains("x-client"), "{lines:?}");
    assert!(!lines.concat().contains("alice"), "{lines:?}");

    let lines = logged(&layer.clone().log_keys(), vec![alice()]);
    assert!(lines[0].contains("alice@example.org"), "`log_keys` is set: {lines:?}");
    let forged = || with("x-client", "a shadow=true outcome=admitted \"");
    let lines = logged(&layer.clone().log_keys(), vec![forged(), forged()]);
    assert!(lines[0].contains("key=\"ta shadow=true outcome=admitted"), "the key is quoted: {lines:?}");
    // 64 kB of a byte that is escaped as four characters.
    let long = || Request::get("/").header("x-client", &*vec![0xFF; 65_536]).body(()).unwrap();
    let lines = logged(&layer.clone().log_keys(), vec![long(), long()]);
    assert!(lines[0].contains("\\xff... (65537 bytes)") && lines[0].len() < 3_000, "{}", lines[0].len());

    let lines = logged(&layer.storage(failing(), OnError::Admit), vec![alice()]);
    assert!(lines[0].contains("WARN") && lines[0].contains(FAILURE), "{lines:?}");
    assert!(!lines.concat().contains("alice"), "{lines:?}");

    let broken = |_: &Head<'_>| -> Result<Key, KeyError> { Err(KeyError::server("no table")) };
    let lines = logged(&RateLimitLayer::new(policy("1/day"), broken), vec![get("/")]);
    assert!(lines[0].contains("ERROR") && lines[0].contains("no table"), "{lines:?}");
}

#[test]
fn breaker_logs_when_it_opens_and_closes() {
    let lines = log_of(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (primary, _) = FakeStorage::in_memory(Behavior::Fails);
            let breaker = Breaker::new(primary.clone()).fallback(memory_with_manual_clock().0, 2);
            let limiter = RateLimiter::with_storage(policy("100/day"), breaker);
            for _ in 0..50 {
                let _ = limiter.hit(&Key::global()).await.unwrap();
            }
            primary.set(Behavior::Works);
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let _ = limiter.hit(&Key::global()).await.unwrap();
        });
    });
    let [opened, closed] = &lines[..] else { panic!("once each: {lines:?}") };
    for part in ["WARN", "circuit breaker opened", "failures=5", FAILURE] {
        assert!(opened.contains(part), "{part}: {lines:?}");
    }
    assert!(closed.contains("INFO") && closed.contains("circuit breaker closed"), "{lines:?}");
}

/// The log has one warning about the failures and one about the opening of the breaker. Later
/// requests are logged at DEBUG only.
#[test]
fn outage_with_a_breaker_logs_two_warnings() {
    let lines = log_of(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let hour = std::time::Duration::from_secs(3_600);
            let storage = RefusalCache::new(Breaker::new(failing()).failures(2).probe_after(hour, hour));
            let layer = RateLimitLayer::new(policy("1/day"), Header::new("x-client"));
            let service = layer.storage(storage, OnError::Refuse).layer(Inner::default());
            for _ in 0..20 {
                assert_eq!(status(&service, with("x-client", "a")).await, 503);
            }
        });
    });
    let of =
        |level: &str, what: &str| lines.iter().filter(|line| line.starts_with(level) && line.contains(what)).count();
    assert_eq!((of("WARN", "rate limit storage failed"), of("WARN", "circuit breaker opened")), (1, 1), "{lines:?}");
    assert_eq!((of("DEBUG", "circuit breaker is open"), of("WARN", "")), (18, 2), "{lines:?}");
}

#[test]
fn lint_is_logged_as_a_warning_with_code_and_link() {
    let key = PeerIp::new().ipv6_prefix(128);
    let lines = logged(&RateLimitLayer::new(policy("1/day"), key), vec![crate::lints::forwarded("x-forwarded-for")]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, code, anchor) in
        [(&lines[0], "RL001", "variant.Ipv6PerAddress"), (&lines[1], "RL003", "variant.ForwardedPeer")]
    {
        assert!(line.contains("WARN") && line.contains(code) && line.contains(anchor), "{line}");
    }
    let lints = [
        Lint::Ipv6PerAddress,
        Lint::TrustsEveryAddress,
        Lint::ForwardedPeer,
        Lint::SameLayerTwice,
        Lint::ForwardingFieldMissing { found: None },
        Lint::ElasticWindowRefunded,
        Lint::SmallStorage { clients: 0 },
        Lint::AlignedCalendar,
        Lint::LockoutByHeader,
    ];
    for (number, lint) in (1..).zip(lints) {
        assert_eq!(lint.code(), format!("RL{number:03}"));
        let variant = format!("{lint:?}");
        let variant = variant.split(' ').next().unwrap();
        assert!(lint.docs().ends_with(&format!("#variant.{variant}")), "{lint:?}");
    }
}

/// Sixty requests per second for three seconds without a breaker: one line at the first failure,
/// one per second with the number of failures, and one at the end.
#[test]
fn outage_without_a_breaker_logs_one_line_per_second() {
    let lines = log_in_paused_time(async {
        let (storage, _) = FakeStorage::in_memory(Behavior::Fails);
        let layer = RateLimitLayer::new(policy("1000/day"), Header::new("x-client"));
        let service = layer.storage(storage.clone(), OnError::Refuse).layer(Inner::default());
        for _ in 0..180 {
            assert_eq!(status(&service, with("x-client", "a")).await, 503);
            tokio::time::sleep(Duration::from_millis(17)).await;
        }
        storage.set(Behavior::Works);
        for _ in 0..120 {
            assert_eq!(status(&service, with("x-client", "a")).await, 200);
            tokio::time::sleep(Duration::from_millis(17)).await;
        }
    });
    let counts: Vec<&str> = lines.iter().filter_map(|line| line.split("failed=").nth(1)?.split(' ').next()).collect();
    assert_eq!(counts, ["1", "59", "59", "59", "180"], "{lines:#?}");
    assert!(lines[4].starts_with("INFO") && lines[4].contains("rate limit storage recovered"), "{lines:#?}");
    for line in &lines[..4] {
        assert!(line.starts_with("WARN") && line.matches(FAILURE).count() == 1, "the cause occurs once: {line}");
    }
}

/// Failed lookups of policies are counted apart from failures of the storage, which works.
#[test]
fn failed_look_up_is_logged_once_per_second_and_not_as_a_failure_of_the_storage() {
    let lines = log_in_paused_time(async {
        let lookup = PolicyLookup::new(
            |head: &Head<'_>| Ok(head.headers.get("x-client").cloned()),
            |_| async { Err::<Policy, _>("no database") },
        );
        let service = RateLimitLayer::new(lookup, Header::new("x-client")).layer(Inner::default());
        for _ in 0..60 {
            assert_ne!(status(&service, with("x-client", "a")).await, 429);
            tokio::time::sleep(Duration::from_millis(17)).await;
        }
    });
    let warnings: Vec<_> = lines.iter().filter(|line| line.starts_with("WARN")).collect();
    assert_eq!(warnings.len(), 2, "{lines:#?}");
    for line in warnings {
        assert!(line.contains("lookup of a rate limit policy failed") && line.contains("no database"), "{line}");
    }
}

/// A storage that fails at every second request does not log a new outage each time.
#[test]
fn intermittent_failures_log_one_line_per_second() {
    let lines = log_in_paused_time(async {
        let (storage, _) = FakeStorage::in_memory(Behavior::Works);
        let layer = RateLimitLayer::new(policy("1000/day"), Header::new("x-client"));
        let service = layer.storage(storage.clone(), OnError::Refuse).layer(Inner::default());
        for i in 0..200 {
            storage.set(if i % 2 == 0 { Behavior::Fails } else { Behavior::Works });
            status(&service, with("x-client", "a")).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert_eq!(lines.len(), 2, "{lines:#?}");
}

/// A misconfigured server logs an error at the first request, then at most one per minute.
#[test]
fn missing_peer_logs_one_error_per_minute() {
    let lines = log_in_paused_time(async {
        let service = RateLimitLayer::new(policy("1/day"), PeerIp::new()).layer(Inner::default());
        for _ in 0..121 {
            assert_eq!(status(&service, get("/")).await, 500);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    let counts: Vec<&str> = lines.iter().filter_map(|line| line.split("requests=").nth(1)?.split(' ').next()).collect();
    assert_eq!(counts, ["1", "60", "60"], "{lines:#?}");
    assert!(lines.iter().all(|line| line.starts_with("ERROR") && line.contains("connect_info")), "{lines:#?}");
}
