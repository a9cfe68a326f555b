//! Models of the circuit. `scripts/loom` runs all of their interleavings.
//!
//! The clock is tokio's paused clock. If the shortest time between probes is zero, a probe is
//! always due. If it is an hour, no probe is ever due.

use tokio::runtime::Builder;

use super::*;
use crate::sync::race::{self, Race};

const HOUR: Duration = Duration::from_secs(3_600);

fn model(f: impl Fn(Race) + Copy + Send + Sync + 'static) {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    race::model(f);
}

fn circuit(failures: u32, shortest: Duration, longest: Duration) -> Arc<Circuit> {
    Arc::new(Circuit::new(CircuitSettings { failures, shortest, longest }))
}

/// Returns an open circuit whose first probe is due.
fn open(longest: Duration) -> Arc<Circuit> {
    let circuit = circuit(1, Duration::ZERO, longest);
    fail(circuit.try_acquire(true));
    assert_eq!(circuit.epoch(), 1);
    circuit
}

fn fail(permit: Option<CallPermit>) {
    permit.unwrap().failed(&StorageError::other("it fails"));
}

fn succeed(permit: Option<CallPermit>) {
    permit.unwrap().succeeded();
}

impl Circuit {
    fn epoch(&self) -> u64 {
        self.0.epoch.load(Ordering::Relaxed)
    }
}

#[test]
fn only_one_probe_runs_at_a_time() {
    model(|race| {
        let circuit = open(HOUR);
        let (one, two) = race.run(&circuit, |circuit| circuit.try_acquire(true), |circuit| circuit.try_acquire(true));
        assert!(one.is_some() != two.is_some());
        assert_eq!(circuit.state().phase, Phase::Probing);
    });
}

#[test]
fn failures_of_two_threads_open_the_circuit_once() {
    for failures in [1, 2] {
        model(move |race| {
            let circuit = circuit(failures, Duration::ZERO, HOUR);
            let (one, two) = (circuit.try_acquire(true), circuit.try_acquire(true));
            race.run(&circuit, |_| fail(one), |_| fail(two));
            // A failure that arrives after the circuit has opened is not counted.
            assert_eq!((circuit.epoch(), circuit.state().failures), (1, failures));
        });
    }
}

#[test]
fn open_circuit_does_not_probe_early() {
    model(|race| {
        let circuit = circuit(1, HOUR, HOUR);
        let permit = circuit.try_acquire(true);
        let is_closed_or_waits =
            |circuit: &Circuit| circuit.is_closed() || !circuit.is_probe_due() && circuit.try_acquire(true).is_none();
        let ((), holds) = race.run(&circuit, |_| fail(permit), is_closed_or_waits);
        assert!(holds);
    });
}

#[test]
fn failure_from_before_the_outage_does_not_reopen_the_circuit() {
    model(|race| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.try_acquire(true), circuit.try_acquire(true));
        fail(first);
        race.run(&circuit, |circuit| succeed(circuit.try_acquire(true)), |_| fail(old));
        assert_eq!((circuit.epoch(), circuit.state().failures), (2, 0));
    });
}

#[test]
fn success_from_before_the_outage_does_not_close_the_circuit() {
    model(|race| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.try_acquire(true), circuit.try_acquire(true));
        race.run(&circuit, |_| fail(first), |_| succeed(old));
        assert_eq!((circuit.epoch(), circuit.state().failures), (1, 1));
    });
}

/// With a longest wait of zero, a second probe can start before the first one has ended.
#[test]
fn late_probe_success_does_not_close_a_reopened_circuit() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        let (old, new) = (circuit.try_acquire(true), circuit.try_acquire(true));
        let close_and_open = |circuit: &Circuit| {
            succeed(new);
            fail(circuit.try_acquire(true));
        };
        race.run(&circuit, close_and_open, |_| succeed(old));
        assert_eq!(circuit.epoch(), 3);
    });
}

#[test]
fn two_successful_probes_close_the_circuit_once() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        race.run(&circuit, |circuit| succeed(circuit.try_acquire(true)), |circuit| succeed(circuit.try_acquire(true)));
        assert_eq!(circuit.epoch(), 2);
    });
}

#[test]
fn end_of_an_older_probe_does_not_end_a_newer_one() {
    for end in [fail, drop] {
        model(move |race| {
            let circuit = open(Duration::ZERO);
            let older = circuit.try_acquire(true);
            let ((), newer) = race.run(&circuit, move |_| end(older), |circuit| circuit.try_acquire(true));
            assert_eq!((newer.is_some(), circuit.state().phase), (true, Phase::Probing));
        });
    }
}

#[test]
fn dropped_probe_allows_the_next_one() {
    model(|race| {
        let circuit = open(HOUR);
        race.run(&circuit, |circuit| drop(circuit.try_acquire(true)), |circuit| drop(circuit.try_acquire(true)));
        assert_eq!(circuit.state().phase, Phase::Open);
        assert!(circuit.try_acquire(true).is_some());
    });
}

#[test]
fn failed_and_dropped_probes_allow_the_next_one() {
    for longest in [HOUR, Duration::ZERO] {
        model(move |race| {
            let circuit = open(longest);
            let fail_if_permitted = |circuit: &Circuit| {
                let permit = circuit.try_acquire(true);
                if permit.is_some() {
                    fail(permit);
                }
            };
            race.run(&circuit, |circuit| drop(circuit.try_acquire(true)), fail_if_permitted);
            assert_eq!(circuit.state().phase, Phase::Open);
            assert!(circuit.try_acquire(true).is_some());
        });
    }
}

#[test]
fn successful_probe_closes_the_circuit_while_another_is_dropped() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        let (one, two) = (circuit.try_acquire(true), circuit.try_acquire(true));
        race.run(&circuit, |_| succeed(one), |_| drop(two));
        assert_eq!(circuit.state().phase, Phase::Closed);
        assert!(circuit.try_acquire(true).is_some_and(|permit| permit.probe.is_none()));
    });
}
