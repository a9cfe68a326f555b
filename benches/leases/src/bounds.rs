//! Simulates fleets of processes with leases, and draws the most units that they spend in any span
//! of time, beside those that the strategy promises. The result is always the same.

use std::fs;

use crate::fleets::{FLEETS, Fleet, Promise};
use crate::picture::{self, Curve, Panel, Scale};
use crate::random::Numbers;

/// The number of fleets of a policy.
const SEEDS: u64 = 60;

/// The number of spans of a curve.
const SPANS: usize = 50;

/// Each strategy, and one policy of several limits.
const POLICIES: usize = 9;

pub(crate) fn draw(file: &str) {
    let panels: Vec<_> = FLEETS[..POLICIES].iter().map(|text| panel(text)).collect();
    for panel in &panels {
        println!("{panel}");
    }
    fs::write(file, picture::draw(&panels)).expect("the picture can be written");
}

fn panel(text: &str) -> Panel {
    let mut most = [0; SPANS + 1];
    let (mut lease, mut promises) = (0, Vec::new());
    for seed in 0..SEEDS {
        let mut numbers = Numbers((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let fleet = Fleet::random(text.parse().expect("the policy is valid"), &mut numbers);
        // Few fleets without faults reach the bound, and none with them exceeds it.
        let fleet = Fleet { ttl: None, slice: 1_000, processes: 8, load: 50, losses: 0, is_troubled: false, ..fleet };
        lease = fleet.lease();
        promises = fleet.policy.limits().iter().map(Promise::of).collect();
        let width = width(lease);
        fleet.run(&mut numbers).visit_spans(|span, units| {
            let at = usize::try_from(span.div_ceil(width)).unwrap_or(usize::MAX);
            if let Some(most) = most.get_mut(at) {
                *most = units.max(*most);
            }
        });
    }
    // A span contains the shorter ones.
    (1..=SPANS).for_each(|at| most[at] = most[at].max(most[at - 1]));
    let curve = |name: &str, units: &dyn Fn(usize, u64) -> u64| Curve {
        name: name.to_owned(),
        points: (0..=SPANS)
            .map(|at| {
                let span = width(lease) * at as u64;
                (span as f64 / 1e6, units(at, span) as f64)
            })
            .collect(),
    };
    let bound = |span| promises.iter().map(|promise| promise.units(span)).min().unwrap_or(0);
    Panel {
        title: text.to_owned(),
        x: "d in seconds",
        scale: Scale::Linear,
        curves: vec![
            curve("most units spent in any d", &|at, _| most[at]),
            curve("promised for d + L", &|_, span| bound(span + lease)),
            curve("promised for d", &|_, span| bound(span)),
        ],
    }
}

/// Returns the microseconds between two spans. The curves end after two of the periods of which a
/// lease is a twentieth.
fn width(lease: u64) -> u64 {
    40 * lease / SPANS as u64
}
