//! Cases, whose variants are measured in turns, and the ratios of their samples.
//!
//! The first variant of a case is its baseline. A ratio is computed within each round, because its
//! samples were taken close together. It is reported with its spread, or as noise
//! ([`Ratio::is_noise`]).

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockhouse_figures::Spread;
use hdrhistogram::Histogram;

use super::device::DeviceCounts;
use super::load::{Load, Sample, new_histogram};

/// The number of measurements of each variant, if there is time. If two variants are equally fast,
/// all seven rounds agree on the faster one in only one of 64 cases.
pub const ROUNDS: usize = 7;
/// The minimum difference from 1 of a ratio that is not noise.
const MIN_DIFFERENCE: f64 = 0.03;
/// The minimum number of rounds of a result. Fewer rounds would agree by chance too often.
const MIN_ROUNDS: usize = 5;

/// One line of a question: the same work done in several ways.
pub struct Case<'a> {
    /// The work: "16x1, io_uring".
    pub name: String,
    /// The ways to do the work. The first is the baseline.
    pub variants: Vec<Variant<'a>>,
}

/// The cases of a question.
pub struct Cases<'a> {
    /// The cases.
    pub cases: Vec<Case<'a>>,
    /// The reason why other cases are missing.
    pub missing: Option<String>,
}

impl<'a> Cases<'a> {
    /// These cases, with none missing.
    pub fn all(cases: impl IntoIterator<Item = Case<'a>>) -> Self {
        Self { cases: cases.into_iter().collect(), missing: None }
    }

    /// No cases, because of `why`.
    pub fn none(why: &str) -> Self {
        Self { cases: Vec::new(), missing: Some(why.into()) }
    }
}

/// One way to do the work of a case.
pub struct Variant<'a> {
    /// How it is done: "write + flush".
    pub name: String,
    /// Measures one sample.
    pub run: Box<dyn FnMut() -> Result<Sample> + 'a>,
    /// A published measurement of other authors.
    pub published: Option<Published>,
    /// The cost of each of its rounds.
    pub cost: Cost,
}

/// The cost of a sample in addition to the sample time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// The additional time of a sample.
    pub extra: Duration,
    /// Bytes that it writes at most.
    pub written: u64,
}

impl Cost {
    /// The cost of a sample of this load.
    pub fn of(load: Load) -> Self {
        Self { extra: Duration::ZERO, written: load.most_written() }
    }
}

/// A figure that was measured elsewhere, in requests a second.
#[derive(Clone, Copy, Debug)]
pub struct Published {
    /// The figure.
    pub value: f64,
    /// Where the figure is published, and what was measured.
    pub detail: &'static str,
}

impl Published {
    /// How many times faster than the baseline's published figure.
    fn ratio(self, baseline: Self) -> f64 {
        self.value / baseline.value
    }
}

/// The result of one way of one case.
#[derive(Debug)]
pub struct Row {
    /// The question that the row answers.
    pub question: &'static str,
    /// The case's name.
    pub case: String,
    /// The variant's name.
    pub variant: String,
    /// How often it was measured.
    pub rounds: usize,
    /// Requests per second: the median of the rounds.
    pub rate: f64,
    /// Bytes per second: the median of the rounds.
    pub throughput: f64,
    /// Nanoseconds of each request of all rounds.
    pub latency: Histogram<u64>,
    /// Nanoseconds of processor time per request.
    pub processor: f64,
    /// The device's counters in all rounds.
    pub device: Option<DeviceCounts>,
    /// The ratio to the baseline; `None` for the baseline itself.
    pub ratio: Option<Ratio>,
    /// A published measurement of other authors.
    pub published: Option<Published>,
    /// The ratio of the published measurement to its published baseline.
    pub published_ratio: Option<f64>,
    /// A further finding.
    pub note: Option<String>,
}

/// How many times faster than the baseline: medians and extremes over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The median round.
    pub median: f64,
    /// The lowest round.
    pub low: f64,
    /// The highest round.
    pub high: f64,
    /// The number of rounds.
    pub rounds: usize,
}

impl Ratio {
    /// The ratio of the rates of each round.
    pub fn of(baseline: &[f64], variant: &[f64]) -> Self {
        let Spread { median, min, max } =
            Spread::of_ratios(variant, baseline).expect("a case has one round at least");
        Self { median, low: min, high: max, rounds: variant.len().min(baseline.len()) }
    }

    /// Whether the ratio shows no difference: there are too few rounds, or they do not agree on
    /// which variant is faster, or the difference is too small.
    pub fn is_noise(self) -> bool {
        let distance = (self.median - 1.0).abs();
        let disagree = self.low <= 1.0 && self.high >= 1.0;
        self.rounds < MIN_ROUNDS || disagree || distance < MIN_DIFFERENCE
    }
}

