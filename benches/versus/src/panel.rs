//! What a panel shows: figures over counts.

use std::fmt;

pub struct Panel {
    pub title: String,
    pub x: &'static str,
    pub y: &'static str,
    pub scale: Scale,
    pub curves: Vec<Curve>,
}

/// Of the horizontal axis. The vertical one is linear and starts at zero.
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

/// Colours that the colour-blind can tell apart (after Okabe and Ito).
#[derive(Clone, Copy)]
pub enum Ink {
    Blue,
    Green,
    Orange,
    Purple,
}

impl Scale {
    /// Where `x` lies on the axis.
    pub fn position(self, x: u32) -> f64 {
        match self {
            Self::Linear => f64::from(x),
            Self::Logarithmic => f64::from(x).log10(),
        }
    }

    /// From the first label to that of `x`.
    pub fn steps(self, x: u32) -> usize {
        match self {
            Self::Linear => x as usize - 1,
            Self::Logarithmic => x.ilog10() as usize,
        }
    }

    /// What stands at a position, in few characters.
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
