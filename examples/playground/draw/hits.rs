//! The band of hits: admitted ones above the line, refused ones below.

use super::svg::{ADMITTED, DELAYED, REFUSED, Svg};
use super::{Anchor, Axis, CAPTION, LEFT};
use crate::simulate::{Hits, Verdict};
use crate::traffic::{CLIENTS, Scene};

/// The width of a column of marks.
const COLUMN: f64 = 7.0;
/// The largest height of a column of marks.
const HIGHEST: f64 = 105.0;
/// Marks that would be smaller are drawn as bars.
const SMALLEST: f64 = 3.8;
/// The height of the names of scenes.
const SCENE: f64 = 14.0;
/// The height of a client's row.
const ROW: f64 = 15.0;

/// The hits in a column.
#[derive(Clone, Copy, Default)]
struct Count {
    admitted: u32,
    delayed: u32,
    refused: u32,
}

impl Count {
    fn add(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Admitted => self.admitted += 1,
            Verdict::Delayed(_) => self.delayed += 1,
            Verdict::Refused => self.refused += 1,
        }
    }
}

/// Draws the band below `y`, and returns its lower end.
pub(super) fn draw(svg: &mut Svg, hits: &Hits, scenes: &[Scene], axis: Axis, y: f64) -> f64 {
    svg.text((LEFT, y + 11.0), Anchor::Start, "hits: admitted above the line, refused below");
    let mut y = y;
    if !scenes.is_empty() {
        y += SCENE;
        for scene in scenes.iter().filter(|scene| !scene.name.is_empty()) {
            let middle = axis.period / 100 * scene.start + axis.period / 200 * scene.length;
            svg.text((axis.x(middle), y + 11.0), Anchor::Middle, scene.name);
        }
    }
    let several = hits.iter().any(|it| it.hit.client > 0);
    let y = y + CAPTION;
    if several { rows(svg, hits, axis, y) } else { stacks(svg, hits, axis, y) }
}

/// Returns the counts per column of the hits of `clients`.
fn columns(hits: &Hits, axis: Axis, client: impl Fn(u8) -> bool) -> Vec<Count> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a small positive number
    let column = |x: f64| ((x - LEFT) / COLUMN) as usize;
    let mut columns = vec![Count::default(); column(axis.width) + 1];
    for decided in hits.iter().filter(|it| client(it.hit.client)) {
        columns[column(axis.x(decided.hit.at))].add(decided.verdict);
    }
    columns
}

/// Returns the center of a column.
fn center(column: usize) -> f64 {
    LEFT + COLUMN * (f64::from(u32::try_from(column).unwrap_or(0)) + 0.5)
}

fn stacks(svg: &mut Svg, hits: &Hits, axis: Axis, y: f64) -> f64 {
    let columns = columns(hits, axis, |_| true);
    let most = |count: fn(&Count) -> u32| f64::from(columns.iter().map(count).max().unwrap_or(0));
    // The same for all lanes of the same traffic.
    let unit = f64::min(COLUMN, axis.height(HIGHEST) / most(|it| it.admitted + it.delayed + it.refused).max(1.0));
    let (above, below) = (most(|it| it.admitted + it.delayed), most(|it| it.refused));
    let line = y + (above * unit).max(2.0 * COLUMN) + 2.0;
    if unit < SMALLEST {
        bars(svg, &columns, unit, line);
    } else {
        marks(svg, &columns, unit, line);
    }
    svg.path(&format!("M{LEFT} {line:.1}h{:.1}", axis.plot()), "rl-line", "currentColor", "stroke-opacity=\".5\"");
    line + (below * unit).max(COLUMN) + 2.0
}

/// Draws a dot, a ring or a cross for each hit.
fn marks(svg: &mut Svg, columns: &[Count], unit: f64, line: f64) {
    let (mut dots, mut rings, mut crosses) = (String::new(), String::new(), String::new());
    let (ring, arm) = (0.34 * unit, 0.32 * unit);
    for (column, count) in columns.iter().enumerate() {
        let x = center(column);
        for place in 0..count.admitted + count.delayed {
            let y = line - unit * (f64::from(place) + 0.5) - 1.0;
            if place < count.admitted {
                dots += &format!("M{x} {y:.1}h0");
            } else {
                rings += &format!("M{:.1} {y:.1}a{ring:.1} {ring:.1} 0 1 1 0 .1z", x + ring);
            }
        }
        for place in 0..count.refused {
            let (left, top) = (x - arm, line + unit * (f64::from(place) + 0.5) + 1.0 - arm);
            let side = 2.0 * arm;
            crosses += &format!("M{left:.1} {top:.1}l{side:.1} {side:.1}m0-{side:.1}l-{side:.1} {side:.1}");
        }
    }
    let width = 0.8 * unit;
    svg.path(&dots, "rl-admitted", ADMITTED, &format!("stroke-linecap=\"round\" stroke-width=\"{width:.1}\""));
    svg.path(&rings, "rl-delayed", DELAYED, "stroke-width=\"1.6\"");
    svg.path(&crosses, "rl-refused", REFUSED, "stroke-width=\"1.6\"");
}

/// Draws a bar for the hits of each column. The bars of refused hits are dashed.
fn bars(svg: &mut Svg, columns: &[Count], unit: f64, line: f64) {
    let (mut admitted, mut delayed, mut refused) = (String::new(), String::new(), String::new());
    for (column, count) in columns.iter().enumerate() {
        let x = center(column);
        // A single hit among thousands is still visible.
        let height = |count: u32| if count == 0 { 0.0 } else { f64::max(f64::from(count) * unit, 2.0) };
        let bar = |path: &mut String, from: f64, count: u32, sign: char| {
            if count > 0 {
                *path += &format!("M{x} {from:.1}v{sign}{:.1}", height(count));
            }
        };
        bar(&mut admitted, line - 1.0, count.admitted, '-');
        bar(&mut delayed, line - 1.0 - height(count.admitted), count.delayed, '-');
        bar(&mut refused, line + 1.0, count.refused, ' ');
    }
    svg.path(&admitted, "rl-admitted", ADMITTED, "stroke-width=\"4.6\"");
    svg.path(&delayed, "rl-delayed", DELAYED, "stroke-width=\"2.6\"");
    svg.path(&refused, "rl-refused", REFUSED, "stroke-width=\"4.6\" stroke-dasharray=\"1.6 1.2\"");
}

/// Draws a row for each client, with at most one mark per verdict and column.
fn rows(svg: &mut Svg, hits: &Hits, axis: Axis, y: f64) -> f64 {
    for client in 0..CLIENTS {
        let line = y + ROW * f64::from(client) + 0.5 * ROW;
        svg.text((LEFT - 6.0, line + 4.0), Anchor::End, &(client + 1).to_string());
        let columns: Vec<Count> = columns(hits, axis, |other| other == client)
            .iter()
            .map(|count| Count {
                admitted: count.admitted.min(1),
                delayed: count.delayed.min(1).saturating_sub(count.admitted),
                refused: count.refused.min(1),
            })
            .collect();
        svg.path(&format!("M{LEFT} {line:.1}h{:.1}", axis.plot()), "rl-line", "currentColor", "stroke-opacity=\".16\"");
        marks(svg, &columns, 6.4, line);
    }
    y + ROW * f64::from(CLIENTS)
}
