//! Draws panels of curves as SVG, three in a row. The vertical axis starts at zero.

use std::fmt::{self, Write};

pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) scale: Scale,
    pub(crate) curves: Vec<Curve>,
}

/// The scale of the horizontal axis.
#[derive(Clone, Copy)]
#[allow(dead_code, reason = "each program uses a part of it")]
pub(crate) enum Scale {
    Linear,
    Logarithmic,
}

pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Colors that color-blind readers can distinguish (by Okabe and Ito).
const INKS: [&str; 5] = ["#0072B2", "#009E73", "#D55E00", "#CC79A7", "#555555"];

const IN_A_ROW: usize = 3;
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 404.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 350.0;

/// Returns the picture as SVG.
pub(crate) fn draw(panels: &[Panel]) -> String {
    let mut svg = String::new();
    let (across, down) = (panels.len().min(IN_A_ROW), panels.len().div_ceil(IN_A_ROW));
    let [across, down] = [across, down].map(|panels| f64::from(u32::try_from(panels).unwrap_or(1)));
    let (all, height) = (WIDTH * across, HEIGHT * down);
    write(
        &mut svg,
        format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{all}\" height=\"{height}\" font-family=\"sans-serif\">"
        ),
    );
    write(&mut svg, format_args!("<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"));
    let mut top = 0.0;
    for row in panels.chunks(IN_A_ROW) {
        let mut left = 0.0;
        for panel in row {
            write(&mut svg, format_args!("<g transform=\"translate({left} {top})\">"));
            draw_panel(&mut svg, panel);
            write(&mut svg, format_args!("</g>"));
            left += WIDTH;
        }
        top += HEIGHT;
    }
    write(&mut svg, format_args!("</svg>"));
    svg
}

fn draw_panel(svg: &mut String, panel: &Panel) {
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let (first, last) = points().fold((f64::MAX, 0.0), |(low, high), (x, _)| (x.min(low), x.max(high)));
    let highest = points().map(|(_, y)| *y).fold(0.0, f64::max).max(1e-9);
    let step = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0].into_iter().find(|step| highest / step <= 8.0);
    let step = step.unwrap_or(200.0);
    let across = |x: f64| {
        let part = match panel.scale {
            Scale::Linear => (x - first) / (last - first),
            Scale::Logarithmic => (x / first).ln() / (last / first).ln(),
        };
        LEFT + (RIGHT - LEFT) * part
    };
    // The legend is at the top of the half whose curves are lower, and above these curves.
    let middle = f64::midpoint(LEFT, RIGHT);
    let highest_in = |left: bool| {
        let inside = points().filter(|(x, _)| if left { across(*x) <= middle } else { across(*x) >= middle });
        inside.map(|(_, y)| *y).fold(0.0, f64::max)
    };
    let (left, right) = (highest_in(true), highest_in(false));
    #[allow(clippy::cast_precision_loss)] // a few
    let room = 1.0 - (12.0 + 17.0 * panel.curves.len() as f64) / (BOTTOM - TOP);
    let top = (highest.max(left.min(right) / room) / step).ceil() * step;
    let down = |y: f64| BOTTOM - (BOTTOM - TOP) * y / top;

    text(svg, (WIDTH / 2.0, 22.0), "middle", 14, &panel.title);
    text(svg, (f64::midpoint(LEFT, RIGHT), BOTTOM + 38.0), "middle", 13, panel.x);
    let mut y = 0.0;
    while y <= top + step / 2.0 {
        line(svg, &[(LEFT, down(y)), (RIGHT, down(y))], "#DDDDDD", 1);
        text(svg, (LEFT - 6.0, down(y) + 4.0), "end", 12, &label(y));
        y += step;
    }
    let mut before = f64::MIN;
    for (x, _) in panel.curves.iter().take(1).flat_map(|curve| &curve.points) {
        // Skip labels that would overlap.
        if across(*x) - before > 34.0 {
            text(svg, (across(*x), BOTTOM + 18.0), "middle", 12, &label(*x));
            before = across(*x);
        }
    }
    let legend = if left <= right { LEFT + 14.0 } else { RIGHT - 130.0 };
    let mut below = TOP + 16.0;
    for (curve, ink) in panel.curves.iter().zip(INKS.into_iter().cycle()) {
        let places: Vec<_> = curve.points.iter().map(|(x, y)| (across(*x), down(*y))).collect();
        line(svg, &places, ink, 2);
        line(svg, &[(legend, below - 4.0), (legend + 20.0, below - 4.0)], ink, 2);
        text(svg, (legend + 26.0, below), "start", 12, &curve.name);
        below += 17.0;
    }
}

fn line(svg: &mut String, points: &[(f64, f64)], ink: &str, width: u32) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    write(svg, format_args!("<polyline points=\"{points}\" fill=\"none\" stroke=\"{ink}\" stroke-width=\"{width}\"/>"));
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    write(
        svg,
        format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{text}</text>"),
    );
}

fn write(svg: &mut String, line: fmt::Arguments<'_>) {
    writeln!(svg, "{line}").expect("writing to a string does not fail");
}

/// Formats a number with few digits.
fn label(figure: f64) -> String {
    if figure >= 1e6 {
        return format!("{}M", figure / 1e6);
    }
    if figure >= 1e4 {
        return format!("{}k", figure / 1e3);
    }
    let text = format!("{figure:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl fmt::Display for Panel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ({})", self.title, self.x)?;
        for curve in &self.curves {
            write!(f, "{:<16}", curve.name)?;
            for (x, y) in &curve.points {
                write!(f, " {:>14}", format!("{}: {y:.2}", label(*x)))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
