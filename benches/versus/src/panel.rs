//! The data of a panel: curves of figures by counts.

use std::fmt;

pub struct Panel {
    pub title: String,
    pub x: &'static str,
    pub y: &'static str,
    pub scale: Scale,
    pub curves: Vec<Curve>,
}

/// The scale of the horizontal axis. The vertical axis is linear, and starts at zero.
#[derive(Clone, Copy)]
pub enum Scale {
    Linear,
    Logarithmic,
}

pub struct Curve {
    pub name: &'static str,
    pub ink: Ink,
    pub points: Vec<(u32, f64)>,
}

/// Colors that color-blind readers can distinguish (by Okabe and Ito).
#[derive(Clone, Copy)]
pub enum Ink {
    Blue,
    Green,
    Orange,
    Purple,
}

impl Scale {
    /// Returns the position of `x` on the axis.
    pub fn position(self, x: u32) -> f64 {
        match self {
            Self::Linear => f64::from(x),
            Self::Logarithmic => f64::from(x).log10(),
        }
    }

    /// Returns the number of steps from the first label to the label of `x`.
    pub fn steps(self, x: u32) -> usize {
        match self {
            Self::Linear => x as usize - 1,
            Self::Logarithmic => x.ilog10() as usize,
        }
    }

    /// Returns a short label for a position.
    pub fn label(self, position: f64) -> String {
        let x = match self {
            Self::Linear => position,
            Self::Logarithmic => 10_f64.powf(position),
        };
        match x {
            x if x >= 1e6 => format!("{:.0}M", x / 1e6),
            x if x >= 1e3 => format!("{:.0}k", x / 1e3),
            x => format!("{x:.0}"),
        }
    }
}

impl fmt::Display for Panel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for curve in &self.curves {
            write!(f, "{:<26}", curve.name)?;
            for (x, y) in &curve.points {
                write!(f, " {:>14}", format!("{x}: {y:.1}"))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
