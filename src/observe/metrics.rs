use super::{Event, EventKind};
use crate::storage::{IN_FLIGHT, LATENCY, PATHS};

const DECISIONS: &str = "ratelimit_decisions_total";
const SETTLEMENTS: &str = "ratelimit_settlements_total";
const LOCKS: &str = "ratelimit_locks_total";
const NEAR_LIMIT: &str = "ratelimit_near_limit_total";
/// The names and descriptions of the counters that storages update.
const COUNTERS: [(&str, &str); 6] = [
    ("ratelimit_refusal_cache_total", "Hits on a refusal cache, by the storage that decided."),
    ("ratelimit_leases_total", "Hits that leases admitted, and requests for units."),
    ("ratelimit_clock_skew_total", "Decisions on keys that were ahead of the clock."),
    ("ratelimit_memory_full_total", "Hits that a full memory storage could not store."),
    ("ratelimit_slot_renewals_failed_total", "Keys whose slots were not renewed."),
    ("ratelimit_memory_evictions_total", "Keys that a memory storage evicted before they expired."),
];
const SETTLED_UNITS: &str = "ratelimit_settled_units_total";

/// Returns an observer that counts events with the crate `metrics` (feature `metrics`), for the
/// recorder that the program has installed. If a recorder is installed already, describes all
/// metrics of this crate to it.
///
/// | counter | labels | counts |
/// |---|---|---|
/// | `ratelimit_decisions_total` | `policy`, `outcome`, `mode` | requests, and hits on shadow limits, by their [outcome](Event::outcome) |
/// | `ratelimit_settlements_total` | `policy`, `outcome`, `mode` | settlements of hits: `refunded` or `charged`, too late to refund anything (`expired`), failed (`settle_failed`), missing because the reservation was dropped (`unsettled`), or unnecessary because the key was `cleared` |
/// | `ratelimit_locks_total` | `policy`, `outcome`, `mode` | locks of a [`Lockout`](crate::Lockout) that have started (`locked`) |
/// | `ratelimit_near_limit_total` | `policy`, `outcome`, `mode` | hits that have brought a key [near a limit](crate::RateLimitLayer::near_limit) (`near_limit`) |
/// | `ratelimit_settled_units_total` | `policy`, `outcome`, `mode` | differences between cost and actual cost that were `refunded` or `charged`, or whose settlement failed (`settle_failed`). A refund counts in full, even if some of its units were free again |
/// | `ratelimit_refusal_cache_total` | `policy`, `by` | hits that a [`RefusalCache`](crate::storage::RefusalCache) refused (`here`), and hits that it passed to the inner storage (`storage`) |
/// | `ratelimit_leases_total` | `policy`, `by` | hits that [`Leases`](crate::storage::Leases) admitted from a lease (`here`), and requests for units to the inner storage (`storage`) |
/// | `ratelimit_path_total` | `path` | decisions through a [`Breaker`](crate::storage::Breaker), by their source: `primary`, `fallback` or `none` |
/// | `ratelimit_clock_skew_total` | | decisions on keys whose newest decision was ahead of the clock by more than [`max_skew`](crate::storage::Cas::max_skew) |
/// | `ratelimit_memory_full_total` | `outcome` | hits that a full [`MemoryStorage`](crate::MemoryStorage) could not store: new keys (`refused`, `admitted`) and logs (`log_refused`) |
/// | `ratelimit_slot_renewals_failed_total` | | keys whose slots an [`InFlightLayer`](crate::InFlightLayer) could not renew in its storage |
/// | `ratelimit_memory_evictions_total` | | keys that a [`MemoryStorage`](crate::MemoryStorage) evicted before they expired |
///
/// | gauge | labels | value |
/// |---|---|---|
/// | `ratelimit_breakers_open` | | number of [`Breaker`](crate::storage::Breaker)s in this process that are not closed |
/// | `ratelimit_storage_in_flight` | `storage` | calls to a shared storage that wait for a reply |
/// | `ratelimit_memory_keys` | | keys in all [`MemoryStorage`](crate::MemoryStorage)s of this process |
/// | `ratelimit_slots_in_use` | | slots in use of all [`InFlightLayer`](crate::InFlightLayer)s of this process |
/// | `ratelimit_slots_waiting` | | requests that wait for a slot of an [`InFlightLayer`](crate::InFlightLayer), or for the reply of its storage |
///
/// | histogram | labels | value |
/// |---|---|---|
/// | `ratelimit_storage_duration_seconds` | `storage`, `outcome` | latency of calls to a shared storage |
///
/// This observer updates the first five counters. The storages themselves update the other
/// metrics, also without this observer and without HTTP. The guide on
/// [monitoring](crate::guide::monitoring#metrics) explains the labels, and has a dashboard.
///
/// The label `policy` is [`Policy::identity`](crate::Policy::identity). The label `mode` is
/// `enforced` or `shadow`. There are no labels for keys, because their number is unbounded.
///
/// ```
/// use tower_ratelimit::{PeerIp, Quota, RateLimitLayer, metrics_observer};
///
/// let layer = RateLimitLayer::new(Quota::per_minute(60), PeerIp::new()).observer(metrics_observer());
/// ```
pub fn metrics_observer() -> impl Fn(&Event<'_>) + Copy + Send + Sync + 'static {
    metrics::describe_counter!(DECISIONS, "Requests by policy and outcome.");
    metrics::describe_counter!(SETTLEMENTS, "Settlements by policy and outcome.");
    metrics::describe_counter!(LOCKS, "Locks that have started, by policy.");
    metrics::describe_counter!(NEAR_LIMIT, "Hits that have brought a key near a limit, by policy.");
    metrics::describe_counter!(SETTLED_UNITS, "Settled units by policy and outcome.");
    metrics::describe_counter!(PATHS, "Decisions through a circuit breaker, by the storage that made them.");
    for (name, help) in COUNTERS {
        metrics::describe_counter!(name, help);
    }
    metrics::describe_gauge!("ratelimit_breakers_open", "Circuit breakers that are not closed.");
    metrics::describe_gauge!("ratelimit_memory_keys", "Keys in the memory storages.");
    metrics::describe_gauge!("ratelimit_slots_in_use", "Slots of requests in flight.");
    metrics::describe_gauge!(
        "ratelimit_slots_waiting",
        "Requests that wait for a slot, or for the reply of the storage."
    );
    metrics::describe_gauge!(IN_FLIGHT, "Calls to a shared storage that wait for a reply.");
    metrics::describe_histogram!(LATENCY, metrics::Unit::Seconds, "Latency of calls to a shared storage.");
    count
}

fn count(event: &Event<'_>) {
    let policy = event.policy.identity().to_owned();
    let (outcome, mode) = (event.outcome(), if event.shadow { "shadow" } else { "enforced" });
    let units = event.settled_units();
    if let Some(units) = units.filter(|units| *units > 0) {
        metrics::counter!(SETTLED_UNITS, "policy" => policy.clone(), "outcome" => outcome, "mode" => mode)
            .increment(units.into());
    }
    let name = match event.kind {
        EventKind::Locked(_) => LOCKS,
        EventKind::NearLimit { .. } => NEAR_LIMIT,
        _ if units.is_some() => SETTLEMENTS,
        _ => DECISIONS,
    };
    metrics::counter!(name, "policy" => policy, "outcome" => outcome, "mode" => mode).increment(1);
}
