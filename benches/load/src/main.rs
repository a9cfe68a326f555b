//! Measures the cost of layers on a server over loopback. The routes take turns, and the goals are
//! checked.
//!
//! The goals apply to the server's CPU time, because requests per second depend on the load
//! generator too.

mod server;
mod wrk;

use server::Server;

/// The number of rounds. It is odd, so that the median is a sample.
const ROUNDS: usize = 13;

const ROUTES: [(&str, Expected); 7] = [
    ("bare", Expected::Admitted),
    ("limited", Expected::Admitted),
    ("refused", Expected::Refused),
    ("limited-no-headers", Expected::Admitted),
    ("bare-same-headers", Expected::Admitted),
    ("governor", Expected::Admitted),
    ("governor-refused", Expected::Refused),
];

#[derive(Clone, Copy)]
enum Expected {
    Admitted,
    Refused,
}

/// The results of a route, one per round.
#[derive(Default)]
struct Figures {
    per_second: Vec<f64>,
    micros: Vec<f64>,
}

fn main() {
    let server = Server::start();
    let mut routes = ROUTES.map(|_| Figures::default());
    for round in 0..ROUNDS {
        for turn in 0..ROUTES.len() {
            let turn = if round % 2 == 0 { turn } else { ROUTES.len() - 1 - turn };
            measure(&server, ROUTES[turn], &mut routes[turn]);
        }
    }

    println!("{:<18} {:>10} {:>22}", "route", "requests/s", "server us per request");
    for ((name, _), figures) in ROUTES.iter().zip(&routes) {
        println!("{name:<18} {:>10.0} {:>22.2}", median(&figures.per_second), median(&figures.micros));
    }
    println!("\nserver time, medians of {ROUNDS} rounds");
    let [bare, limited, refused, ..] = routes.map(|figures| figures.micros);
    check_goal("bare / limited", &bare, &limited, 0.97);
    check_goal("limited / refused", &limited, &refused, 1.0);
}

fn measure(server: &Server, (route, expected): (&str, Expected), figures: &mut Figures) {
    let before = server.cpu_micros();
    let load = wrk::run(&server.url(route));
    let spent = server.cpu_micros() - before;
    let as_expected = match expected {
        Expected::Admitted => load.refused == 0,
        // Only the first request of all rounds is admitted.
        Expected::Refused => load.requests - load.refused <= 1,
    };
    assert!(as_expected, "/{route} refused {} of {} requests", load.refused, load.requests);
    figures.per_second.push(load.per_second);
    figures.micros.push(spent / load.requests as f64);
}

/// Compares the samples of the same round, because a slow machine slows both.
fn check_goal(name: &str, this: &[f64], other: &[f64], goal: f64) {
    let ratios: Vec<_> = this.iter().zip(other).map(|(this, other)| this / other).collect();
    let ratio = median(&ratios);
    let verdict = if ratio >= goal { "met" } else { "missed" };
    println!("{name:<18} {ratio:>6.3}, goal at least {goal:.2}: {verdict}");
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
