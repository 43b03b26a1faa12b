//! Figures of repeated measurements: the median, the extremes, and ratios within a round.
//!
//! A drift of the machine affects all measurements of one round alike. So a ratio is computed
//! within each round, and the median and extremes are those of these ratios.
#![forbid(unsafe_code)]

use std::fmt;

/// The median of some values, and the smallest and the largest of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The middle value; of an even number of values, the mean of the two in the middle.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// The spread of the values; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = *sorted.get(middle)?;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], upper)
        } else {
            upper
        };
        Some(Self { median, min: sorted[0], max: sorted[sorted.len() - 1] })
    }

    /// The spread of the ratios of `ours` to `theirs` in the same round.
    pub fn of_ratios(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        Self::of(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs))
    }
}

/// The 95 % confidence interval of the median (by order statistics, so no distribution is assumed):
/// two of the values. `None` if there are fewer than [`ENOUGH`] values.
pub fn median_interval(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    if sorted.len() < ENOUGH {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len() as f64;
    // The number of values below the median has a binomial distribution, which is nearly normal for
    // this many values.
    let reach = 1.96 * count.sqrt() / 2.0;
    let below = (count / 2.0 - reach).floor() as usize;
    Some((sorted[below], sorted[sorted.len() - 1 - below]))
}

/// The smallest number of values that has a [`median_interval`].
pub const ENOUGH: usize = 30;

/// `median (min..max)`, with the given precision or no decimals.
impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = formatter.precision().unwrap_or(0);
        let Self { median, min, max } = self;
        let text = format!("{median:.digits$} ({min:.digits$}..{max:.digits$})");
        formatter.pad_integral(true, "", &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]).map(|spread| spread.median), Some(2.5));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn ratios_are_paired() {
        let spread = Spread::of_ratios(&[2.0, 6.0, 3.0], &[1.0, 2.0, 3.0]);
        assert_eq!(spread, Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    }

    #[test]
    fn the_interval_of_a_median_is_around_it() {
        let values = (0..100).map(f64::from);
        assert_eq!(median_interval(values), Some((40.0, 59.0)));
        assert_eq!(median_interval((0..29).map(f64::from)), None);
        let (from, to) = median_interval((0..30).map(f64::from)).expect("enough");
        assert!(from < 14.5 && 14.5 < to, "{from} {to}");
    }

    #[test]
    fn prints_with_the_asked_precision() {
        let spread = Spread { median: 1.25, min: 1.0, max: 2.0 };
        assert_eq!(format!("{spread:.1}"), "1.2 (1.0..2.0)");
        assert_eq!(format!("[{spread:>18.2}]"), "[ 1.25 (1.00..2.00)]");
    }
}
