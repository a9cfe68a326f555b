//! Whether the primary is asked, left alone, or tried by one.

use std::error::Error;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::state::{CircuitState, Counts, Phase};
use super::telemetry;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::time::micros;

#[cfg(all(test, tower_ratelimit_loom))]
mod loom;

pub(super) type Shared = Arc<dyn Error + Send + Sync>;

/// A handle on the state of a [`Breaker`](super::Breaker) that does not depend on the types of the
/// storages.
#[derive(Clone)]
pub struct Circuit(Arc<Inner>);

/// When the primary is left alone, and how soon it is tried again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) failures: u32,
    pub(super) shortest: Duration,
    pub(super) longest: Duration,
}

struct Inner {
    patience: Patience,
    /// Even while closed, and another number after each change: what was asked before one says nothing after it.
    epoch: AtomicU64,
    /// In a row. Changed only with the lock held.
    failures: AtomicU32,
    /// Nobody tries the primary before, in microseconds since `born`. Changed only with the lock held.
    not_before: AtomicU64,
    born: Instant,
    past: Mutex<Past>,
    counts: Counts,
}

#[derive(Default)]
struct Past {
    /// For how long the primary was left alone the last time.
    wait: Duration,
    /// The number of the probe that is under way.
    probe: Option<u64>,
    probes: u64,
    error: Option<Shared>,
}

/// Leave to ask the primary. What came of it is told with it; a probe of which nothing is told is over when it is dropped.
pub(super) struct Permit {
    circuit: Circuit,
    epoch: u64,
    probe: Option<u64>,
    /// Whether an answer shows that the primary can do what hits need.
    changes: bool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !is_closed(self.epoch.load(Ordering::Relaxed)) {
            telemetry::ended();
        }
    }
}

impl Circuit {
    pub(super) fn new(patience: Patience) -> Self {
        Self(Arc::new(Inner {
            patience,
            epoch: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            not_before: AtomicU64::new(0),
            born: Instant::now(),
            past: Mutex::default(),
            counts: Counts::default(),
        }))
    }

