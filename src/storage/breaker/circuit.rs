//! The state machine of the circuit breaker: closed, open, or probing the primary.
//!
//! A result counts only in the epoch in which its request was sent. Otherwise requests that still
//! wait for the dead server would fail after it is back, and open the circuit again.
//!
//! A probe is a hit of a client, because a timer would have to invent a hit on a key that does not
//! exist. Only a change is a probe or ends a series of failures: on a server that has become a
//! replica, all peeks and all refusals succeed. A refusal does end a probe, because if all windows
//! are spent, there is nothing else.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::state::{self, CircuitState, PathCounts, Phase};
use crate::storage::{StorageError, StorageErrorKind};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::unpoisoned;
use crate::sync::{Mutex, MutexGuard};
use crate::time::{micros, random_up_to};

#[cfg(all(test, tower_ratelimit_loom))]
mod loom;

/// A handle to the state of a [`Breaker`](super::Breaker), returned by
/// [`Breaker::circuit`](super::Breaker::circuit). Clones refer to the same breaker.
#[derive(Clone)]
pub struct Circuit(Arc<CircuitInner>);

/// The failure threshold and the probe times of a circuit.
#[derive(Clone, Copy, Debug)]
pub(super) struct CircuitSettings {
    /// The consecutive failures that open the circuit.
    pub(super) failures: u32,
    /// The time from opening to the first probe, before jitter.
    pub(super) shortest: Duration,
    /// The longest time between two probes, before jitter.
    pub(super) longest: Duration,
}

struct CircuitInner {
    settings: CircuitSettings,
    /// The number of times that the circuit opened or closed. The circuit is closed if the number
    /// is even. The result of a call that started in an earlier epoch is ignored.
    epoch: AtomicU64,
    /// The number of consecutive failures. Changed only with the lock held.
    failures: AtomicU32,
    /// The earliest time of the next probe, in microseconds since `created`. Changed only with the
    /// lock held.
    not_before: AtomicU64,
    created: Instant,
    probe_state: Mutex<ProbeState>,
    counts: PathCounts,
}

#[derive(Default)]
struct ProbeState {
    /// The current time between two probes, before jitter.
    wait: Duration,
    /// The probe in flight. Probes are numbered from 1.
    probe: Option<u64>,
    /// The number of probes that were started.
    probes: u64,
    /// The latest error of the primary since its latest success.
    error: Option<StorageError>,
}

/// The permission to call the primary. The caller reports the result with
/// [`succeeded`](Self::succeeded), [`decided`](Self::decided) or [`failed`](Self::failed). Dropping
/// the permit of a probe without a result abandons the probe.
pub(super) struct CallPermit {
    circuit: Circuit,
    epoch: u64,
    /// The number of the probe, if the call is one.
    probe: Option<u64>,
    /// `true` if the call changes a state in the primary, so that its success proves that the
    /// primary accepts writes.
    is_write: bool,
}

impl Drop for CircuitInner {
    fn drop(&mut self) {
        if !is_closed(self.epoch.load(Ordering::Relaxed)) {
            state::left_open();
        }
    }
}

impl Circuit {
    pub(super) fn new(settings: CircuitSettings) -> Self {
        Self(Arc::new(CircuitInner {
            settings,
            epoch: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            not_before: AtomicU64::new(0),
            created: Instant::now(),
            probe_state: Mutex::default(),
            counts: PathCounts::default(),
        }))
    }

    /// Returns a snapshot of the breaker's state.
    pub fn state(&self) -> CircuitState {
        let (probe_state, now) = (self.lock(), self.now());
        let phase = match probe_state.probe {
            _ if self.is_closed() => Phase::Closed,
            None => Phase::Open,
            Some(_) => Phase::Probing,
        };
        let not_before = self.0.not_before.load(Ordering::Relaxed);
        let counts = &self.0.counts;
        CircuitState {
            phase,
            failures: self.0.failures.load(Ordering::Relaxed),
            probe_in: (phase == Phase::Open).then(|| Duration::from_micros(not_before.saturating_sub(now))),
            by_primary: counts.primary.load(Ordering::Relaxed),
            by_fallback: counts.fallback.load(Ordering::Relaxed),
            by_none: counts.none.load(Ordering::Relaxed),
        }
    }

    pub(super) fn settings(&self) -> CircuitSettings {
        self.0.settings
    }

    pub(super) fn counts(&self) -> &PathCounts {
        &self.0.counts
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        is_closed(self.0.epoch.load(Ordering::Acquire))
    }

    /// Returns `true` if the time of the next probe has come.
    pub(super) fn is_probe_due(&self) -> bool {
        self.now() >= self.0.not_before.load(Ordering::Relaxed)
    }

    /// Returns the time in microseconds until the primary may be called again, at least 1. If the
    /// circuit is closed, returns the time from opening to the first probe instead.
    pub(super) fn until_probe(&self) -> u64 {
        if self.is_closed() {
            return micros(self.0.settings.shortest);
        }
        self.0.not_before.load(Ordering::Relaxed).saturating_sub(self.now()).max(1)
    }

    /// Returns the error of a call while the circuit is open. The source of the error is the last
    /// error of the primary.
    pub(super) fn open_error(&self) -> StorageError {
        let message = "rate limit storage is not called while the circuit breaker is open";
        let (error, last) = (StorageError::new(StorageErrorKind::CircuitOpen, message), self.lock().error.clone());
        if let Some(last) = last { error.with_source(last) } else { error }
    }

