use super::{Event, EventKind, Observer};
use crate::storage::PATHS;

/// Counts decisions with the crate `metrics` (feature `metrics`), for whatever recorder the program has installed.
///
/// | counter | labels | counts |
/// |---|---|---|
/// | `ratelimit_decisions_total` | `policy`, `outcome`, `mode` | what became of requests: see [`Event::outcome`] |
/// | `ratelimit_refunds_total` | `policy`, `outcome`, `mode` | hits, decided before, that were given back, or could not be |
/// | `ratelimit_refusal_cache_total` | `policy`, `by` | hits that a [`RefusalCache`](crate::storage::RefusalCache) refused (`here`), and those it asked the `storage` inside about, whatever that is |
/// | `ratelimit_leases_total` | `policy`, `by` | hits that [`Leases`](crate::storage::Leases) answered (`here`), and questions to the `storage` inside |
/// | `ratelimit_path_total` | `path` | decisions that a [`Breaker`](crate::storage::Breaker) has passed on, by who made them: `primary`, `fallback` or `none` |
/// | `ratelimit_clock_skew_total` | | decisions on keys whose newest decision was ahead of the clock by more than [`max_skew`](crate::storage::Cas::max_skew) |
/// | `ratelimit_memory_full_total` | `outcome` | hits for which a [`MemoryStorage`](crate::MemoryStorage) had no room: `refused` and `admitted` newcomers, `log_refused` |
///
/// | gauge | is |
/// |---|---|
/// | `ratelimit_breakers_open` | how many [`Breaker`](crate::storage::Breaker)s of this process leave their primary alone |
///
/// The last five counters and the gauge are the storages', whether or not there is an observer, without HTTP too.
///
/// `policy` is [`Policy::identity`](crate::Policy::identity), `mode` is `enforced` or `shadow`. Nothing is labelled by key: there
/// are as many of them as clients.
///
/// ```
/// use tower_ratelimit::{MetricsObserver, PeerIp, Quota, RateLimitLayer};
///
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).observer(MetricsObserver::new());
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MetricsObserver;

const DECISIONS: &str = "ratelimit_decisions_total";
const REFUNDS: &str = "ratelimit_refunds_total";

impl MetricsObserver {
    /// Describes the counters to the recorder, if one is installed by now.
    pub fn new() -> Self {
        metrics::describe_counter!(DECISIONS, "What became of requests, by policy and outcome.");
        metrics::describe_counter!(REFUNDS, "Hits given back after their responses, by policy.");
        metrics::describe_counter!(PATHS, "Decisions by the storage that made them, where one stands in for another.");
        Self
    }
}

impl Observer for MetricsObserver {
    fn observe(&self, event: &Event<'_>) {
        let policy = event.policy.identity().to_owned();
        let mode = if event.shadow { "shadow" } else { "enforced" };
        let name =
            if matches!(event.kind, EventKind::Refunded(_) | EventKind::NotRefunded(_)) { REFUNDS } else { DECISIONS };
        metrics::counter!(name, "policy" => policy, "outcome" => event.outcome(), "mode" => mode).increment(1);
    }
}
