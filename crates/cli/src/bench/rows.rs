//! Cases, their variants taking turns, and what is made of the slices.
//!
//! The first variant of a case is its baseline. A ratio is taken within each round, where both ran one
//! right after the other, and is told with its spread; where that is not clear of 1, so is that.

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use super::device::DeviceCounts;
use super::load::{Slice, new_histogram};

/// A difference smaller than this says nothing about any machine.
const LEAST_DIFFERENCE: f64 = 0.03;

/// One line of a question: the same work done in several ways.
pub struct Case<'a> {
    /// What is done: "16x1, io_uring".
    pub name: String,
    /// The ways, of which the first is what the others are compared with.
    pub variants: Vec<Variant<'a>>,
}

/// One way.
pub struct Variant<'a> {
    /// How it is done: "write + flush".
    pub name: String,
    /// Measures one slice.
    pub run: Box<dyn FnMut() -> Result<Slice> + 'a>,
    /// What others measured.
    pub published: Option<Published>,
}

/// A figure that was measured elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// The figure.
    pub value: f64,
    /// Of what.
    pub unit: &'static str,
}

/// What one way of one case came to.
#[derive(Debug)]
pub struct Row {
    /// Which question it answers.
    pub question: &'static str,
    /// The case's name.
    pub case: String,
    /// The variant's name.
    pub variant: String,
    /// Requests per second: the median of the rounds.
    pub rate: f64,
    /// Bytes per second: the median of the rounds.
    pub throughput: f64,
    /// Nanoseconds of each request of all rounds.
    pub latency: Histogram<u64>,
    /// Nanoseconds of processor time per request.
    pub processor: f64,
    /// What the device saw in all rounds.
    pub device: Option<DeviceCounts>,
    /// Against the baseline; `None` for the baseline itself.
    pub ratio: Option<Ratio>,
    /// What others measured.
    pub published: Option<Published>,
}

/// How many times faster than the baseline: medians and extremes over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// In the middle.
    pub median: f64,
    /// The lowest round.
    pub low: f64,
    /// The highest round.
    pub high: f64,
}

impl Ratio {
    /// Of the rates of each round.
    pub fn of(baseline: &[f64], variant: &[f64]) -> Self {
        let each = variant.iter().zip(baseline).map(|(ours, theirs)| ours / theirs);
        let mut each: Vec<f64> = each.collect();
        each.sort_by(f64::total_cmp);
        Self { median: middle(&each), low: each[0], high: each[each.len() - 1] }
    }

    /// Whether nothing can be concluded: the rounds do not agree on who is faster, or the difference
    /// is too small to mean anything.
    pub fn is_noise(self) -> bool {
        let distance = (self.median - 1.0).abs();
        (self.low <= 1.0 && self.high >= 1.0) || distance < LEAST_DIFFERENCE
    }
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

/// Runs every variant once in each round, in turns.
///
/// # Errors
/// The first that a slice answers.
pub fn run_case(
    question: &'static str,
    case: Case<'_>,
    rounds: usize,
    mut tick: impl FnMut(),
) -> Result<Vec<Row>> {
    let Case { name, mut variants } = case;
    let mut slices: Vec<Vec<Slice>> = variants.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for turn in 0..variants.len() {
            // Nobody always comes right after the same one.
            let which = if round % 2 == 0 { turn } else { variants.len() - 1 - turn };
            let variant = &mut variants[which];
            let slice = (variant.run)().with_context(|| format!("{name}, {}", variant.name))?;
            slices[which].push(slice);
            tick();
        }
    }
    let rates: Vec<Vec<f64>> =
        slices.iter().map(|slices| slices.iter().map(Slice::rate).collect()).collect();
    let rows = variants.into_iter().zip(&slices).enumerate().map(|(index, (variant, slices))| {
        let ratio = (index > 0).then(|| Ratio::of(&rates[0], &rates[index]));
        let (latency, device) = together(slices);
        let processor: f64 = slices.iter().map(|slice| slice.processor.as_secs_f64()).sum();
        Row {
            question,
            case: name.clone(),
            variant: variant.name,
            rate: median(slices.iter().map(Slice::rate)),
            throughput: median(
                slices.iter().map(|slice| slice.bytes as f64 / slice.elapsed.as_secs_f64()),
            ),
            processor: processor * 1e9 / latency.len() as f64,
            latency,
            device,
            ratio,
            published: variant.published,
        }
    });
    Ok(rows.collect())
}

fn together(slices: &[Slice]) -> (Histogram<u64>, Option<DeviceCounts>) {
    let mut latency = new_histogram();
    for slice in slices {
        latency.add(&slice.latency).expect("both are of the same kind");
    }
    let devices = slices.iter().map(|slice| slice.device);
    let device = devices.reduce(|sum, next| Some(sum?.plus(next?))).flatten();
    (latency, device)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    middle(&values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_rounds() {
        // The machine became four times slower meanwhile, and the ratio did not change.
        let ratio = Ratio::of(&[400.0, 200.0, 100.0], &[800.0, 400.0, 200.0]);
        assert_eq!(ratio, Ratio { median: 2.0, low: 2.0, high: 2.0 });
        assert!(!ratio.is_noise());
    }

    #[test]
    fn what_rounds_do_not_agree_on_is_noise() {
        assert!(Ratio::of(&[100.0; 3], &[90.0, 140.0, 150.0]).is_noise());
        assert!(Ratio::of(&[100.0; 3], &[101.0, 101.5, 102.0]).is_noise());
        assert!(!Ratio::of(&[100.0; 3], &[70.0, 80.0, 90.0]).is_noise());
    }
}
