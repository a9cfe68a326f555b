//! Series of numbers over time.

/// Points in the order of their times. A value holds until the next point.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Series(Vec<(u64, u32)>);

impl Series {
    pub(crate) fn push(&mut self, at: u64, value: u32) {
        match self.0.as_slice() {
            [.., (_, last)] if *last == value => {}
            _ => self.0.push((at, value)),
        }
    }

    pub(crate) fn points(&self) -> &[(u64, u32)] {
        &self.0
    }

    pub(crate) fn highest(&self) -> u32 {
        self.0.iter().map(|(_, value)| *value).max().unwrap_or(0)
    }

    /// Reduces the series to the lowest and the highest value in each column of a picture, in the
    /// order of their times. This bounds the size and keeps all extremes.
    pub(crate) fn in_columns(&self, columns: u64, span: u64) -> Self {
        let column = |at: u64| u128::from(at) * u128::from(columns) / u128::from(span.max(1));
        let mut shorter = Self::default();
        for same in self.0.chunk_by(|a, b| column(a.0) == column(b.0)) {
            let by_value = |point: &&(u64, u32)| point.1;
            let mut kept: Vec<(u64, u32)> = same.iter().min_by_key(by_value).into_iter().copied().collect();
            kept.extend(same.iter().max_by_key(by_value));
            kept.extend(same.last());
            kept.sort_unstable_by_key(|(at, _)| *at);
            for (at, value) in kept {
                shorter.push(at, value);
            }
        }
        shorter
    }
}

/// Returns the number of `starts` within the trailing period, at each time. A start leaves the
/// period when it is exactly one period old.
pub(crate) fn in_trailing_period(starts: &[u64], period: u64) -> Series {
    let mut changes: Vec<(u64, bool)> = starts.iter().map(|start| (*start, true)).collect();
    changes.extend(starts.iter().map(|start| (start.saturating_add(period), false)));
    // Sorts the ends of starts before new starts at the same time.
    changes.sort_unstable();
    let mut series = Series::default();
    series.push(0, 0);
    let mut count = 0;
    for same in changes.chunk_by(|a, b| a.0 == b.0) {
        for (_, starts) in same {
            count = if *starts { count + 1 } else { count - 1 };
        }
        series.push(same[0].0, count);
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_leave_the_period_when_it_ends() {
        let series = in_trailing_period(&[5, 5, 9, 15], 10);
        assert_eq!(series.points(), [(0, 0), (5, 2), (9, 3), (15, 2), (19, 1), (25, 0)]);
    }

    #[test]
    fn columns_keep_extremes() {
        let mut series = Series::default();
        (0..1_000_u64).for_each(|at| series.push(at, if at == 777 { 99 } else { u32::from(at % 2 == 0) }));
        let short = series.in_columns(10, 1_000);
        assert!(short.points().len() <= 30, "{short:?}");
        assert_eq!(short.highest(), 99);
        assert!(short.points().contains(&(777, 99)) && short.points().is_sorted_by_key(|(at, _)| *at));
    }
}
