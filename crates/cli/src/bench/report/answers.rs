//! The answer to each question in a sentence, made from the figures.
//!
//! The sentence gives, for each variant, the speed relative to the baseline: the median over the
//! cases, and the extremes. Noisy cases are only counted. If all cases are noise, the sentence
//! gives their range and says that it is noise.

use blockhouse_figures::Spread;

use super::Report;
use super::plot::digits;
use crate::bench::questions::Question;
use crate::bench::rows::{Ratio, Row};

/// A smaller difference is treated as no difference.
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

/// The result of the rows of one question, in a sentence; `None` without rows.
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

/// The speed relative to the baseline, in words: the median over the cases that are not noise. If
/// all cases are noise, the words say that no difference was found.
fn verdict(ratios: &[Ratio]) -> String {
    let clear = clear(ratios);
    if clear.is_empty() {
        return "as fast, as far as noise lets one tell,".into();
    }
    match medians(&clear).median {
        median if (median - 1.0).abs() < MIN_DIFFERENCE => "about as fast".into(),
        median => format!("{} times as fast", digits(median)),
    }
}

fn clear(ratios: &[Ratio]) -> Vec<Ratio> {
    ratios.iter().copied().filter(|ratio| !ratio.is_noise()).collect()
}

fn detail(ratios: &[Ratio]) -> String {
    let clear = clear(ratios);
    let told = if clear.is_empty() { ratios } else { &clear };
    let (low, high) = match told {
        [one] => (one.low, one.high),
        _ => (medians(told).min, medians(told).max),
    };
    let range = format!("{} to {}", digits(low), digits(high));
    let cases =
        |count: usize| if count == 1 { "its rounds".into() } else { format!("{count} cases") };
    match (told.len(), ratios.len() - clear.len()) {
        (told, 0) => format!("({range} in {})", cases(told)),
        (told, _) if clear.is_empty() => format!("({range} in {}, which is noise)", cases(told)),
        (told, 1) => format!("({range} in {}; one more case is noise)", cases(told)),
        (told, noisy) => format!("({range} in {}; {noisy} more cases are noise)", cases(told)),
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
        let more = "; as fast, as far as noise lets one tell, with “none” (0.95 to 1.15 in its rounds, which is noise).";
        assert!(told.ends_with(more), "{told}");
    }

    #[test]
    fn what_is_noise_makes_no_headline() {
        let mut rows = Vec::new();
        for (case, ratio) in [("a", 1.5), ("b", 1.05), ("c", 0.95)] {
            rows.extend([row(case, "two", None), row(case, "one", Some(ratio))]);
        }
        let expected = "Durable writes are 1.5 times as fast with “one” as with “two” \
                        (1.4 to 1.6 in its rounds; 2 more cases are noise).";
        assert_eq!(told(&rows).as_deref(), Some(expected));
    }

    #[test]
    fn nothing_is_said_without_figures() {
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[row("a", "two", None)]), None);
    }
}
