//! The answer to each question in a sentence, made from the figures.
//!
//! A sentence tells the median over the cases of how many times as fast each way is as the baseline, the extremes, and
//! how many cases are within noise; where all are, it says perhaps.

use blockhouse_figures::Spread;

use super::Report;
use super::plot::digits;
use crate::bench::questions::Question;
use crate::bench::rows::{Ratio, Row};

/// A difference smaller than this is none.
const MIN_DIFFERENCE: f64 = 0.03;

/// The name of each question that was asked, with its answer.
pub fn of(report: &Report) -> Vec<(&'static str, String)> {
    let answer = |question: Question| {
        let name = question.name();
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.question == name).collect();
        let left_out = report.left_out.iter().find(|one| one.question == name);
        match (sentence(question.subject(), &rows), left_out) {
            (Some(sentence), _) => Some((name, sentence)),
            (None, Some(left_out)) => Some((name, format!("Not measured: {}.", left_out.why))),
            (None, None) => None,
        }
    };
    Question::All.parts().into_iter().filter_map(answer).collect()
}

/// What the rows of one question say; `None` without any.
fn sentence(subject: &str, rows: &[&Row]) -> Option<String> {
    let baseline = &rows.first()?.variant;
    let mut ways: Vec<(&str, Vec<Ratio>)> = Vec::new();
    for row in rows {
        let Some(ratio) = row.ratio else { continue };
        match ways.iter_mut().find(|(name, _)| *name == row.variant) {
            Some((_, ratios)) => ratios.push(ratio),
            None => ways.push((&row.variant, vec![ratio])),
        }
    }
    let (first, others) = ways.split_first()?;
    let mut text = format!(
        "{subject} {} with “{}” as with “{baseline}” {}",
        verdict(&first.1),
        first.0,
        detail(&first.1)
    );
    for (name, ratios) in others {
        text.push_str(&format!("; {} with “{name}” {}", verdict(ratios), detail(ratios)));
    }
    text.push('.');
    Some(text)
}

fn medians(ratios: &[Ratio]) -> Spread {
    let medians = ratios.iter().map(|ratio| ratio.median);
    Spread::of(medians).expect("a way has one case at least")
}

fn verdict(ratios: &[Ratio]) -> String {
    let median = medians(ratios).median;
    match ratios.iter().all(|ratio| ratio.is_noise()) {
        _ if (median - 1.0).abs() < MIN_DIFFERENCE => "about as fast".into(),
        true => format!("perhaps {} times as fast", digits(median)),
        false => format!("{} times as fast", digits(median)),
    }
}

fn detail(ratios: &[Ratio]) -> String {
    let noisy = ratios.iter().filter(|ratio| ratio.is_noise()).count();
    let (low, high) = match ratios {
        [one] => (one.low, one.high),
        _ => (medians(ratios).min, medians(ratios).max),
    };
    let range = format!("{} to {}", digits(low), digits(high));
    match (ratios.len(), noisy) {
        (1, 0) => format!("({range} in its rounds)"),
        (1, _) => format!("({range} in its rounds, which is noise)"),
        (cases, 0) => format!("({range} in {cases} cases)"),
        (cases, noisy) if noisy == cases => format!("({range} in {cases} cases, all within noise)"),
        (cases, noisy) => format!("({range} in {cases} cases, {noisy} of them within noise)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::load::new_histogram;

    fn row(case: &str, variant: &str, ratio: Option<f64>) -> Row {
        let ratio =
            ratio.map(|median| Ratio { median, low: median - 0.1, high: median + 0.1, rounds: 7 });
        Row {
            question: "fua",
            case: case.into(),
            variant: variant.into(),
            rounds: 7,
            rate: 1.0,
            throughput: 1.0,
            latency: new_histogram(),
            processor: 1.0,
            device: None,
            ratio,
            published: None,
            published_ratio: None,
            note: None,
        }
    }

    fn told(rows: &[Row]) -> Option<String> {
        sentence("Durable writes are", &rows.iter().collect::<Vec<_>>())
    }

    #[test]
    fn a_sentence_tells_the_median_and_the_extremes() {
        let mut rows = Vec::new();
        for (case, ratio) in [("a", 1.5), ("b", 1.25), ("c", 2.0)] {
            rows.extend([row(case, "two", None), row(case, "one", Some(ratio))]);
        }
        let expected =
            "Durable writes are 1.5 times as fast with “one” as with “two” (1.25 to 2 in 3 cases).";
        assert_eq!(told(&rows).as_deref(), Some(expected));
        rows.push(row("c", "none", Some(1.05)));
        let told = told(&rows).unwrap();
        let more = "; perhaps 1.05 times as fast with “none” (0.95 to 1.15 in its rounds, which is noise).";
        assert!(told.ends_with(more), "{told}");
    }

    #[test]
    fn nothing_is_said_without_figures() {
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[row("a", "two", None)]), None);
    }
}
