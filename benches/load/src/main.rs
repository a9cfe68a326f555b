//! Asks a server for the same answer under different layers, over loopback, in turns, and judges what it costs it.
//!
//! The goals are on the server's own time: requests a second also tell how busy the one who asks was.

mod server;
mod wrk;

use server::Server;

/// An odd number, so that the median is a sample.
const ROUNDS: usize = 13;

const ROUTES: [(&str, Answer); 7] = [
    ("bare", Answer::Admitted),
    ("limited", Answer::Admitted),
    ("refused", Answer::Refused),
    ("limited-no-headers", Answer::Admitted),
    ("bare-same-headers", Answer::Admitted),
    ("governor", Answer::Admitted),
    ("governor-refused", Answer::Refused),
];

#[derive(Clone, Copy)]
enum Answer {
    Admitted,
    Refused,
}

/// What a route did in each round.
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
            ask(&server, ROUTES[turn], &mut routes[turn]);
        }
    }

    println!("{:<18} {:>10} {:>22}", "route", "requests/s", "server us per request");
    for ((name, _), figures) in ROUTES.iter().zip(&routes) {
        println!("{name:<18} {:>10.0} {:>22.2}", median(&figures.per_second), median(&figures.micros));
    }
    println!("\nserver time, medians of {ROUNDS} rounds");
    let [bare, limited, refused, ..] = routes.map(|figures| figures.micros);
    judge("bare / limited", &bare, &limited, 0.97);
    judge("limited / refused", &limited, &refused, 1.0);
}

fn ask(server: &Server, (route, expected): (&str, Answer), figures: &mut Figures) {
    let before = server.cpu_micros();
    let asked = wrk::ask(&server.url(route));
    let spent = server.cpu_micros() - before;
    let as_expected = match expected {
        Answer::Admitted => asked.refused == 0,
        // The first of them all is admitted.
        Answer::Refused => asked.requests - asked.refused <= 1,
    };
    assert!(as_expected, "/{route} refused {} of {} requests", asked.refused, asked.requests);
    figures.per_second.push(asked.per_second);
    figures.micros.push(spent / asked.requests as f64);
}

/// Round by round: what slowed one of them slowed the other.
fn judge(name: &str, this: &[f64], other: &[f64], goal: f64) {
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
