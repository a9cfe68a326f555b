//! A curve over time, as steps.

use super::svg::Svg;
use super::{Anchor, Axis, CAPTION, LEFT};
use crate::series::Series;

const HEIGHT: f64 = 36.0;

pub(super) struct Band {
    pub(super) caption: String,
    pub(super) class: &'static str,
    pub(super) color: &'static str,
    /// The largest value of the axis.
    pub(super) top: u32,
    /// The value of the dashed line.
    pub(super) promise: Option<u32>,
}

/// Draws the band below `y`, and returns its lower end.
pub(super) fn draw(svg: &mut Svg, series: &Series, band: &Band, axis: Axis, y: f64) -> f64 {
    svg.text((LEFT, y + 11.0), Anchor::Start, &band.caption);
    let (y, top) = (y + CAPTION, band.top.max(1));
    let height = axis.height(HEIGHT);
    let bottom = y + height;
    let down = |value: u32| bottom - height * f64::from(value) / f64::from(top);

    svg.text((LEFT - 5.0, y + 5.0), Anchor::End, &short(top));
    svg.text((LEFT - 5.0, bottom + 3.0), Anchor::End, "0");
    svg.path(&format!("M{LEFT} {bottom:.1}h{:.1}", axis.plot()), "rl-line", "currentColor", "stroke-opacity=\".3\"");

    let mut line = String::new();
    for (at, value) in series.in_columns(axis.columns(), axis.span).points() {
        if *at > axis.span {
            break;
        }
        let (x, y) = (axis.x(*at), down(*value));
        line += &if line.is_empty() { format!("M{x:.1} {y:.1}") } else { format!("H{x:.1}V{y:.1}") };
    }
    line += &format!("H{:.1}", axis.x(axis.span));
    svg.area(&format!("{line}V{bottom:.1}H{LEFT}z"), band.class, band.color);
    svg.path(&line, band.class, band.color, "stroke-width=\"1.5\" stroke-linejoin=\"round\"");
    if let Some(promise) = band.promise {
        let d = format!("M{LEFT} {:.1}h{:.1}", down(promise), axis.plot());
        svg.path(&d, "rl-promise", "currentColor", "stroke-opacity=\".8\" stroke-dasharray=\"5 3\"");
    }
    bottom
}

/// Shortens a number to at most four characters.
fn short(number: u32) -> String {
    match number {
        0..10_000 => number.to_string(),
        10_000..1_000_000 => format!("{}k", number / 1_000),
        _ => format!("{}M", number / 1_000_000),
    }
}
