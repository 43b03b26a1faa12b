//! The results as a table on the terminal.

use std::fmt::Write;

use anyhow::Result;

use super::{Report, answers};
use crate::bench::rows::{Published, Ratio, Row};
use crate::output;

/// Prints the table to standard output.
pub fn print(report: &Report) -> Result<()> {
    let mut out = String::new();
    writeln!(out, "{}\n{}", report.origin(), report.environment())?;
    writeln!(
        out,
        "Medians of rounds that took turns; the ratio is to the first line of each case, with the lowest \
         and highest round.\nThe device's requests are those of all programs. 'elsewhere': \
         published by others, measured on other machines."
    )?;
    let mut last = None;
    for row in &report.rows {
        let case = Some((row.question, &row.case));
        if last != case {
            writeln!(out, "\n{}: {}", row.question, row.case)?;
            writeln!(out, "{HEADER}")?;
            last = case;
        }
        writeln!(out, "{}", line(row))?;
        if let Some(note) = &row.note {
            writeln!(out, "    {note}")?;
        }
    }
    for one in &report.left_out {
        let case = one.case.as_ref().map_or(String::new(), |case| format!(", {case}"));
        writeln!(out, "\nleft out: {}{case}: {}", one.question, one.why)?;
    }
    writeln!(out)?;
    for (name, answer) in answers::of(report) {
        writeln!(out, "{name}: {answer}")?;
    }
    output::print(out.trim_end())
}

const HEADER: &str = "                           IOPS     MiB/s   p50 us   p99 us p99.9 us   CPU us  \
                      ratio (spread)            device per request   elsewhere";

fn line(row: &Row) -> String {
    let microseconds = |quantile| row.latency.value_at_quantile(quantile) as f64 / 1e3;
    let ratio = row.ratio.map_or("baseline".to_owned(), ratio);
    let device = device(row);
    let published = row.published.map_or(String::new(), |one| figure(&one, row.published_ratio));
    let text = format!(
        "  {:<19} {:>9.0} {:>9.1} {:>8.1} {:>8.1} {:>8.1} {:>8.1}  {ratio:<25} {device:<20} {published}",
        row.variant,
        row.rate,
        row.throughput / f64::from(1 << 20),
        microseconds(0.5),
        microseconds(0.99),
        microseconds(0.999),
        row.processor / 1e3,
    );
    text.trim_end().to_owned()
}

/// A ratio with its spread, or a text that it is noise.
pub fn ratio(ratio: Ratio) -> String {
    let Ratio { median, low, high, .. } = ratio;
    if ratio.is_noise() {
        format!("within noise ({low:.2}..{high:.2})")
    } else {
        format!("{median:.2} ({low:.2}..{high:.2})")
    }
}

/// The device's requests for each request: reads, writes, flushes.
pub fn device(row: &Row) -> String {
    row.device.map_or("-".to_owned(), |device| {
        let each = |count: u64| count as f64 / row.latency.len() as f64;
        let (read, write, flush) = (each(device.reads), each(device.writes), each(device.flushes));
        format!("{read:.2}r {write:.2}w {flush:.2}f")
    })
}

/// A published figure.
pub fn figure(published: &Published, ratio: Option<f64>) -> String {
    let Published { value, detail } = published;
    let ratio = ratio.map_or(String::new(), |ratio| format!(", ratio {ratio:.2}"));
    format!("{value} IOPS{ratio} ({detail})")
}
