//! The band of delays: a bar from the arrival of a hit to its start.

use super::svg::{ADMITTED, DELAYED, Svg};
use super::{Anchor, Axis, CAPTION, GAP, LEFT};
use crate::simulate::{Hits, Verdict};

/// The largest number of bars.
const MOST: usize = 150;
const HIGHEST: f64 = 56.0;

/// Draws the band below `y` if a hit is delayed, and returns its lower end.
pub(super) fn draw(svg: &mut Svg, hits: &Hits, axis: Axis, y: f64) -> f64 {
    let delays: Vec<(u64, u64)> = hits
        .iter()
        .filter_map(|it| match it.verdict {
            Verdict::Delayed(delay) => Some((it.hit.at, it.hit.at.saturating_add(delay))),
            _ => None,
        })
        .collect();
    if delays.is_empty() {
        return y;
    }
    let every = delays.len().div_ceil(MOST);
    let shown: Vec<(u64, u64)> = delays.into_iter().step_by(every).collect();
    let caption = match every {
        1 => "delays: from the arrival of a hit to its start".to_owned(),
        _ => format!("delays: from the arrival of a hit to its start, one of {every}"),
    };
    svg.text((LEFT, y + GAP + 11.0), Anchor::Start, &caption);
    let y = y + GAP + CAPTION;

    let (slots, count) = slots(&shown);
    let unit = f64::min(5.0, axis.height(HIGHEST) / f64::from(count.max(1)));
    let (mut bars, mut starts) = (String::new(), String::new());
    for ((from, until), slot) in shown.iter().zip(slots) {
        let middle = y + unit * (f64::from(slot) + 0.5);
        let (left, right) = (axis.x(*from), axis.x(*until));
        bars += &format!("M{left:.1} {middle:.1}H{right:.1}");
        if *until <= axis.span {
            starts += &format!("M{right:.1} {middle:.1}h0");
        }
    }
    let style = format!("stroke-opacity=\".65\" stroke-width=\"{:.1}\"", 0.5 * unit);
    svg.path(&bars, "rl-delayed", DELAYED, &style);
    let style = format!("stroke-linecap=\"round\" stroke-width=\"{:.1}\"", 0.9 * unit);
    svg.path(&starts, "rl-admitted", ADMITTED, &style);
    y + unit * f64::from(count)
}

/// Returns a free slot for each bar, and the number of slots.
fn slots(bars: &[(u64, u64)]) -> (Vec<u32>, u32) {
    // The time at which each slot becomes free.
    let mut free: Vec<u64> = Vec::new();
    let mut chosen = Vec::new();
    for (from, until) in bars {
        let slot = free.iter().position(|end| end <= from).unwrap_or(free.len());
        match free.get_mut(slot) {
            Some(end) => *end = *until,
            None => free.push(*until),
        }
        chosen.push(u32::try_from(slot).unwrap_or(0));
    }
    (chosen, u32::try_from(free.len()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::slots;

    #[test]
    fn bars_that_overlap_get_different_slots() {
        assert_eq!(slots(&[(0, 5), (1, 9), (2, 3), (5, 7), (6, 8)]), (vec![0, 1, 2, 0, 2], 3));
    }
}
