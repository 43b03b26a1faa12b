//! The results as a table and as JSON.

use std::io::{self, Write};

use anyhow::Result;
use blockhouse_core::Fua;
use serde_json::{Value, json};

use super::rows::{Published, Row};
use super::{Bench, ROUNDS};

/// Prints JSON to standard output.
pub fn print_json(results: &Value) -> Result<()> {
    Ok(writeln!(io::stdout(), "{results:#}")?)
}

/// Prints a table to standard output.
pub fn print_table(bench: &Bench, rows: &[Row]) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", circumstances(bench))?;
    let mut last = None;
    for row in rows {
        let case = Some((row.question, &row.case));
        if last != case {
            writeln!(out, "\n{}: {}", row.question, row.case)?;
            writeln!(
                out,
                "  {:<14} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8}  {:<22} {:<20} elsewhere",
                "",
                "IOPS",
                "MiB/s",
                "p50 us",
                "p99 us",
                "p99.9 us",
                "CPU us",
                "ratio (spread)",
                "device per request"
            )?;
            last = case;
        }
        writeln!(out, "{}", line(row))?;
    }
    Ok(out.flush()?)
}

/// What the disk is, for people.
pub fn circumstances(bench: &Bench) -> String {
    let device = match &bench.device {
        None => "device not visible".to_owned(),
        Some(device) => {
            let fua = device.fua().unwrap_or("unknown");
            format!(
                "device {} (FUA {fua}; its statistics count what everybody does)",
                device.name()
            )
        }
    };
    format!(
        "cache mode {}, durable writes {}, {device}; medians of {ROUNDS} rounds; 'elsewhere': \
         published by others, on other machines",
        bench.cache.as_str(),
        fua(bench).as_str()
    )
}

fn fua(bench: &Bench) -> Fua {
    bench.disk.capabilities().fua
}

fn line(row: &Row) -> String {
    let microseconds = |quantile| row.latency.value_at_quantile(quantile) as f64 / 1e3;
    let ratio = match row.ratio {
        None => "baseline".to_owned(),
        Some(ratio) if ratio.is_noise() => {
            format!("within noise ({:.2}..{:.2})", ratio.low, ratio.high)
        }
        Some(ratio) => format!("{:.2} ({:.2}..{:.2})", ratio.median, ratio.low, ratio.high),
    };
    let device = row.device.map_or("-".to_owned(), |device| {
        let each = |count: u64| count as f64 / row.latency.len() as f64;
        let (read, write, flush) = (each(device.reads), each(device.writes), each(device.flushes));
        format!("{read:.2}r {write:.2}w {flush:.2}f")
    });
    let published = row.published.map_or(String::new(), |one| figure(&one));
    let text = format!(
        "  {:<14} {:>9.0} {:>9.1} {:>8.1} {:>8.1} {:>8.1} {:>8.1}  {ratio:<22} {device:<20} {published}",
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

fn figure(published: &Published) -> String {
    format!("{} {}", published.value, published.unit)
}

/// The results as JSON.
pub fn json(bench: &Bench, rows: &[Row]) -> Value {
    let device =
        bench.device.as_ref().map(|device| json!({ "name": device.name(), "fua": device.fua() }));
    json!({
        "version": 1,
        "cache": bench.cache.as_str(),
        "fua": fua(bench).as_str(),
        "device": device,
        "rounds": ROUNDS,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

fn row(row: &Row) -> Value {
    let latency = |quantile| row.latency.value_at_quantile(quantile);
    json!({
        "question": row.question,
        "case": row.case,
        "variant": row.variant,
        "requests": row.latency.len(),
        "requests-per-second": row.rate,
        "bytes-per-second": row.throughput,
        "latency-ns": { "p50": latency(0.5), "p99": latency(0.99), "p99.9": latency(0.999) },
        "cpu-ns-per-request": row.processor,
        "device": row.device.map(|device| json!({
            "reads": device.reads, "writes": device.writes, "flushes": device.flushes,
        })),
        "ratio": row.ratio.map(|ratio| json!({
            "median": ratio.median, "low": ratio.low, "high": ratio.high,
            "within-noise": ratio.is_noise(),
        })),
        "published-elsewhere": row.published.map(|one| json!({
            "value": one.value, "unit": one.unit,
        })),
    })
}