    /// Returns a snapshot of the state.
    pub fn state(&self) -> CircuitState {
        let (past, now) = (self.lock(), self.now());
        let phase = match past.probe {
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

    pub(super) fn patience(&self) -> Patience {
        self.0.patience
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        is_closed(self.0.epoch.load(Ordering::Acquire))
    }

    /// Whether the next hit tries the primary.
    pub(super) fn is_due(&self) -> bool {
        self.now() >= self.0.not_before.load(Ordering::Relaxed)
    }

    /// How long until the primary may be asked, in microseconds, at least 1.
    pub(super) fn wait(&self) -> u64 {
        if self.is_closed() {
            return micros(self.0.patience.shortest);
        }
        self.0.not_before.load(Ordering::Relaxed).saturating_sub(self.now()).max(1)
    }

    pub(super) fn last_error(&self) -> Option<Shared> {
        self.lock().error.clone()
    }

    /// Leave to ask the primary, if there is. Only what `changes` something is a probe: a server that can be read from may still
    /// not be written to.
    #[inline]
    pub(super) fn ask(&self, changes: bool) -> Option<Permit> {
        let epoch = self.0.epoch.load(Ordering::Acquire);
        if is_closed(epoch) {
            return Some(Permit { circuit: self.clone(), epoch, probe: None, changes });
        }
        if changes && self.is_due() { self.probe() } else { None }
    }

    #[cold]
    fn probe(&self) -> Option<Permit> {
        let mut past = self.lock();
        // Somebody else may have been faster.
        let epoch = self.0.epoch.load(Ordering::Acquire);
        if is_closed(epoch) {
            return Some(Permit { circuit: self.clone(), epoch, probe: None, changes: true });
        }
        if !self.is_due() {
            return None;
        }
        past.probes += 1;
        past.probe = Some(past.probes);
        // One that is never heard of again is not waited for.
        self.leave_alone_for(self.0.patience.longest);
        Some(Permit { circuit: self.clone(), epoch, probe: past.probe, changes: true })
    }

    fn succeeded(&self, permit: &Permit) {
        if !permit.changes || permit.probe.is_none() && self.0.failures.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut past = self.lock();
        if self.0.epoch.load(Ordering::Acquire) != permit.epoch {
            return;
        }
        self.0.failures.store(0, Ordering::Relaxed);
        past.error = None;
        if permit.probe.is_some() {
            past.probe = None;
            self.0.epoch.store(permit.epoch + 1, Ordering::Release);
            drop(past);
            telemetry::closed();
        }
    }

    fn failed(&self, permit: &Permit, error: &Shared) {
        let mut past = self.lock();
        let is_old = self.0.epoch.load(Ordering::Acquire) != permit.epoch;
        if is_old || permit.probe.is_some() && permit.probe != past.probe {
            return;
        }
        let patience = self.0.patience;
        let failures = self.0.failures.load(Ordering::Relaxed).saturating_add(1);
        self.0.failures.store(failures, Ordering::Relaxed);
        past.error = Some(Arc::clone(error));
        if permit.probe.is_some() {
            past.probe = None;
            past.wait = (past.wait * 2).min(patience.longest);
            self.leave_alone_for(about(past.wait));
        } else if failures >= patience.failures {
            past.wait = patience.shortest;
            self.leave_alone_for(about(past.wait));
            self.0.epoch.store(permit.epoch + 1, Ordering::Release);
            drop(past);
            telemetry::opened(failures, &**error);
        }
    }

    /// Whoever tried it has gone, and says nothing of it.
    fn gave_up(&self, permit: &Permit) {
        let mut past = self.lock();
        if self.0.epoch.load(Ordering::Acquire) == permit.epoch && past.probe == permit.probe {
            past.probe = None;
            self.leave_alone_for(about(past.wait));
        }
    }

    /// With the lock held.
    fn leave_alone_for(&self, wait: Duration) {
        self.0.not_before.store(self.now().saturating_add(micros(wait)), Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        micros(Instant::now().saturating_duration_since(self.0.born))
    }

    fn lock(&self) -> MutexGuard<'_, Past> {
        self.0.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn is_closed(epoch: u64) -> bool {
    epoch.is_multiple_of(2)
}

/// So long or up to half of it less: replicas that lost the same server do not come back to it all at once.
fn about(wait: Duration) -> Duration {
    let (wait, half) = (micros(wait), micros(wait) / 2);
    Duration::from_micros(wait - RandomState::new().hash_one(half) % (half + 1))
}

impl Permit {
    pub(super) fn succeeded(mut self) {
        self.circuit.succeeded(&self);
        self.probe = None;
    }

    /// Whoever is refused may only have been looked up: that is a sign of life, and does not end a row of failures to write.
    pub(super) fn decided(self, is_admitted: bool) {
        if is_admitted || self.probe.is_some() {
            self.succeeded();
        }
    }

    /// The error, which others may be told too.
    pub(super) fn failed(mut self, error: Shared) -> Shared {
        self.circuit.failed(&self, &error);
        self.probe = None;
        error
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.probe.is_some() {
            self.circuit.gave_up(self);
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

    /// That it is time is seen before anybody is let through.
    #[test]
    fn of_many_threads_that_find_it_time_one_is_let_through() {
        let shortest = Duration::from_millis(1);
        let circuit = Circuit::new(Patience { failures: 1, shortest, longest: Duration::from_secs(3_600) });
        circuit.ask(true).unwrap().failed(Arc::new(std::io::Error::other("it fails")));
        let barrier = Barrier::new(4);
        for _ in 0..300 {
            let let_through = AtomicU32::new(0);
            while !circuit.is_due() {
                thread::yield_now();
            }
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        barrier.wait();
                        let permit = circuit.ask(true);
                        let_through.fetch_add(permit.is_some().into(), Ordering::Relaxed);
                        // Nobody gives it up before all have asked.
                        barrier.wait();
                    });
                }
            });
            assert_eq!(let_through.into_inner(), 1);
            assert_eq!(circuit.state().phase, Phase::Open);
        }
    }
}