    /// Returns a permit to call the primary if the circuit is closed, or if the call is the next
    /// probe. Only a call that changes a state can be a probe, because a server that accepts reads
    /// may still reject writes.
    #[inline]
    pub(super) fn try_acquire(&self, is_write: bool) -> Option<CallPermit> {
        let epoch = self.0.epoch.load(Ordering::Acquire);
        if is_closed(epoch) {
            return Some(CallPermit { circuit: self.clone(), epoch, probe: None, is_write });
        }
        if is_write && self.is_probe_due() { self.probe() } else { None }
    }

    #[cold]
    fn probe(&self) -> Option<CallPermit> {
        let mut probe_state = self.lock();
        // Another thread may have started a probe or closed the circuit.
        let epoch = self.0.epoch.load(Ordering::Acquire);
        if is_closed(epoch) {
            return Some(CallPermit { circuit: self.clone(), epoch, probe: None, is_write: true });
        }
        if !self.is_probe_due() {
            return None;
        }
        probe_state.probes += 1;
        probe_state.probe = Some(probe_state.probes);
        // If this probe never ends, the next one can start after this time.
        self.delay_probe(self.0.settings.longest);
        Some(CallPermit { circuit: self.clone(), epoch, probe: probe_state.probe, is_write: true })
    }

    fn succeeded(&self, permit: &CallPermit) {
        if !permit.is_write || permit.probe.is_none() && self.0.failures.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut probe_state = self.lock();
        if self.0.epoch.load(Ordering::Acquire) != permit.epoch {
            return;
        }
        self.0.failures.store(0, Ordering::Relaxed);
        probe_state.error = None;
        if permit.probe.is_some() {
            probe_state.probe = None;
            self.0.epoch.store(permit.epoch + 1, Ordering::Release);
            drop(probe_state);
            state::closed();
        }
    }

    fn failed(&self, permit: &CallPermit, error: &StorageError) {
        let mut probe_state = self.lock();
        let is_old = self.0.epoch.load(Ordering::Acquire) != permit.epoch;
        if is_old || permit.probe.is_some() && permit.probe != probe_state.probe {
            return;
        }
        let settings = self.0.settings;
        let failures = self.0.failures.load(Ordering::Relaxed).saturating_add(1);
        self.0.failures.store(failures, Ordering::Relaxed);
        probe_state.error = Some(error.clone());
        if permit.probe.is_some() {
            probe_state.probe = None;
            probe_state.wait = (probe_state.wait * 2).min(settings.longest);
            self.delay_probe(with_jitter(probe_state.wait));
        } else if failures >= settings.failures {
            probe_state.wait = settings.shortest;
            self.delay_probe(with_jitter(probe_state.wait));
            self.0.epoch.store(permit.epoch + 1, Ordering::Release);
            drop(probe_state);
            state::opened(failures, error);
        }
    }

    /// Records that a probe ended without a result.
    fn abandoned(&self, permit: &CallPermit) {
        let mut probe_state = self.lock();
        if self.0.epoch.load(Ordering::Acquire) == permit.epoch && probe_state.probe == permit.probe {
            probe_state.probe = None;
            self.delay_probe(with_jitter(probe_state.wait));
        }
    }

    /// Sets the time of the next probe. The caller holds the lock.
    fn delay_probe(&self, wait: Duration) {
        self.0.not_before.store(self.now().saturating_add(micros(wait)), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        micros(Instant::now().saturating_duration_since(self.0.created))
    }

    fn lock(&self) -> MutexGuard<'_, ProbeState> {
        unpoisoned(self.0.probe_state.lock())
    }
}

const fn is_closed(epoch: u64) -> bool {
    epoch.is_multiple_of(2)
}

/// Subtracts up to 50 % of jitter, so that replicas do not probe the same server at the same time.
fn with_jitter(wait: Duration) -> Duration {
    wait.saturating_sub(random_up_to(wait / 2))
}

impl CallPermit {
    pub(super) fn succeeded(mut self) {
        self.circuit.succeeded(&self);
        self.probe = None;
    }

    /// Records a decision. A probe that is refused closes the circuit, like one that is admitted.
    /// Any other refusal does not reset the count of failures, because the primary may have decided
    /// it without a write.
    pub(super) fn decided(self, is_admitted: bool) {
        if is_admitted || self.probe.is_some() {
            self.succeeded();
        }
    }

    /// Records a failure, unless the error concerns one policy or key. Such a probe allows another.
    pub(super) fn failed(mut self, error: &StorageError) {
        if matches!(error.kind(), StorageErrorKind::Unsupported | StorageErrorKind::Contended) {
            return;
        }
        self.circuit.failed(&self, error);
        self.probe = None;
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        if self.probe.is_some() {
            self.circuit.abandoned(self);
        }
    }
}

impl fmt::Debug for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Circuit").field(&self.state()).finish()
    }
}

#[cfg(all(test, not(tower_ratelimit_loom)))]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Threads check the time before they take the lock. So several threads can find that a probe
    /// is due.
    #[test]
    fn only_one_of_many_threads_probes() {
        let shortest = Duration::from_millis(1);
        let circuit = Circuit::new(CircuitSettings { failures: 1, shortest, longest: Duration::from_secs(3_600) });
        circuit.try_acquire(true).unwrap().failed(&StorageError::other("it fails"));
        let barrier = Barrier::new(4);
        for _ in 0..300 {
            let permits = AtomicU32::new(0);
            while !circuit.is_probe_due() {
                thread::yield_now();
            }
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        barrier.wait();
                        let permit = circuit.try_acquire(true);
                        permits.fetch_add(permit.is_some().into(), Ordering::Relaxed);
                        // Dropping the permit earlier would allow another probe.
                        barrier.wait();
                    });
                }
            });
            assert_eq!(permits.into_inner(), 1);
            assert_eq!(circuit.state().phase, Phase::Open);
        }
    }
}
