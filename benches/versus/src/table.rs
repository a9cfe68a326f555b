//! Prints one line per measurement, with the result of its goal.

use std::fmt;
use std::str::FromStr;

use crate::measure::Samples;

/// The rows of one process, or of several processes together.
pub struct Table {
    filter: Vec<String>,
    rows: Vec<Row>,
}

struct Row {
    name: String,
    /// `None` for a mean of ratios.
    times: Option<Times>,
    /// In the direction of the goal.
    ratio: Samples,
    goal: Goal,
}

struct Times {
    unit: Unit,
    ours: Samples,
    other: String,
    theirs: Samples,
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
        Self { filter, rows: Vec::new() }
    }

    /// Returns `true` if the row matches the filter.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.is_empty() || self.filter.iter().any(|text| name.contains(text.as_str()))
    }

    pub fn wants_any<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> bool {
        names.into_iter().any(|name| self.wants(name.as_ref()))
    }

    /// Adds the geometric mean of the ratios of several rows. Adds nothing if there are none.
    pub fn mean(&mut self, name: &str, ratios: &[f64], goal: Goal) {
        if ratios.is_empty() {
            return;
        }
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        self.rows.push(Row { name: name.to_owned(), times: None, ratio: Samples::one(mean), goal });
    }

    /// Adds a row if it matches the filter.
    pub fn row(&mut self, name: &str, unit: Unit, ours: &Samples, against: Against<'_>, goal: Goal) {
        if !self.wants(name) {
            return;
        }
        let (other, theirs) = against;
        let ratio = match goal {
            Goal::SpeedAtLeast(_) => theirs.over(ours),
            Goal::CostAtMost(_) | Goal::AtMost(_) | Goal::None => ours.over(theirs),
        };
        let times = Times { unit, ours: ours.clone(), other: other.to_owned(), theirs: theirs.clone() };
        self.rows.push(Row { name: name.to_owned(), times: Some(times), ratio, goal });
    }

    /// Prints the rows and which goals they meet.
    pub fn print(&self) {
        line("", "ours", "against", "ratio (quartiles)", "goal", "");
        self.rows.iter().for_each(Row::print);
        let verdicts: Vec<_> = self.rows.iter().filter_map(Row::is_met).collect();
        let met = verdicts.iter().filter(|is_met| **is_met).count();
        println!("\n{met} met, {} missed", verdicts.len() - met);
    }

    /// Writes the median of each figure, one row per line, for [`add`](Self::add).
    pub fn medians(&self) -> String {
        self.rows.iter().map(|row| row.medians() + "\n").collect()
    }

    /// Adds the medians of another process to the samples of the same rows.
    pub fn add(&mut self, medians: &str) {
        for row in medians.lines().map(|line| Row::of_medians(line).expect("a line of `medians`")) {
            match self.rows.iter_mut().find(|other| other.name == row.name) {
                Some(same) => same.append(row),
                None => self.rows.push(row),
            }
        }
    }
}

impl Row {
    fn is_met(&self) -> Option<bool> {
        match self.goal {
            Goal::SpeedAtLeast(least) => Some(self.ratio.median() >= least),
            Goal::CostAtMost(most) => Some(self.ratio.median() <= most),
            Goal::AtMost(most) => self.times.as_ref().map(|times| times.ours.median() <= most),
            Goal::None => None,
        }
    }

    fn print(&self) {
        let verdict = self.is_met().map_or("", |met| if met { "met" } else { "missed" });
        let (ours, theirs, goal) = match &self.times {
            None => (String::new(), String::new(), self.goal.to_string()),
            Some(Times { unit, ours, other, theirs }) => {
                let goal = match self.goal {
                    Goal::AtMost(most) => format!("<= {}", unit.show(most)),
                    goal => goal.to_string(),
                };
                (unit.show(ours.median()), format!("{other} {}", unit.show(theirs.median())), goal)
            }
        };
        line(&self.name, &ours, &theirs, &show_ratio(&self.ratio), &goal, verdict);
    }

    fn medians(&self) -> String {
        let (kind, bound) = match self.goal {
            Goal::SpeedAtLeast(least) => ("speed", least),
            Goal::CostAtMost(most) => ("cost", most),
            Goal::AtMost(most) => ("most", most),
            Goal::None => ("none", 0.0),
        };
        let mut fields = vec![self.name.clone(), kind.to_owned(), bound.to_string(), self.ratio.median().to_string()];
        if let Some(Times { unit, ours, other, theirs }) = &self.times {
            let unit = (*unit as u8).to_string();
            fields.extend([unit, ours.median().to_string(), other.clone(), theirs.median().to_string()]);
        }
        fields.join("\t")
    }

    fn of_medians(line: &str) -> Option<Self> {
        let fields: Vec<_> = line.split('\t').collect();
        let number = |at: usize| f64::from_str(fields.get(at)?).ok();
        let goal = match *fields.get(1)? {
            "speed" => Goal::SpeedAtLeast(number(2)?),
            "cost" => Goal::CostAtMost(number(2)?),
            "most" => Goal::AtMost(number(2)?),
            _ => Goal::None,
        };
        let times = match fields.get(4..) {
            Some([unit, _, other, _]) => Some(Times {
                unit: Unit::ALL[unit.parse::<usize>().ok()?],
                ours: Samples::one(number(5)?),
                other: (*other).to_owned(),
                theirs: Samples::one(number(7)?),
            }),
            _ => None,
        };
        Some(Self { name: fields[0].to_owned(), times, ratio: Samples::one(number(3)?), goal })
    }

    fn append(&mut self, other: Self) {
        self.ratio.append(&other.ratio);
        if let (Some(times), Some(others)) = (&mut self.times, &other.times) {
            times.ours.append(&others.ours);
            times.theirs.append(&others.theirs);
        }
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
    const ALL: [Self; 6] =
        [Self::Nanoseconds, Self::Microseconds, Self::Bytes, Self::Kilobytes, Self::Hits, Self::Allocations];

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
