//! Models of the circuit that `scripts/loom` runs in all their interleavings.
//!
//! The clock is tokio's and paused: a shortest wait of zero is always over, and one of an hour never.

use std::io;

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
    Arc::new(Circuit::new(Patience { failures, shortest, longest }))
}

/// Open, and its first probe is due.
fn open(longest: Duration) -> Arc<Circuit> {
    let circuit = circuit(1, Duration::ZERO, longest);
    fail(circuit.ask(true));
    assert_eq!(circuit.epoch(), 1);
    circuit
}

fn fail(permit: Option<Permit>) {
    permit.unwrap().failed(Arc::new(io::Error::other("it fails")));
}

fn succeed(permit: Option<Permit>) {
    permit.unwrap().succeeded();
}

impl Circuit {
    fn epoch(&self) -> u64 {
        self.0.epoch.load(Ordering::Relaxed)
    }
}

#[test]
fn one_probe_at_a_time_is_let_through() {
    model(|race| {
        let circuit = open(HOUR);
        let (one, two) = race.run(&circuit, |circuit| circuit.ask(true), |circuit| circuit.ask(true));
        assert!(one.is_some() != two.is_some());
        assert_eq!(circuit.state().phase, Phase::Probing);
    });
}

#[test]
fn threshold_failures_of_two_threads_open_it_once() {
    for failures in [1, 2] {
        model(move |race| {
            let circuit = circuit(failures, Duration::ZERO, HOUR);
            let (one, two) = (circuit.ask(true), circuit.ask(true));
            race.run(&circuit, |_| fail(one), |_| fail(two));
            // A late failure is not counted.
            assert_eq!((circuit.epoch(), circuit.state().failures), (1, failures));
        });
    }
}

#[test]
fn circuit_that_is_seen_open_is_not_due_before_its_time() {
    model(|race| {
        let circuit = circuit(1, HOUR, HOUR);
        let permit = circuit.ask(true);
        let look = |circuit: &Circuit| circuit.is_closed() || !circuit.is_due() && circuit.ask(true).is_none();
        let ((), is_right) = race.run(&circuit, |_| fail(permit), look);
        assert!(is_right);
    });
}

#[test]
fn failure_from_before_it_opened_does_not_reopen_it() {
    model(|race| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.ask(true), circuit.ask(true));
        fail(first);
        race.run(&circuit, |circuit| succeed(circuit.ask(true)), |_| fail(old));
        assert_eq!((circuit.epoch(), circuit.state().failures), (2, 0));
    });
}

#[test]
fn success_from_before_it_opened_does_not_change_it() {
    model(|race| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.ask(true), circuit.ask(true));
        race.run(&circuit, |_| fail(first), |_| succeed(old));
        assert_eq!((circuit.epoch(), circuit.state().failures), (1, 1));
    });
}

/// With a longest wait of zero, nobody waits for a probe's answer, so there can be two.
#[test]
fn success_of_a_probe_from_before_it_closed_does_not_close_it_again() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        let (old, new) = (circuit.ask(true), circuit.ask(true));
        let close_and_open = |circuit: &Circuit| {
            succeed(new);
            fail(circuit.ask(true));
        };
        race.run(&circuit, close_and_open, |_| succeed(old));
        assert_eq!(circuit.epoch(), 3);
    });
}

#[test]
fn two_probes_that_succeed_close_it_once() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        race.run(&circuit, |circuit| succeed(circuit.ask(true)), |circuit| succeed(circuit.ask(true)));
        assert_eq!(circuit.epoch(), 2);
    });
}

#[test]
fn end_of_an_older_probe_is_not_the_end_of_a_newer_one() {
    for end in [fail, drop] {
        model(move |race| {
            let circuit = open(Duration::ZERO);
            let older = circuit.ask(true);
            let ((), newer) = race.run(&circuit, move |_| end(older), |circuit| circuit.ask(true));
            assert_eq!((newer.is_some(), circuit.state().phase), (true, Phase::Probing));
        });
    }
}

#[test]
fn probe_that_is_dropped_makes_way_for_the_next() {
    model(|race| {
        let circuit = open(HOUR);
        race.run(&circuit, |circuit| drop(circuit.ask(true)), |circuit| drop(circuit.ask(true)));
        assert_eq!(circuit.state().phase, Phase::Open);
        assert!(circuit.ask(true).is_some());
    });
}

#[test]
fn probe_that_fails_while_another_is_dropped_makes_way_for_the_next() {
    for longest in [HOUR, Duration::ZERO] {
        model(move |race| {
            let circuit = open(longest);
            let fail_if_asked = |circuit: &Circuit| {
                let permit = circuit.ask(true);
                if permit.is_some() {
                    fail(permit);
                }
            };
            race.run(&circuit, |circuit| drop(circuit.ask(true)), fail_if_asked);
            assert_eq!(circuit.state().phase, Phase::Open);
            assert!(circuit.ask(true).is_some());
        });
    }
}

#[test]
fn probe_that_succeeds_while_another_is_dropped_closes_it() {
    model(|race| {
        let circuit = open(Duration::ZERO);
        let (one, two) = (circuit.ask(true), circuit.ask(true));
        race.run(&circuit, |_| succeed(one), |_| drop(two));
        assert_eq!(circuit.state().phase, Phase::Closed);
        assert!(circuit.ask(true).is_some_and(|permit| permit.probe.is_none()));
    });
}
