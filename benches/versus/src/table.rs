//! Prints one line per measurement, with the result of its goal.

use std::fmt;

use crate::measure::Samples;

pub struct Table {
    filter: Vec<String>,
    met: u32,
    missed: u32,
    empty: bool,
}

/// The goal of a row.
#[derive(Clone, Copy)]
pub enum Goal {
    /// The least ratio of the other's time to ours.
    SpeedAtLeast(f64),
    /// The largest ratio of our cost to the other's.
    CostAtMost(f64),
    /// The largest value of our figure, independent of the other's.
    AtMost(f64),
    /// No goal.
    None,
}

#[derive(Clone, Copy)]
pub enum Unit {
    Nanoseconds,
    Microseconds,
    Bytes,
    Kilobytes,
    Hits,
    Allocations,
}

/// The name and the samples of the other subject.
pub type Against<'a> = (&'a str, &'a Samples);

impl Table {
    pub fn new(filter: Vec<String>) -> Self {
        Self { filter, met: 0, missed: 0, empty: true }
    }

    /// Returns `true` if the row matches the filter.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|text| name.contains(text.as_str()))
    }

    pub fn wants_any<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> bool {
        names.into_iter().any(|name| self.wants(name.as_ref()))
    }

    /// Prints the geometric mean of the ratios of several rows, and whether it meets the goal. Prints
    /// nothing if there are none.
    pub fn mean(&mut self, name: &str, ratios: &[f64], goal: Goal) {
        let Goal::SpeedAtLeast(least) = goal else { panic!("a mean is that of speeds") };
        if ratios.is_empty() {
            return;
        }
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let verdict = self.count(mean >= least);
        line(name, "", "", &format!("{mean:.2}"), &goal.to_string(), verdict);
    }

    fn count(&mut self, met: bool) -> &'static str {
        *(if met { &mut self.met } else { &mut self.missed }) += 1;
        if met { "met" } else { "missed" }
    }

    /// Prints a row if it matches the filter.
    pub fn row(&mut self, name: &str, unit: Unit, ours: &Samples, against: Against<'_>, goal: Goal) {
        if !self.wants(name) {
            return;
        }
        if std::mem::take(&mut self.empty) {
            line("", "ours", "against", "ratio (quartiles)", "goal", "");
        }
        let (other, theirs) = against;
        let ratio = match goal {
            Goal::SpeedAtLeast(_) => theirs.over(ours),
            Goal::CostAtMost(_) | Goal::AtMost(_) | Goal::None => ours.over(theirs),
        };
        let verdict = match goal {
            Goal::SpeedAtLeast(least) => Some(ratio.median() >= least),
            Goal::CostAtMost(most) => Some(ratio.median() <= most),
            Goal::AtMost(most) => Some(ours.median() <= most),
            Goal::None => None,
        };
        let verdict = verdict.map_or("", |met| self.count(met));
        let theirs = format!("{other} {}", unit.show(theirs.median()));
        let goal = match goal {
            Goal::AtMost(most) => format!("<= {}", unit.show(most)),
            goal => goal.to_string(),
        };
        line(name, &unit.show(ours.median()), &theirs, &show_ratio(&ratio), &goal, verdict);
    }

    pub fn finish(&self) {
        println!("\n{} met, {} missed", self.met, self.missed);
    }
}

fn line(name: &str, ours: &str, against: &str, ratio: &str, goal: &str, verdict: &str) {
    let line = format!("{name:<62} {ours:>10} {against:>28} {ratio:>19}  {goal:<13} {verdict}");
    println!("{}", line.trim_end());
}

fn show_ratio(ratio: &Samples) -> String {
    let (low, high) = ratio.quartiles();
    match ratio.median() {
        median if !median.is_finite() => "-".to_owned(),
        median if low.to_bits() == high.to_bits() => format!("{median:.2}"),
        median => format!("{median:.2} ({low:.2}..{high:.2})"),
    }
}

impl Unit {
    fn show(self, figure: f64) -> String {
        match self {
            Self::Nanoseconds => format!("{figure:.1} ns"),
            Self::Microseconds => format!("{figure:.0} us"),
            Self::Bytes => format!("{figure:.1} B"),
            Self::Kilobytes => format!("{figure:.0} kB"),
            Self::Hits => format!("{figure:.0}"),
            Self::Allocations => format!("{figure:.3}"),
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SpeedAtLeast(least) => write!(f, "speed >= {least}"),
            Self::CostAtMost(most) => write!(f, "cost <= {most}"),
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::None => Ok(()),
        }
    }
}
