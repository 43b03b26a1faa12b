//! The report as Markdown, to be kept: the environment, and two tables for each storage.

use std::fmt::Write;

use super::{Environment, Figure};
use crate::results::StorageResult;

/// The whole report.
pub fn render(environment: &Environment, results: &[StorageResult]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = header(&mut text, environment);
    for result in results {
        let _ = storage(&mut text, result);
    }
    text
}

fn header(text: &mut String, environment: &Environment) -> std::fmt::Result {
    writeln!(text, "- Processor: {}", environment.processor)?;
    writeln!(text, "- Kernel: {}", environment.kernel)?;
    for (name, version) in &environment.versions {
        writeln!(text, "- {name}: {version}")?;
    }
    if !environment.serve_args.is_empty() {
        writeln!(text, "- Arguments of `blockhouse serve`: `{}`", environment.serve_args)?;
    }
    let Environment { rounds, seconds, .. } = environment;
    writeln!(text, "- {rounds} interleaved rounds of {seconds} s; medians (smallest..largest)")
}

fn storage(text: &mut String, result: &StorageResult) -> std::fmt::Result {
    let size = result.storage.size() >> 20;
    writeln!(text, "\n### {}, {size} MiB\n", capitalized(result.storage.description()))?;
    writeln!(text, "Rate, and microseconds of server CPU per request:\n")?;
    let Some(first) = result.rows.first() else { return Ok(()) };
    write!(text, "| row | unit |")?;
    for (kind, _) in &first.servers {
        write!(text, " {} |", kind.name())?;
    }
    writeln!(text, "\n| --- | --- |{}", " ---: |".repeat(first.servers.len()))?;
    for row in &result.rows {
        write!(text, "| {} | {} |", row.row.name, row.unit())?;
        for (kind, _) in &row.servers {
            let rate = row.spread(Figure::Rate, *kind);
            let cpu = row.spread(Figure::ServerCpu, *kind);
            match (rate, cpu) {
                (Some(rate), Some(cpu)) => write!(text, " {rate:.1}, {:.2} us |", cpu.median)?,
                _ => write!(text, " |")?,
            }
        }
        writeln!(text)?;
    }
    comparisons(text, result)
}

fn comparisons(text: &mut String, result: &StorageResult) -> std::fmt::Result {
    if result.rows.iter().all(|row| row.comparisons(&result.storage).is_empty()) {
        return Ok(());
    }
    writeln!(text, "\nAgainst the best peer of the same way of caching, round by round:\n")?;
    writeln!(text, "| row | ours | rate | of peer | server CPU | of peer | rate | of ceiling |")?;
    writeln!(text, "| --- | --- | ---: | --- | ---: | --- | ---: | --- |")?;
    for row in &result.rows {
        for comparison in row.comparisons(&result.storage) {
            let (rate, cpu) = (&comparison.rate, &comparison.server_cpu);
            let ceiling = comparison.ceiling.as_ref().map_or_else(
                || " | ".to_owned(),
                |ceiling| format!("{:.2} | {}", ceiling.ratio, ceiling.peer.name()),
            );
            writeln!(
                text,
                "| {} | {} | {:.2} | {} | {:.2} | {} | {ceiling} |",
                row.row.name,
                comparison.ours.name(),
                rate.ratio,
                rate.peer.name(),
                cpu.ratio,
                cpu.peer.name(),
            )?;
        }
    }
    Ok(())
}

fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    characters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}
