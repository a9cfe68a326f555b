//! Draws a lane, the result of one limit, as SVG: hits as marks, delays as bars, and curves below
//! them.
//!
//! Marks differ by shape and by side of the line, not only by color. Text has the color of the page
//! around, so the pictures suit light and dark pages.

mod curves;
mod delays;
mod hits;
pub(crate) mod svg;

use tower_ratelimit::Limit;

pub(crate) use self::svg::escaped;
use self::svg::{Anchor, Svg};
use crate::in_flight::InFlightLane;
use crate::promise;
use crate::setup::Checked;
use crate::simulate::{Hits, Lane};

/// The space for the numbers at the left of a curve. All sizes are in pixels.
const LEFT: f64 = 30.0;
const RIGHT: f64 = 8.0;
/// The height of the caption above a band.
const CAPTION: f64 = 17.0;
/// The space between two bands.
const GAP: f64 = 8.0;

/// The axis of time, which all bands share.
#[derive(Clone, Copy)]
struct Axis {
    width: f64,
    /// The simulated time in microseconds.
    span: u64,
    /// The period of the first limit in microseconds.
    period: u64,
}

#[allow(clippy::cast_precision_loss)] // positions in a picture
fn float(number: u64) -> f64 {
    number as f64
}

impl Axis {
    fn plot(self) -> f64 {
        self.width - LEFT - RIGHT
    }

    /// Returns the height of a band, which is smaller on a phone. So two lanes are in view together.
    fn height(self, usual: f64) -> f64 {
        if self.plot() < 300.0 { 0.55 * usual } else { usual }
    }

    fn x(self, at: u64) -> f64 {
        LEFT + self.plot() * float(at.min(self.span)) / float(self.span)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a small positive number
    fn columns(self) -> u64 {
        self.plot() as u64
    }
}

/// The inner part of a picture, without a title, and its height.
pub(crate) struct Bands {
    pub(crate) svg: String,
    pub(crate) height: f64,
}

/// Draws the result of a policy.
pub(crate) fn bands(lane: &Lane, setup: &Checked) -> Bands {
    framed(&lane.hits, setup, |content, axis, y| curves(content, lane, axis, y))
}

/// Draws the result of a limit on requests in flight.
pub(crate) fn bands_in_flight(lane: &InFlightLane, setup: &Checked) -> Bands {
    let (client, highest, slots) = (of_client(&lane.hits), lane.in_use.highest(), lane.slots);
    let in_use = curves::Band {
        caption: format!("in flight{client}: highest {highest}, promised at most {slots} (N)"),
        class: "rl-trailing",
        color: svg::ADMITTED,
        top: highest.max(slots),
        promise: Some(slots),
    };
    framed(&lane.hits, setup, |content, axis, y| curves::draw(content, &lane.in_use, &in_use, axis, y + GAP))
}

/// Draws the hits and the axis of time around the curves. `curves` draws them below `y`, and
/// returns their lower end.
fn framed(hits: &Hits, setup: &Checked, curves: impl FnOnce(&mut Svg, Axis, f64) -> f64) -> Bands {
    let axis = Axis { width: f64::from(setup.width), span: setup.span, period: setup.period };
    let mut content = Svg::default();
    let mut y = hits::draw(&mut content, hits, setup.traffic.scenes(), axis, 0.0);
    y = delays::draw(&mut content, hits, axis, y);
    y = curves(&mut content, axis, y);
    // The grid is behind the content.
    let mut svg = Svg::default();
    grid(&mut svg, axis, y);
    svg.append(&content);
    Bands { svg: svg.into_text(), height: y + 18.0 }
}

/// Names the client of the curves, if there are several.
fn of_client(hits: &Hits) -> &'static str {
    if hits.iter().any(|it| it.hit.client > 0) { " for client 1" } else { "" }
}

/// Draws the curves of each limit of a policy.
fn curves(content: &mut Svg, lane: &Lane, axis: Axis, mut y: f64) -> f64 {
    let several = lane.policy.limits().len() > 1;
    let client = of_client(&lane.hits);
    for (limit, curves) in lane.policy.limits().iter().zip(&lane.limits) {
        let prefix = if several { format!("{limit}: ") } else { String::new() };
        let remaining = curves::Band {
            caption: format!("{prefix}units that remain{client}"),
            class: "rl-remaining",
            color: svg::REMAINING,
            top: limit.capacity(),
            promise: None,
        };
        y = curves::draw(content, &curves.remaining, &remaining, axis, y + GAP);
        let highest = curves.trailing.highest();
        let promise = promise::of(limit);
        let Some(most) = promise.most else { continue };
        let past = period(limit);
        let (past, promised) = match axis.plot() {
            0.0..400.0 => (format!("past {past}"), "promised"),
            _ => (format!("started in the past {past}"), "promised at most"),
        };
        let trailing = curves::Band {
            caption: format!("{past}: highest {highest}, {promised} {most} ({})", promise.formula),
            class: "rl-trailing",
            color: svg::ADMITTED,
            top: highest.max(most),
            promise: Some(most),
        };
        y = curves::draw(content, &curves.trailing, &trailing, axis, y + GAP);
    }
    y
}

/// Returns the period of a limit without a number if it is a whole unit.
fn period(limit: &Limit) -> String {
    let period = time(limit.quota().period_micros());
    match period.as_str() {
        "1 day" => "day".to_owned(),
        "1 h" => "hour".to_owned(),
        "1 min" => "minute".to_owned(),
        "1 s" => "second".to_owned(),
        _ => period,
    }
}

/// Draws a line at each end of a period, and its time below.
fn grid(svg: &mut Svg, axis: Axis, bottom: f64) {
    let periods = axis.span / axis.period;
    let room = axis.plot() / float(periods);
    let every = (1..=periods).find(|every| room * float(*every) >= 44.0).unwrap_or(periods).max(1);
    let mut lines = String::new();
    for turn in 0..=periods {
        let x = axis.x(turn * axis.period);
        lines += &format!("M{x:.1} 0V{bottom:.1}");
        if turn.is_multiple_of(every) {
            let anchor = if turn == periods { Anchor::End } else { Anchor::Middle };
            svg.text((x.max(LEFT), bottom + 13.0), anchor, &time(turn * axis.period));
        }
    }
    svg.path(&lines, "rl-grid", "currentColor", "stroke-opacity=\".18\" stroke-dasharray=\"1 3\"");
}

/// Formats a time in microseconds in its largest whole unit.
pub(crate) fn time(micros: u64) -> String {
    const UNITS: [(u64, &str); 5] =
        [(86_400_000_000, "day"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")];
    if micros == 0 {
        return "0".to_owned();
    }
    match UNITS.iter().find(|(unit, _)| micros.is_multiple_of(*unit)) {
        Some((unit, "day")) if *unit < micros => format!("{} days", micros / unit),
        Some((unit, name)) => format!("{} {name}", micros / unit),
        None => format!("{micros} µs"),
    }
}

#[cfg(test)]
mod tests {
    use super::time;

    #[test]
    fn times_have_their_largest_whole_unit() {
        for (micros, text) in [
            (0, "0"),
            (1, "1 µs"),
            (1_500_000, "1500 ms"),
            (120_000_000, "2 min"),
            (86_400_000_000, "1 day"),
            (172_800_000_000, "2 days"),
        ] {
            assert_eq!(time(micros), text);
        }
    }
}
