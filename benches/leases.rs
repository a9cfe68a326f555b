//! Simulates the cost and the benefit of leases: real leases of several nodes over one storage,
//! with a manual clock. So the results are reproducible. `scripts/leases` draws
//! `benches/leases.svg` with it.

#[path = "support/picture.rs"]
mod picture;

use std::fs;
use std::time::Duration;

use picture::{Curve, Panel, Scale};
use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::storage::{Clock, Leases, ManualClock, StorageRequest};
use tower_ratelimit::{FixedWindow, Key, MemoryStorage, Op, Policy, Quota, Storage};

/// The number of simulated windows per point.
const WINDOWS: u32 = 40;
const LIMIT: u32 = 10_000;
/// The length of a window in microseconds.
const MICROS: u64 = 10_000_000;

const NODES: [u32; 4] = [2, 4, 8, 16];
const SLICES: [u32; 9] = [1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000];
/// Hits in a window, in percent of the limit.
const DEMANDS: [u32; 8] = [90, 100, 105, 110, 125, 150, 200, 300];

/// The distribution of the load over the nodes.
#[derive(Clone, Copy)]
enum Load {
    Even,
    /// By Zipf's law: the second node gets half as many hits as the first.
    Uneven,
}

/// The result of a simulation, in percent.
struct Outcome {
    /// Unused units at the first refusal of a window, relative to the limit.
    unused_at_refusal: f64,
    /// Unused units at the end of a window, relative to the hits that could have been admitted.
    unused_at_end: f64,
    /// Round trips, relative to the admitted hits.
    trips: f64,
}

fn main() {
    let outcomes = by_slice();
    let [when_refused, trips] = [
        of_slices("unused at the first refusal, % of the limit", &outcomes, |outcome| outcome.unused_at_refusal),
        of_slices("round trips per 100 admitted hits", &outcomes, |outcome| outcome.trips),
    ];
    let panels = [when_refused, by_demand(), trips];
    for panel in &panels {
        println!("{panel}");
    }
    match std::env::args().nth(1).filter(|argument| !argument.starts_with("--")) {
        Some(file) => fs::write(file, picture::draw(&panels)).expect("the picture can be written"),
        None => println!("to draw the picture, name a file: benches/leases.svg"),
    }
}

/// Returns the outcomes of all slices, one entry per curve, with the name of the curve.
fn by_slice() -> Vec<(String, [Outcome; SLICES.len()])> {
    let outcomes = |nodes, load| SLICES.map(|slice| simulate(nodes, slice, load, 200));
    let even = NODES.map(|nodes| (format!("{nodes} nodes"), outcomes(nodes, Load::Even)));
    let uneven = ("8, uneven load".to_owned(), outcomes(8, Load::Uneven));
    even.into_iter().chain([uneven]).collect()
}

fn of_slices(title: &str, curves: &[(String, [Outcome; SLICES.len()])], figure: fn(&Outcome) -> f64) -> Panel {
    let curve = |(name, outcomes): &(String, [Outcome; SLICES.len()])| Curve {
        name: name.clone(),
        points: SLICES.iter().zip(outcomes).map(|(slice, outcome)| (percent(*slice, LIMIT), figure(outcome))).collect(),
    };
    Panel {
        title: title.to_owned(),
        x: "slice, % of the limit",
        scale: Scale::Logarithmic,
        curves: curves.iter().map(curve).collect(),
    }
}

fn by_demand() -> Panel {
    let curves = [10, 100, 1_000].map(|slice| Curve {
        name: format!("slice {} %", percent(slice, LIMIT)),
        points: DEMANDS
            .map(|demand| (f64::from(demand), simulate(8, slice, Load::Uneven, demand).unused_at_end))
            .into(),
    });
    Panel {
        title: "unused at the end, % of possible hits (8 nodes, uneven)".to_owned(),
        x: "hits in the window, % of the limit",
        scale: Scale::Logarithmic,
        curves: curves.into(),
    }
}

fn simulate(nodes: u32, slice: u32, load: Load, demand: u32) -> Outcome {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("the runtime starts");
    let clock = ManualClock::default();
    let memory = MemoryStorage::builder().clock(clock.clone()).build().expect("the configuration is valid");
    let nodes: Vec<_> = (0..nodes).map(|_| Leases::new(memory.clone(), slice).clock(clock.clone())).collect();
    let policy = Policy::new(FixedWindow::aligned(), Quota::per(LIMIT, Duration::from_micros(MICROS)));
    let (mut chance, mut all, mut unused_at_refusal) = (chances(), 0, 0);
    let hits = LIMIT / 100 * demand;
    let start = clock.now();
    for window in 0..WINDOWS {
        clock.set(start.plus(u64::from(window) * MICROS));
        let (mut admitted, mut refused) = (0, false);
        for _ in 0..hits {
            let node = &nodes[pick(chance(), nodes.len(), load)];
            if admits(&runtime, node, &policy) {
                admitted += 1;
            } else if !refused {
                refused = true;
                unused_at_refusal += LIMIT - admitted;
            }
            clock.advance(Duration::from_micros(MICROS / u64::from(hits + 1)));
        }
        all += admitted;
    }
    let trips: u64 = nodes.iter().map(Leases::misses).sum();
    // Each refused hit takes one round trip too.
    let refused = u64::from(hits * WINDOWS - all);
    #[allow(clippy::cast_precision_loss)] // percents
    let trips = (trips - refused) as f64 * 100.0 / f64::from(all);
    let could = LIMIT.min(hits) * WINDOWS;
    Outcome {
        unused_at_refusal: percent(unused_at_refusal, LIMIT * WINDOWS),
        unused_at_end: percent(could - all, could),
        trips,
    }
}

fn admits(runtime: &Runtime, node: &Leases, policy: &Policy) -> bool {
    let request = StorageRequest::new(policy, &Key::global(), Op::Hit, 1);
    node.try_admit(request, None)
        || runtime.block_on(node.decide(request)).expect("the memory storage never fails").is_admitted()
}

fn pick(chance: f64, nodes: usize, load: Load) -> usize {
    let weight = |node: usize| match load {
        Load::Even => 1.0,
        #[allow(clippy::cast_precision_loss)] // a few
        Load::Uneven => 1.0 / (node + 1) as f64,
    };
    let all: f64 = (0..nodes).map(weight).sum();
    let mut rest = chance * all;
    let reached = |node: &usize| {
        rest -= weight(*node);
        rest <= 0.0
    };
    (0..nodes).find(reached).unwrap_or(nodes - 1)
}

fn percent(part: u32, of: u32) -> f64 {
    f64::from(part) * 100.0 / f64::from(of)
}

/// Returns pseudorandom numbers from 0 to 1. The sequence is always the same.
fn chances() -> impl FnMut() -> f64 {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    move || {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        f64::from((random >> 32) as u32) / f64::from(u32::MAX)
    }
}