/// Runs every variant once in each round, in turns. A further round begins only if the
/// longest round so far would fit before `end`.
///
/// # Errors
/// The first error of a sample.
pub fn run_case(
    question: &'static str,
    case: Case<'_>,
    (rounds, end): (usize, Instant),
    mut tick: impl FnMut(),
) -> Result<Vec<Row>> {
    let Case { name, mut variants } = case;
    let mut samples: Vec<Vec<Sample>> = variants.iter().map(|_| Vec::new()).collect();
    let mut longest = Duration::ZERO;
    for round in 0..rounds {
        let begin = Instant::now();
        if round > 0 && begin + longest > end {
            break;
        }
        for turn in 0..variants.len() {
            // The order alternates, so that no variant always runs after the same other one.
            let which = if round % 2 == 0 { turn } else { variants.len() - 1 - turn };
            let variant = &mut variants[which];
            let sample = (variant.run)().with_context(|| format!("{name}, {}", variant.name))?;
            samples[which].push(sample);
            tick();
        }
        longest = longest.max(begin.elapsed());
    }
    Ok(rows_of(question, &name, variants, &samples))
}

fn rows_of(
    question: &'static str,
    case: &str,
    variants: Vec<Variant<'_>>,
    samples: &[Vec<Sample>],
) -> Vec<Row> {
    let baseline: Vec<f64> = samples[0].iter().map(Sample::rate).collect();
    let published = variants[0].published;
    let rows = variants.into_iter().zip(samples).enumerate().map(|(index, (variant, samples))| {
        let rates: Vec<f64> = samples.iter().map(Sample::rate).collect();
        let (latency, device) = together(samples);
        let processor: f64 = samples.iter().map(|sample| sample.processor.as_secs_f64()).sum();
        let throughput = |sample: &Sample| sample.bytes as f64 / sample.elapsed.as_secs_f64();
        let is_baseline = index == 0;
        Row {
            question,
            case: case.to_owned(),
            variant: variant.name,
            rounds: samples.len(),
            throughput: median(samples.iter().map(throughput)),
            processor: processor * 1e9 / latency.len() as f64,
            latency,
            device,
            ratio: (!is_baseline).then(|| Ratio::of(&baseline, &rates)),
            rate: median(rates.into_iter()),
            published: variant.published,
            published_ratio: match (variant.published, published) {
                (Some(ours), Some(baseline)) if !is_baseline => Some(ours.ratio(baseline)),
                _ => None,
            },
            note: notes(samples),
        }
    });
    rows.collect()
}

/// The notes of the samples in their order. A note that equals the one before it is left out.
fn notes(samples: &[Sample]) -> Option<String> {
    let mut notes: Vec<&str> = samples.iter().filter_map(|sample| sample.note.as_deref()).collect();
    notes.dedup();
    (!notes.is_empty()).then(|| notes.join("; then "))
}

fn together(samples: &[Sample]) -> (Histogram<u64>, Option<DeviceCounts>) {
    let mut latency = new_histogram();
    for sample in samples {
        latency.add(&sample.latency).expect("both are of the same kind");
    }
    let devices = samples.iter().map(|sample| sample.device);
    let device = devices.reduce(|sum, next| Some(sum?.plus(next?))).flatten();
    (latency, device)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    Spread::of(values).expect("a case has one round at least").median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_within_rounds() {
        // The machine became four times slower meanwhile, and the ratio did not change.
        let ratio =
            Ratio::of(&[400.0, 300.0, 200.0, 150.0, 100.0], &[800.0, 600.0, 400.0, 300.0, 200.0]);
        assert_eq!(ratio, Ratio { median: 2.0, low: 2.0, high: 2.0, rounds: 5 });
        assert!(!ratio.is_noise());
    }

    #[test]
    fn what_rounds_do_not_agree_on_is_noise() {
        let ratio = |rates: &[f64]| Ratio::of(&[100.0; 5][..rates.len()], rates);
        assert!(ratio(&[90.0, 140.0, 150.0, 140.0, 150.0]).is_noise());
        assert!(ratio(&[101.0, 101.5, 102.0, 101.0, 101.0]).is_noise());
        assert!(!ratio(&[70.0, 80.0, 90.0, 80.0, 70.0]).is_noise());
    }

    #[test]
    fn a_few_rounds_that_agree_are_noise_all_the_same() {
        assert!(Ratio::of(&[100.0; 4], &[300.0; 4]).is_noise());
    }
}
