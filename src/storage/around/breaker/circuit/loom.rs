//! Models of the circuit that `scripts/loom` runs in all their interleavings.
//!
//! The clock is tokio's and paused: a shortest wait of zero is always over, and one of an hour never.

use std::io;

use ::loom::thread;
use tokio::runtime::Builder;

use super::*;

const HOUR: Duration = Duration::from_secs(3_600);

fn model(f: impl Fn() + Send + Sync + 'static) {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    ::loom::model(f);
}

fn circuit(failures: u32, shortest: Duration, longest: Duration) -> Circuit {
    Circuit::new(Patience { failures, shortest, longest })
}

/// Open, and its first probe is due.
fn open(longest: Duration) -> Circuit {
    let circuit = circuit(1, Duration::ZERO, longest);
    fail(circuit.ask(true));
    assert_eq!(circuit.epoch(), 1);
    circuit
}

fn fail(permit: Option<Permit>) {
    permit.unwrap().failed(Arc::new(io::Error::other("it fails")));
}

impl Circuit {
    fn epoch(&self) -> u64 {
        self.0.epoch.load(Ordering::Relaxed)
    }
}

#[test]
fn one_probe_at_a_time_is_let_through() {
    model(|| {
        let circuit = open(HOUR);
        let other = {
            let circuit = circuit.clone();
            thread::spawn(move || circuit.ask(true))
        };
        let mine = circuit.ask(true);
        let others = other.join().unwrap();
        assert!(mine.is_some() != others.is_some());
        assert_eq!(circuit.state().phase, Phase::Probing);
    });
}

#[test]
fn threshold_failures_of_two_threads_open_it_once() {
    for failures in [1, 2] {
        model(move || {
            let circuit = circuit(failures, Duration::ZERO, HOUR);
            let (mine, others) = (circuit.ask(true), circuit.ask(true));
            let other = thread::spawn(move || fail(others));
            fail(mine);
            other.join().unwrap();
            // A late failure is not counted.
            assert_eq!((circuit.epoch(), circuit.state().failures), (1, failures));
        });
    }
}

#[test]
fn circuit_that_is_seen_open_is_not_due_before_its_time() {
    model(|| {
        let circuit = circuit(1, HOUR, HOUR);
        let permit = circuit.ask(true);
        let other = thread::spawn(move || fail(permit));
        if !circuit.is_closed() {
            assert!(!circuit.is_due());
            assert!(circuit.ask(true).is_none());
        }
        other.join().unwrap();
    });
}

#[test]
fn failure_from_before_it_opened_does_not_reopen_it() {
    model(|| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.ask(true), circuit.ask(true));
        fail(first);
        let other = {
            let circuit = circuit.clone();
            thread::spawn(move || circuit.ask(true).unwrap().succeeded())
        };
        fail(old);
        other.join().unwrap();
        assert_eq!((circuit.epoch(), circuit.state().failures), (2, 0));
    });
}

#[test]
fn success_from_before_it_opened_does_not_change_it() {
    model(|| {
        let circuit = circuit(1, Duration::ZERO, HOUR);
        let (first, old) = (circuit.ask(true), circuit.ask(true));
        let other = thread::spawn(move || fail(first));
        old.unwrap().succeeded();
        other.join().unwrap();
        assert_eq!((circuit.epoch(), circuit.state().failures), (1, 1));
    });
}

/// With a longest wait of zero, nobody waits for a probe's answer, so there can be two.
#[test]
fn success_of_a_probe_from_before_it_closed_does_not_close_it_again() {
    model(|| {
        let circuit = open(Duration::ZERO);
        let (old, new) = (circuit.ask(true), circuit.ask(true));
        let other = {
            let circuit = circuit.clone();
            thread::spawn(move || {
                new.unwrap().succeeded();
                fail(circuit.ask(true));
            })
        };
        old.unwrap().succeeded();
        other.join().unwrap();
        assert_eq!(circuit.epoch(), 3);
    });
}

#[test]
fn two_probes_that_succeed_close_it_once() {
    model(|| {
        let circuit = open(Duration::ZERO);
        let other = {
            let circuit = circuit.clone();
            thread::spawn(move || circuit.ask(true).unwrap().succeeded())
        };
        circuit.ask(true).unwrap().succeeded();
        other.join().unwrap();
        assert_eq!(circuit.epoch(), 2);
    });
}

#[test]
fn end_of_an_older_probe_is_not_the_end_of_a_newer_one() {
    for older in [fail, drop] {
        model(move || {
            let circuit = open(Duration::ZERO);
            let permit = circuit.ask(true);
            let other = thread::spawn(move || older(permit));
            let newer = circuit.ask(true);
            other.join().unwrap();
            assert_eq!((newer.is_some(), circuit.state().phase), (true, Phase::Probing));
        });
    }
}

#[test]
fn probe_that_is_dropped_makes_way_for_the_next() {
    model(|| {
        let circuit = open(HOUR);
        let other = {
            let circuit = circuit.clone();
            thread::spawn(move || drop(circuit.ask(true)))
        };
        drop(circuit.ask(true));
        other.join().unwrap();
        assert_eq!(circuit.state().phase, Phase::Open);
        assert!(circuit.ask(true).is_some());
    });
}

#[test]
fn probe_that_fails_while_another_is_dropped_makes_way_for_the_next() {
    for longest in [HOUR, Duration::ZERO] {
        model(move || {
            let circuit = open(longest);
            let other = {
                let circuit = circuit.clone();
                thread::spawn(move || drop(circuit.ask(true)))
            };
            if let Some(permit) = circuit.ask(true) {
                fail(Some(permit));
            }
            other.join().unwrap();
            assert_eq!(circuit.state().phase, Phase::Open);
            assert!(circuit.ask(true).is_some());
        });
    }
}

#[test]
fn probe_that_succeeds_while_another_is_dropped_closes_it() {
    model(|| {
        let circuit = open(Duration::ZERO);
        let (mine, others) = (circuit.ask(true), circuit.ask(true));
        let other = thread::spawn(move || drop(others));
        mine.unwrap().succeeded();
        other.join().unwrap();
        assert_eq!(circuit.state().phase, Phase::Closed);
        assert!(circuit.ask(true).is_some_and(|permit| permit.probe.is_none()));
    });
}
