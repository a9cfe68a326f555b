//! Panels of curves, side by side in one SVG file.

use std::error::Error;

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::panel::{Ink, Panel};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1260, 430);
const FONT: &str = "sans-serif";
const GREY: RGBColor = RGBColor(0x55, 0x55, 0x55);

/// Draws the panels from left to right.
pub fn draw(file: &str, panels: &[Panel]) -> Result<(), Box<dyn Error>> {
    let sheet = SVGBackend::new(file, SIZE).into_drawing_area();
    sheet.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(sheet.split_evenly((1, panels.len()))) {
        draw_panel(panel, &area)?;
    }
    sheet.present()?;
    Ok(())
}

fn draw_panel(panel: &Panel, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
    let scale = panel.scale;
    let points = || panel.curves.iter().flat_map(|curve| &curve.points);
    let widest = points().map(|&(x, _)| x).max().unwrap_or(1);
    let right = scale.position(widest);
    let highest =
        |until: f64| points().filter(|(x, _)| scale.position(*x) <= until).map(|&(_, y)| y).fold(0.0, f64::max);
    // The legend is at the upper left. Points there must be below it.
    let legend = 0.05 + 0.055 * panel.curves.len() as f64;
    let top = f64::max(1.06 * highest(right), highest(0.6 * right) / (0.95 - legend));
    let (left, right) = (scale.position(1) - 0.03 * right, 1.03 * right);

    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 18))
        .margin(10)
        .margin_right(16)
        .x_label_area_size(46)
        .y_label_area_size(58)
        .build_cartesian_2d(left..right, 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(GREY)
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .x_desc(panel.x)
        .y_desc(panel.y)
        .x_labels(scale.steps(widest) + 1)
        .x_label_formatter(&|&position| scale.label(position))
        .y_labels(8)
        .y_label_formatter(&|figure| format!("{figure:.0}"))
        .draw()?;
    for curve in &panel.curves {
        let colour = colour(curve.ink);
        let line = curve.points.iter().map(|&(x, y)| (scale.position(x), y));
        let series = LineSeries::new(line, colour.filled().stroke_width(2)).point_size(3);
        chart.draw_series(series)?.label(curve.name).legend(move |(x, y)| {
            EmptyElement::at((x, y))
                + PathElement::new(vec![(0, 0), (20, 0)], colour.stroke_width(2))
                + Circle::new((10, 0), 3, colour.filled())
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .margin(6)
        .legend_area_size(28)
        .label_font((FONT, 14))
        .background_style(WHITE)
        .border_style(BLACK.mix(0.2))
        .draw()?;
    Ok(())
}

fn colour(ink: Ink) -> RGBColor {
    match ink {
        Ink::Blue => RGBColor(0x00, 0x72, 0xB2),
        Ink::Green => RGBColor(0x00, 0x9E, 0x73),
        Ink::Orange => RGBColor(0xD5, 0x5E, 0x00),
        Ink::Purple => RGBColor(0xCC, 0x79, 0xA7),
    }
}
